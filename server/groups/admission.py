"""Admission of groups: the staleness gate where a trainer has named its contract, a plain bound before.

The gate itself (`staleness_gate`) is pure and belongs to one contract. This keeps it across trainers: a
Hello with another contract makes a new gate, which is told of every group that is still under way.

A server that is started again in the middle of a run does not know the contract before its trainer is back.
No task is begun until then: by the plain bound more would be under way than the contract has places for,
and they would be too old by the time that they are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.server.core.broadcast import Broadcast
from penstock.server.groups.staleness_gate import Selection, StalenessContract, StalenessGate


@dataclass(slots=True)
class _Admitted:
    version: int
    finished: bool = False
    oldest: int | None = None


class Admission:
    """Which training groups may begin, and which finished ones may be taken now."""

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
        self.trainer_awaited = False
        """Whether a run is under way here, of which the trainer has not named its contract yet."""
        self._gate: StalenessGate | None = None
        self._groups: dict[str, _Admitted] = {}
        self._changed = changed

    @property
    def contract(self) -> StalenessContract | None:
        """What the trainer named in its last Hello."""
        return self._gate.contract if self._gate is not None else None

    @property
    def trainer_version(self) -> int:
        """Version the trainer holds; zero before the first Hello."""
        return self._gate.trainer_version if self._gate is not None else 0

    @property
    def outstanding(self) -> int:
        """Groups admitted and not yet taken."""
        return len(self._groups)

    @property
    def target(self) -> int:
        """Most groups that may be outstanding now."""
        return self._gate.target if self._gate is not None else self._bound

    def agree(self, contract: StalenessContract, trainer_version: int) -> None:
        """Puts a contract in force, with the version the trainer holds."""
        if self._gate is not None and self._gate.contract == contract:
            self._gate.advance(trainer_version, self._clock())
        else:
            gate = StalenessGate(contract, trainer_version, freshness=self._freshness)
            for group_id, group in self._groups.items():
                if group.finished:
                    gate.restore(group_id, group.oldest)
                else:
                    gate.adopt(group_id, group.version)
            self._gate = gate
        self._changed.notify()

    def advance(self, trainer_version: int) -> None:
        """The trainer now holds this version."""
        if self._gate is not None:
            self._gate.advance(trainer_version, self._clock())
            self._changed.notify()

    def may_admit(self, active_version: int) -> bool:
        """Whether another group may begin under the active version."""
        if self._gate is not None:
            return self._gate.may_admit(active_version)
        return len(self._groups) < self._bound

    def may_begin(self, active_version: int) -> bool:
        """Whether another task may begin: as `may_admit`, but not while the trainer is awaited."""
        if self._gate is None and self.trainer_awaited:
            return False
        return self.may_admit(active_version)

    def admit(self, group_id: str, active_version: int) -> None:
        """A group begins; `may_admit` was true."""
        self._groups[group_id] = _Admitted(active_version)
        if self._gate is not None:
            self._gate.admit(group_id, active_version)

    def finish(self, group_id: str, oldest_version: int | None) -> None:
        """Every sibling is complete; `oldest_version` is None where there is no policy token."""
        group = self._groups[group_id]
        group.finished, group.oldest = True, oldest_version
        if self._gate is not None:
            self._gate.finish(group_id, oldest_version, self._clock())
        self._changed.notify()

    def vacate(self, group_id: str) -> None:
        """A group left without being trained, taken or not; unknown ids are ignored."""
        self._groups.pop(group_id, None)
        if self._gate is not None:
            self._gate.vacate(group_id)
        self._changed.notify()

    def restore(self, groups: Iterable[tuple[str, int, int | None]]) -> None:
        """Groups that were taken must be taken again: (id, version it began under, oldest version)."""
        for group_id, version, oldest in groups:
            self._groups[group_id] = _Admitted(version, True, oldest)
            if self._gate is not None:
                self._gate.restore(group_id, oldest)
        self._changed.notify()

    def select(self, credit: int) -> Selection:
        """Finished groups to take now for a demand of `credit` groups.

        To be called after every change, also with a credit of zero: that is how the gate measures the
        time the trainer waits.
        """
        if self._gate is None:
            return Selection((), ())
        selection = self._gate.select(credit, self._clock())
        for group_id in (*selection.taken, *selection.late):
            del self._groups[group_id]
        if selection.taken or selection.late:
            self._changed.notify()
        return selection
