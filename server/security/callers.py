"""Accounts of callers: what each one has open, its limits, and which trajectories it owns.

A caller is a token's name up to an @, or a certificate's common name. If callers are not
authenticated, it is the host they call from. All processes with one token are one caller.

    calls                charged when a call is let in     freed when it ends
    turns in flight      when a turn begins                when it ends, with or without a listener
    tokens in flight     when a turn begins: its context   when it ends
                         and what it may still sample
    open trajectories    when its first turn begins        when it is closed, or forgotten
    unread bytes         when gRPC gets an answer          when the caller has read it, or is gone

A turn is checked against these limits before its prompt is rendered. It then counts as open, together
with the trajectory it opens. The number of its tokens is not known before rendering, so tokens are
checked again when the turn begins. A call over a limit is refused with CALLER_LIMIT and a retry delay.
Nothing waits here.

Every permitted call that names a trajectory proves that its agent is alive, even if the call then
fails. It renews the lease.

**Ownership.** An agent owns the attempts it leased and the trajectories it opened. It cannot
extend, read, abort or close another agent's. After a restart the owners are unknown. Any agent can
then use such a trajectory, and the one that takes its next turn becomes its owner. Trainers and
admins are not restricted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.common.token_file import Role
from penstock.server.core.errors import DomainError
from penstock.server.rpc.boundary import Call, Handler
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from penstock.server.config.limits import CallerLimits
    from penstock.server.security.credentials import Caller
    from penstock.server.turns.runner import Turn

RETRY_SECONDS = 1.0
MOST_OWNERS = 20_000
"""Most trajectories with a known owner, in addition to the open ones. The least recently called one
is forgotten first."""
MOST_ACCOUNTS = 1024
"""Number of accounts above which idle ones are closed."""

COPIES = 3
"""Copies in memory of an unread answer: the message, its bytes, and those that gRPC holds. An
incomplete request also counts as three: two of the part that has arrived, and the parsed result."""

# The trajectories that a call names, by rpc.
OWNED: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "RolloutService/Generate": lambda request: (
        request.trajectory_id,
        request.parent_trajectory_id,
    ),
    "RolloutService/Continue": lambda request: (request.trajectory_id,),
    "RolloutService/GetTrajectory": lambda request: (request.trajectory_id,),
    "TaskService/CompleteTrajectory": lambda request: (request.trajectory_id,),
    "TaskService/RenewLease": lambda request: request.trajectory_ids,
}


@dataclass(slots=True)
class _Account:
    calls: int = 0
    turns: int = 0
    tokens: int = 0
    unread: int = 0
    """Bytes of unread answers and of incomplete requests."""
    opening: int = 0
    """Trajectories about to be opened."""
    trajectories: set[str] = field(default_factory=set[str])
    """The ones that were open at the last count."""

    @property
    def idle(self) -> bool:
        return not (self.calls or self.turns or self.trajectories)


class Visit:
    """One call of a caller, from its admission to its end."""

    def __init__(self, caller: Caller, account: _Account) -> None:
        self.caller = caller
        self.account = account
        self._places = self._opening = 0
        account.calls += 1

    def reserve_turn(self, *, opens: bool) -> None:
        """Reserves a slot for a turn that is about to begin, and for the trajectory that it
        opens."""
        self._places += 1
        self.account.turns += 1
        self._opening += opens
        self.account.opening += opens

    def turn_began(self) -> None:
        """Frees the reservation, because the turn and its trajectory now count themselves."""
        self.account.turns -= self._places
        self.account.opening -= self._opening
        self._places = self._opening = 0

    def leave(self) -> None:
        """Ends the call and frees what it still holds."""
        self.turn_began()
        self.account.calls -= 1


VISIT: ContextVar[Visit | None] = ContextVar("penstock_visit", default=None)
"""The call being served; None if the server runs without a gate."""


class Callers:
    """The accounts of all callers and the owners of all trajectories."""

    def __init__(self, limits: CallerLimits, unread_bytes: int = 1 << 28) -> None:
        """`unread_bytes` is the default for what a caller may leave unread."""
        self._limits = limits
        self._unread_bytes = limits.unread_bytes or unread_bytes
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._owners: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self.is_open: Callable[[str], bool] = _always
        """Whether a trajectory is open. Set by the server to ask its store."""
        self.turns_in_flight: Callable[[], Iterable[Turn]] = tuple
        self.on_call: Callable[[str], None] = _nothing
        """Called with each trajectory that a permitted call names, before the call is served."""
        self.on_group_call: Callable[[str, Callable[[str], bool]], None] = _nothing
        """The same for a group. The second argument decides whether the caller owns a
        trajectory."""
        self.unread_bytes = 0
        """Unread answers of all callers, and incomplete HTTP requests."""
        self.check_memory: Callable[[int], None] = _nothing
        """Raises MEMORY_BUDGET if this many bytes do not fit. Set by the server to ask its
        budget."""
        self.refusals: dict[str, float] = {}
        """Refused calls by reason, for metrics."""

    def refused(self, error: DomainError) -> None:
        """Counts a call that was refused at the gate or later."""
        self.refusals[error.reason] = self.refusals.get(error.reason, 0) + 1

    @property
    def message_bytes(self) -> int:
        return self._limits.message_bytes

    def enter(self, caller: Caller) -> Visit:
        """Opens a call of a caller. Raises CALLER_LIMIT."""
        account = self._account(caller)
        self._check(caller, "calls", account.calls, self._limits.calls)
        return Visit(caller, account)

    def turn_started(self, turn: Turn) -> None:
        """Charges a turn that began in the current call, until it ends."""
        visit = VISIT.get()
        if visit is None or turn.task is None:
            return
        account, trajectory_id = visit.account, turn.record.trajectory_id
        tokens = turn.context_token_count + turn.budget
        visit.turn_began()
        account.turns += 1
        account.tokens += tokens
        account.trajectories.add(trajectory_id)
        if trajectory_id not in self._owners:
            self._own(trajectory_id, _key(visit.caller))

        def ended(_: object) -> None:
            account.turns -= 1
            account.tokens -= tokens

        turn.task.add_done_callback(ended)

    def unread(self, byte_count: int) -> AbstractContextManager[None]:
        """Charges an answer of the current call until its caller has read it or is gone.

        Raises CALLER_LIMIT if the caller has already left too much unread.
        """
        visit = VISIT.get()
        if visit is not None and visit.account.unread:
            count, most = visit.account.unread + byte_count, self._unread_bytes
            self._check(visit.caller, "unread_bytes", count, most)
        return self.unread_group(byte_count)

    @contextmanager
    def arriving(self) -> Generator[Callable[[int], None]]:
        """Charges a request of the current call while it is being read.

        Yields a function to call with the size of each piece before keeping it. It raises
        CALLER_LIMIT and MEMORY_BUDGET.
        """
        visit = VISIT.get()
        assert visit is not None, "requests are counted behind the gate"
        account, caller, kept = visit.account, visit.caller, 0

        def keep(byte_count: int) -> None:
            nonlocal kept
            if account.unread > kept:
                self._check(caller, "unread_bytes", account.unread + byte_count, self._unread_bytes)
            self.check_memory(COPIES * byte_count)
            kept += byte_count
            account.unread += byte_count
            self.unread_bytes += byte_count

        try:
            yield keep
        finally:
            account.unread -= kept
            self.unread_bytes -= kept

    @contextmanager
    def unread_group(self, byte_count: int) -> Generator[None]:
        """Charges an answer like `unread`, but without a limit."""
        visit = VISIT.get()
        assert visit is not None, "answers are counted behind the gate"
        account = visit.account
        account.unread += byte_count
        self.unread_bytes += byte_count
        try:
            yield
        finally:
            account.unread -= byte_count
            self.unread_bytes -= byte_count

    def check_tokens(self) -> None:
        """Checks that a turn of the current call may begin, now that its prompt is rendered.

        Other turns may have begun in the meantime. Raises CALLER_LIMIT.
        """
        visit = VISIT.get()
        if visit is not None:
            count, most = visit.account.tokens, self._limits.tokens_in_flight
            self._check(visit.caller, "tokens_in_flight", count, most)

    def guard(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        """Wraps each handler in the checks of this module."""
        guarded = {name: self._guard(name, handler) for name, handler in handlers.items()}
        guarded["TaskService/LeaseTasks"] = self._claim(guarded["TaskService/LeaseTasks"])
        return guarded

    def _guard(self, name: str, handler: Handler) -> Handler:
        trajectories = OWNED.get(name)
        opens = name == "RolloutService/Generate"
        begins_turn = opens or name == "RolloutService/Continue"
        aborts = name == "RolloutService/Abort"
        if trajectories is None and not aborts:
            return handler

        def guarded(request: Any, call: Call) -> Any:
            visit = VISIT.get()
            named = () if trajectories is None else tuple(trajectories(request))
            if visit is not None:
                self._check_own(visit.caller, named)
                if aborts:
                    self._check_abort(visit.caller, request)
            # From here on a refused call counts as a sign of life too.
            for trajectory_id in named:
                self.on_call(trajectory_id)
            if aborts:
                self._abort_called(visit, request)
            if visit is not None and begins_turn:
                self._check_turn(visit, opens=opens)
                visit.reserve_turn(opens=opens)
            return handler(request, call)

        return guarded

    def begin_turn(self, *trajectory_ids: str, opens: bool = False) -> None:
        """Makes the checks of `guard` for a turn that no rpc asks for. Raises DomainError."""
        visit = VISIT.get()
        if visit is not None:
            self._check_own(visit.caller, trajectory_ids)
        for trajectory_id in trajectory_ids:
            self.on_call(trajectory_id)
        if visit is not None:
            self._check_turn(visit, opens=opens)
            visit.reserve_turn(opens=opens)

    def check_own(self, trajectory_id: str) -> None:
        """Checks that no other agent owns a trajectory that the current caller names."""
        visit = VISIT.get()
        if visit is not None:
            self._check_own(visit.caller, (trajectory_id,))
        self.on_call(trajectory_id)

    def _claim(self, lease_tasks: Handler) -> Handler:
        """Makes the caller the owner of the attempts it leases."""

        async def claimed(request: Any, call: Call) -> AsyncIterator[Any]:
            visit = VISIT.get()
            async with aclosing(lease_tasks(request, call)) as leases:
                async for lease in leases:
                    if visit is not None:
                        self._own(lease.trajectory_id, _key(visit.caller))
                    yield lease

        return claimed

    # Limits.

    def _account(self, caller: Caller) -> _Account:
        key = _key(caller)
        account = self._accounts.get(key)
        if account is None:
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._close_idle()
            account = self._accounts[key] = _Account()
        return account

    def _close_idle(self) -> None:
        for key, account in list(self._accounts.items()):
            self._count_open(account)
            if account.idle:
                del self._accounts[key]

    def _count_open(self, account: _Account) -> int:
        account.trajectories = set(filter(self.is_open, account.trajectories))
        return len(account.trajectories)

    def _check_turn(self, visit: Visit, *, opens: bool) -> None:
        caller, account, limits = visit.caller, visit.account, self._limits
        self._check(caller, "turns_in_flight", account.turns, limits.turns_in_flight)
        self._check(caller, "tokens_in_flight", account.tokens, limits.tokens_in_flight)
        # Count again only if there seems to be no room: the last count is never too low.
        most = limits.open_trajectories
        if opens and len(account.trajectories) + account.opening >= most:
            count = self._count_open(account) + account.opening
            self._check(caller, "open_trajectories", count, most)

    def _check(self, caller: Caller, limit: str, count: int, most: int) -> None:
        if count >= most:
            raise DomainError(
                Reason.CALLER_LIMIT,
                f"{caller} has {count} {limit.replace('_', ' ')}; at most {most} are allowed",
                {"caller": caller.name, "limit": limit, "count": count, "most": most},
                retry_after_seconds=RETRY_SECONDS,
            )

    # Ownership.

    def _abort_called(self, visit: Visit | None, request: Any) -> None:
        """Counts an agent's abort as a sign of life. A trainer's abort proves nothing about the
        agent."""
        if visit is not None and visit.caller.role is Role.TRAINER:
            return

        def is_callers(trajectory_id: str) -> bool:
            return visit is None or not self._is_anothers(visit.caller, trajectory_id)

        for trajectory_id in filter(is_callers, request.trajectories.trajectory_ids):
            self.on_call(trajectory_id)
        for group_id in request.groups.group_ids:
            self.on_group_call(group_id, is_callers)

    def _own(self, trajectory_id: str, key: tuple[str, str]) -> None:
        self._owners[trajectory_id] = key
        self._owners.move_to_end(trajectory_id)
        for oldest in list(islice(self._owners, max(0, len(self._owners) - MOST_OWNERS))):
            if self.is_open(oldest):
                self._owners.move_to_end(oldest)
            else:
                del self._owners[oldest]

    def _is_anothers(self, caller: Caller, trajectory_id: str) -> bool:
        owner = self._owners.get(trajectory_id)
        return owner is not None and owner != _key(caller)

    def _check_own(self, caller: Caller, trajectory_ids: Iterable[str]) -> None:
        if caller.role is not Role.AGENT:
            return
        for trajectory_id in trajectory_ids:
            if self._is_anothers(caller, trajectory_id):
                raise _not_own(caller, f"trajectory {trajectory_id}", trajectory_id)
            if trajectory_id in self._owners:
                self._owners.move_to_end(trajectory_id)

    def _check_abort(self, caller: Caller, request: Any) -> None:
        """Lets an agent abort only its own turns, and a group only if it owns all of the group's
        turns."""
        if caller.role is not Role.AGENT:
            return
        selector = request.WhichOneof("selector")
        if selector == "all":
            raise DomainError(
                Reason.ROLE_NOT_ALLOWED,
                f"{caller} may abort only its own trajectories and groups, not all",
                {"caller": caller.name, "role": Role.AGENT, "selector": "all"},
            )
        if selector == "trajectories":
            self._check_own(caller, request.trajectories.trajectory_ids)
        elif selector == "groups":
            wanted = set(request.groups.group_ids)
            for turn in self.turns_in_flight():
                record = turn.record
                if record.group_id in wanted and self._is_anothers(caller, record.trajectory_id):
                    what = f"a turn of group {record.group_id}"
                    raise _not_own(caller, what, record.trajectory_id)


def _not_own(caller: Caller, what: str, trajectory_id: str) -> DomainError:
    return DomainError(
        Reason.ROLE_NOT_ALLOWED,
        f"{what} belongs to another agent, not to {caller}",
        {"caller": caller.name, "role": Role.AGENT, "trajectory_id": trajectory_id},
    )


def _key(caller: Caller) -> tuple[str, str]:
    return caller.kind, caller.name


def _always(_: str) -> bool:
    return True


def _nothing(*_: object) -> None:
    pass
