"""Accounts of callers: what each one has open, and its limits.

A caller is a token's name up to an @, or a certificate's common name. If callers are not authenticated, it
is the host they call from. All processes with one token are one caller.

    calls                charged when a call is let in     freed when it ends
    turns in flight      when a turn begins                when it ends, with or without a listener
    tokens in flight     when a turn begins: its context   when it ends
                         and what it may still sample
    open trajectories    when its first turn begins        when it is closed, or forgotten
    unread bytes         when gRPC gets an answer          when the caller has read it, or is gone

A turn is checked before its prompt is rendered, and then counts as open, together with the trajectory it
opens. The number of its tokens is not known before rendering, so tokens are checked again when the turn
begins. A call over a limit is refused with CALLER_LIMIT and a retry delay; nothing waits here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from penstock.server.config.limits import CallerLimits
from penstock.server.core.errors import DomainError
from penstock.server.security.credentials import Caller
from penstock.server.turns.trajectory import Turn
from penstock.wire.reasons import Reason

MOST_ACCOUNTS = 1024
"""Number of accounts above which idle ones are closed."""

COPIES = 3
"""Copies in memory of an unread answer: the message, its bytes, and those that gRPC holds. Also of an
incomplete request: two of the part that has arrived, and the parsed result."""


@dataclass(slots=True)
class _Account:
    calls: int = 0
    turns: int = 0
    tokens: int = 0
    unread: int = 0
    """Bytes of unread answers and of incomplete requests."""
    opening: int = 0
    """Trajectories about to be opened."""
    trajectories: dict[str, Callable[[], bool]] = field(
        default_factory=dict[str, Callable[[], bool]]
    )
    """Those open at the last count, each with a function that returns whether it still is."""


class Visit:
    def __init__(self, caller: Caller, account: _Account) -> None:
        self.caller = caller
        self.account = account
        self._places = self._opening = 0
        account.calls += 1

    def reserve_turn(self, *, opens: bool) -> None:
        """Reserves a slot for a turn that is about to begin, and for the trajectory that it opens."""
        self._places += 1
        self.account.turns += 1
        self._opening += opens
        self.account.opening += opens

    def turn_began(self) -> None:
        """Frees the reservation, because the turn and its trajectory are now counted themselves."""
        self.account.turns -= self._places
        self.account.opening -= self._opening
        self._places = self._opening = 0

    def leave(self) -> None:
        self.turn_began()
        self.account.calls -= 1


VISIT: ContextVar[Visit | None] = ContextVar("penstock_visit", default=None)
"""None if the server runs without a gate."""


class Callers:
    def __init__(self, limits: CallerLimits, unread_bytes: int = 1 << 28) -> None:
        """`unread_bytes` is the default for what a caller may leave unread."""
        self._limits = limits
        self.message_bytes = limits.message_bytes
        self._unread_bytes = limits.unread_bytes or unread_bytes
        self._accounts: dict[tuple[str, str], _Account] = {}
        self.unread_bytes = 0
        """Unread answers of all callers, and incomplete HTTP requests."""
        self.refusals: dict[str, float] = {}
        """By reason, for metrics."""

    def refused(self, error: DomainError) -> None:
        self.refusals[error.reason] = self.refusals.get(error.reason, 0) + 1

    def enter(self, caller: Caller) -> Visit:
        """Raises CALLER_LIMIT."""
        account = self._accounts.get(caller.key)
        if account is None:
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._close_idle()
            account = self._accounts[caller.key] = _Account()
        self._check(caller, "calls", account.calls, self._limits.calls)
        return Visit(caller, account)

    def charge(
        self, visit: Visit, turn: Turn, task: asyncio.Task[None], is_open: Callable[[], bool]
    ) -> None:
        """Charges a turn until its task ends, and its trajectory for as long as it is open."""
        account = visit.account
        tokens = turn.context_token_count + turn.budget
        visit.turn_began()
        account.turns += 1
        account.tokens += tokens
        account.trajectories[turn.record.trajectory_id] = is_open

        def ended(_: object) -> None:
            account.turns -= 1
            account.tokens -= tokens

        task.add_done_callback(ended)

    def unread(self, byte_count: int) -> AbstractContextManager[None]:
        """Charges an answer of the current call until its caller has read it or is gone. Raises
        CALLER_LIMIT if the caller has already left too much unread."""
        visit = VISIT.get()
        if visit is not None and visit.account.unread:
            count, most = visit.account.unread + byte_count, self._unread_bytes
            self._check(visit.caller, "unread_bytes", count, most)
        return self.unread_group(byte_count)

    @contextmanager
    def arriving(self, check_memory: Callable[[int], None]) -> Generator[Callable[[int], None]]:
        """Charges a request of the current call while it is being read. Yields a function to call with the
        size of each piece before keeping it. It raises CALLER_LIMIT, or what `check_memory` raises."""
        visit = VISIT.get()
        assert visit is not None, "requests are counted behind the gate"
        account, caller, kept = visit.account, visit.caller, 0

        def keep(byte_count: int) -> None:
            nonlocal kept
            if account.unread > kept:
                self._check(caller, "unread_bytes", account.unread + byte_count, self._unread_bytes)
            check_memory(COPIES * byte_count)
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
        """Like `unread`, but without a limit."""
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
        """Called once the prompt is rendered, because other turns may have begun meanwhile. Raises
        CALLER_LIMIT."""
        visit = VISIT.get()
        if visit is not None:
            count, most = visit.account.tokens, self._limits.tokens_in_flight
            self._check(visit.caller, "tokens_in_flight", count, most)

    def _close_idle(self) -> None:
        for key, account in list(self._accounts.items()):
            if not (self._count_open(account) or account.calls or account.turns):
                del self._accounts[key]

    def _count_open(self, account: _Account) -> int:
        account.trajectories = {
            name: is_open for name, is_open in account.trajectories.items() if is_open()
        }
        return len(account.trajectories)

    def begin_turn(self, visit: Visit, *, opens: bool) -> None:
        """Raises CALLER_LIMIT."""
        caller, account, limits = visit.caller, visit.account, self._limits
        self._check(caller, "turns_in_flight", account.turns, limits.turns_in_flight)
        self._check(caller, "tokens_in_flight", account.tokens, limits.tokens_in_flight)
        # Count again only if there seems to be no room: the last count is never too low.
        most = limits.open_trajectories
        if opens and len(account.trajectories) + account.opening >= most:
            count = self._count_open(account) + account.opening
            self._check(caller, "open_trajectories", count, most)
        visit.reserve_turn(opens=opens)

    def _check(self, caller: Caller, limit: str, count: int, most: int) -> None:
        if count >= most:
            raise DomainError(
                Reason.CALLER_LIMIT,
                f"{caller} has {count} {limit.replace('_', ' ')}; at most {most} are allowed",
                {"caller": caller.name, "limit": limit, "count": count, "most": most},
            )
