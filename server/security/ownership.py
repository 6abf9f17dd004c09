"""Ownership: which caller each trajectory belongs to, and the checks before a call that names one.

An agent owns the attempts it leased and the trajectories it opened. It cannot extend, read, abort or close
another agent's. After a restart the owners are unknown: any agent can use such a trajectory, and the one
that takes its next turn becomes its owner. Trainers and admins are not restricted.

Every permitted call that names a trajectory renews its lease, even if the call then fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from penstock.common.token_file import Role
from penstock.server.core.errors import DomainError
from penstock.server.rpc.boundary import Call, Handler
from penstock.server.rpc.leases import CallLeases
from penstock.server.security.callers import VISIT, Callers
from penstock.server.security.credentials import Caller
from penstock.server.turns.runner import TurnRunner
from penstock.server.turns.store import TrajectoryStore
from penstock.server.turns.trajectory import Turn
from penstock.wire.reasons import Reason

MOST_OWNERS = 20_000
"""Most trajectories with a known owner, in addition to the open ones. The least recently called is
forgotten first."""

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


@dataclass(eq=False)
class Ownership:
    callers: Callers
    leases: CallLeases
    store: TrajectoryStore
    turns: TurnRunner
    _owners: OrderedDict[str, tuple[str, str]] = field(
        default_factory=OrderedDict[str, tuple[str, str]], init=False
    )

    def guard(self, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
        guarded = {name: self._guard(name, handler) for name, handler in handlers.items()}
        guarded["TaskService/LeaseTasks"] = self._claim(guarded["TaskService/LeaseTasks"])
        return guarded

    def _guard(self, name: str, handler: Handler) -> Handler:
        trajectories = OWNED.get(name)
        opens = name == "RolloutService/Generate"
        aborts = name == "RolloutService/Abort"
        if trajectories is None and not aborts:
            return handler

        def guarded(request: Any, call: Call) -> Any:
            if trajectories is None:
                self._begin_abort(request)
            elif opens or name == "RolloutService/Continue":
                self.begin_turn(*trajectories(request), opens=opens)
            else:
                self.check_own(*trajectories(request))
            return handler(request, call)

        return guarded

    def begin_turn(self, *trajectory_ids: str, opens: bool = False) -> None:
        """Raises DomainError. Also for turns that no rpc asks for."""
        self.check_own(*trajectory_ids)
        # From here on a refused call counts as a sign of life too.
        visit = VISIT.get()
        if visit is not None:
            self.callers.begin_turn(visit, opens=opens)

    def check_own(self, *trajectory_ids: str) -> None:
        """Raises DomainError if another agent owns one of the trajectories, else renews their leases."""
        visit = VISIT.get()
        if visit is not None:
            self._check_own(visit.caller, trajectory_ids)
        for trajectory_id in trajectory_ids:
            self.leases.called(trajectory_id)

    def turn_started(self, turn: Turn) -> None:
        """Charges a turn that began in the current call to its caller, which now owns it unless it has an
        owner."""
        visit = VISIT.get()
        if visit is None or turn.task is None:
            return
        trajectory_id = turn.record.trajectory_id
        self.callers.charge(visit, turn, turn.task, partial(self._is_open, trajectory_id))
        if trajectory_id not in self._owners:
            self._own(trajectory_id, visit.caller.key)

    def _is_open(self, trajectory_id: str) -> bool:
        record = self.store.find(trajectory_id)
        return record is not None and not record.closed

    def _claim(self, lease_tasks: Handler) -> Handler:
        """Makes the caller the owner of the attempts it leases."""

        async def claimed(request: Any, call: Call) -> AsyncIterator[Any]:
            visit = VISIT.get()
            async with aclosing(lease_tasks(request, call)) as leases:
                async for lease in leases:
                    if visit is not None:
                        self._own(lease.trajectory_id, visit.caller.key)
                    yield lease

        return claimed

    def _begin_abort(self, request: Any) -> None:
        """Counts an agent's abort as a sign of life. A trainer's abort proves nothing about the agent."""
        visit = VISIT.get()
        if visit is not None:
            self._check_abort(visit.caller, request)
            if visit.caller.role is Role.TRAINER:
                return

        def is_callers(trajectory_id: str) -> bool:
            return visit is None or not self._is_anothers(visit.caller, trajectory_id)

        for trajectory_id in filter(is_callers, request.trajectories.trajectory_ids):
            self.leases.called(trajectory_id)
        for group_id in request.groups.group_ids:
            self.leases.group_called(group_id, is_callers)

    def _own(self, trajectory_id: str, key: tuple[str, str]) -> None:
        self._owners[trajectory_id] = key
        self._owners.move_to_end(trajectory_id)
        for oldest in list(islice(self._owners, max(0, len(self._owners) - MOST_OWNERS))):
            if self._is_open(oldest):
                self._owners.move_to_end(oldest)
            else:
                del self._owners[oldest]

    def _is_anothers(self, caller: Caller, trajectory_id: str) -> bool:
        owner = self._owners.get(trajectory_id)
        return owner is not None and owner != caller.key

    def _check_own(self, caller: Caller, trajectory_ids: Iterable[str]) -> None:
        if caller.role is not Role.AGENT:
            return
        for trajectory_id in trajectory_ids:
            self._refuse_anothers(caller, trajectory_id, f"trajectory {trajectory_id}")
            if trajectory_id in self._owners:
                self._owners.move_to_end(trajectory_id)

    def _check_abort(self, caller: Caller, request: Any) -> None:
        """Lets an agent abort only its own turns, and a group only if it owns all of the group's turns."""
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
            for turn in self.turns.in_flight:
                record = turn.record
                if record.group_id in wanted:
                    what = f"a turn of group {record.group_id}"
                    self._refuse_anothers(caller, record.trajectory_id, what)

    def _refuse_anothers(self, caller: Caller, trajectory_id: str, what: str) -> None:
        if self._is_anothers(caller, trajectory_id):
            raise DomainError(
                Reason.ROLE_NOT_ALLOWED,
                f"{what} belongs to another agent, not to {caller}",
                {"caller": caller.name, "role": Role.AGENT, "trajectory_id": trajectory_id},
            )
