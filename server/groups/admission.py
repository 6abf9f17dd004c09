"""Admission of groups: the staleness gate of the trainer's contract, and a plain limit before there is
one.

A Hello with another contract makes a new gate, to which all groups under way are added.

A server that is restarted in the middle of a run does not know the contract until its trainer reconnects.
No task begins until then: the plain limit could start more groups than the contract has slots for, and
those would be too old when they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.server.core.aio import Broadcast
from penstock.server.groups.staleness_gate import Selection, StalenessContract, StalenessGate


@dataclass(slots=True)
class _Admitted:
    version: int
    completed: bool = False
    oldest: int | None = None


class Admission:
    def __init__(
        self,
        changed: Broadcast,
        clock: Callable[[], float],
        max_groups_without_trainer: int,
        *,
        freshness: bool = True,
    ) -> None:
        self._clock = clock
        self._bound = max_groups_without_trainer
        self._freshness = freshness
        self._trainer_awaited = False
        self._gate: StalenessGate | None = None
        self._groups: dict[str, _Admitted] = {}
        self._changed = changed

    def await_trainer(self) -> None:
        """Let no task begin before a trainer has declared its contract: its run is under way."""
        self._trainer_awaited = True

    @property
    def trainer_awaited(self) -> bool:
        """Whether a run is under way whose trainer has not declared its contract yet."""
        return self._trainer_awaited and self._gate is None

    @property
    def contract(self) -> StalenessContract | None:
        """From the trainer's last Hello."""
        return self._gate.contract if self._gate is not None else None

    @property
    def trainer_version(self) -> int:
        """Zero before the first Hello."""
        return self._gate.trainer_version if self._gate is not None else 0

    @property
    def outstanding(self) -> int:
        """Groups admitted and not yet delivered."""
        return len(self._groups)

    @property
    def target(self) -> int:
        """Most groups that may be outstanding now."""
        return self._gate.target if self._gate is not None else self._bound

    def agree(self, contract: StalenessContract, trainer_version: int) -> None:
        if self._gate is not None and self._gate.contract == contract:
            self._gate.advance(trainer_version, self._clock())
        else:
            gate = StalenessGate(contract, trainer_version, freshness=self._freshness)
            for group_id, group in self._groups.items():
                if group.completed:
                    gate.restore(group_id, group.oldest)
                else:
                    gate.adopt(group_id, group.version)
            self._gate = gate
        self._changed.notify()

    def advance(self, trainer_version: int) -> None:
        if self._gate is not None:
            self._gate.advance(trainer_version, self._clock())
            self._changed.notify()

    def may_admit(self, active_version: int) -> bool:
        if self._gate is not None:
            return self._gate.may_admit(active_version)
        return len(self._groups) < self._bound

    def may_begin(self, active_version: int) -> bool:
        """Like `may_admit`, but false until an expected trainer is back."""
        return not self.trainer_awaited and self.may_admit(active_version)

    def admit(self, group_id: str, active_version: int) -> None:
        """Call it only if `may_admit` returned true."""
        self._groups[group_id] = _Admitted(active_version)
        if self._gate is not None:
            self._gate.admit(group_id, active_version)

    def complete(self, group_id: str, oldest_version: int | None) -> None:
        """`oldest_version` is None without policy tokens."""
        group = self._groups[group_id]
        group.completed, group.oldest = True, oldest_version
        if self._gate is not None:
            self._gate.complete(group_id, oldest_version, self._clock())
        self._changed.notify()

    def release(self, group_id: str) -> None:
        """Frees the slot of a group that will not be trained, delivered or not. Ignores unknown ids."""
        self._groups.pop(group_id, None)
        if self._gate is not None:
            self._gate.release(group_id)
        self._changed.notify()

    def restore(self, groups: Iterable[tuple[str, int, int | None]]) -> None:
        """Takes groups to deliver again: (id, version it began under, oldest version)."""
        for group_id, version, oldest in groups:
            self._groups[group_id] = _Admitted(version, True, oldest)
            if self._gate is not None:
                self._gate.restore(group_id, oldest)
        self._changed.notify()

    def select(self, credit: int) -> Selection:
        """Returns the groups to deliver now for a demand of `credit` groups. Call it after every change,
        even with a credit of zero: the gate uses these calls to measure how long the trainer waits."""
        if self._gate is None:
            return Selection((), ())
        selection = self._gate.select(credit, self._clock())
        for group_id in (*selection.delivered, *selection.late):
            del self._groups[group_id]
        if selection.delivered or selection.late:
            self._changed.notify()
        return selection
