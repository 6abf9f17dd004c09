"""The staleness gate: which groups may start, and which the trainer receives. No I/O, no clock.

Contract: **no token is trained with a lag above `max_lag` (L)**. Let the trainer hold version `v` while it
gathers the batch that makes `v+1`. The lag of a token is `v` when its group is delivered, minus the
version that sampled it (`penstock.wire.staleness.lag`). `B` groups make a step.

States of a group, and the calls that move it:

                     admit             complete              select
    (unknown) -----------------> running -----> completed ------------> delivered
        ^                           |               |  ^                   |
        |          release          |     release   |  |      restore      |
        +---------------------------+---------------+  +-------------------+

Running and completed groups are *outstanding*. A delivered group is remembered while the trainer holds the
version it was delivered at, because it fills one of that version's B slots. Under every policy,
outstanding and delivered groups (of which at most B count) together number at most `target`. The freshness
controller moves `target` between `fewest_outstanding` and (L+1)*B.

Order of events, per step: `advance(v)` when the trainer holds `v`; `select(credit)` whenever the demand,
the completed groups or the trainer's version changed; then `admit` while `may_admit`. Weights are switched
a little after the trainer steps, so the active version may lag `v`. After the trainer restarts from an
older checkpoint, the active version may also be ahead of `v`.

MASK: completed groups are delivered oldest first and never dropped. Tokens older than L carry no
  gradient: the trainer masks them, by the same `lag`.
REQUEUE, DROP: as MASK, but `select` drops completed groups with a token older than L and lists
  them in `Selection.late`.
WAIT: a schedule. A group admitted while version `s` is active gets the deadline `s+L`. Once it is
  completed, its oldest token is known, and the deadline becomes that token's version + L. That is the
  same or, if its first token had to wait, later. Let `t` be the groups already delivered at `v`, and
  `due(k)` the outstanding groups with a deadline `<= v+k`. The invariant, for every k in 0..L:

      due(k) + t <= B*(k+1)

  *Admission* maintains it. Before the batch (t = 0) the bound on `due(k)` is B*(k+1), after it (t = B)
  B*k. *Selection* takes the earliest deadlines first, and either all of the credit that fits in the batch
  or nothing. It takes a group only if every group with an earlier deadline keeps a slot: for each k with
  v+k before its deadline, `due(k) + t + 1 <= B*(k+1)`. At most B groups are delivered per version. Further
  credit is kept for the next version, because those groups would be trained there.

Proof that WAIT keeps the contract. Taking a group leaves `due(k) + t` unchanged for each k at or past its
deadline, and is checked for each k before it, so selection keeps the invariant. After B groups,
`due(k) <= B*k`. When `v` becomes `v+1` and t = 0, that is the invariant there for k-1; for k = L no
deadline lies beyond `(v+1)+L-1` yet. At k = 0 it states that once the batch is full, nothing is due. So no
group outlives its deadline, which is no later than its oldest token's version + L.

Nothing deadlocks. When all outstanding groups are completed, the earliest passes its check, because
nothing is due before it. Apart from the moment of a switch, admission is refused only while at least as
many groups are outstanding as the batch still needs. The limits on what may be delivered (at most so many
groups with a deadline after `v+k`) are nested, so the greedy choice is a largest one. A batch that is
delivered in pieces is therefore complete no later than a whole one.

`max_lag = 0` is the synchronous loop under any policy: `target` is then B, so B groups are admitted per
version, and none before the weights are switched.

Failures:

- A group fails or expires: `release` frees its slot at once.
- The trainer refuses a delivered group: `release` frees its slot in the batch, so that the trainer can
  demand another at the same version. Under WAIT and at `max_lag = 0`, a trainer that filters its batch
  must refuse what it filtered. Otherwise it waits for a slot that is never freed.
- The trainer restarts from an older checkpoint: `advance` to the lower version, then `restore` each group
  that must be delivered again. Running groups may continue under the older weights, so their deadlines
  become earlier. More groups may then be due than fit; the same happens if a trainer steps on less than a
  batch. WAIT still drops nothing: overdue groups are delivered first, and the trainer masks the tokens in
  them that are too old.
- The server restarts, or a trainer connects with another contract: a new gate. `restore` each completed
  group that was not trained, and `adopt` each group that still runs. These may break the invariant too,
  with the same consequence.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from penstock.server.groups.freshness_controller import FreshnessController, StepMeter
from penstock.wire.staleness import lag


class LatePolicy(Enum):
    MASK = "mask"
    """Deliver the group; tokens that are too old carry no gradient."""
    WAIT = "wait"
    """Schedule groups so that no token becomes too old."""
    REQUEUE = "requeue"
    """Drop the group and sample its task again."""
    DROP = "drop"

    @property
    def drops(self) -> bool:
        return self in (LatePolicy.REQUEUE, LatePolicy.DROP)


@dataclass(frozen=True, slots=True)
class StalenessContract:
    max_lag: int
    """Maximum lag of a trained token, in versions; 0 is the synchronous loop."""
    groups_per_step: int
    late_policy: LatePolicy = LatePolicy.MASK

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise ValueError(f"max_lag must be at least 0, got {self.max_lag}")
        if self.groups_per_step < 1:
            raise ValueError(f"groups_per_step must be at least 1, got {self.groups_per_step}")

    @property
    def max_outstanding(self) -> int:
        """Most groups admitted and not yet delivered."""
        return (self.max_lag + 1) * self.groups_per_step

    @property
    def fewest_outstanding(self) -> int:
        """Lower limit of the freshness controller."""
        if self.late_policy is LatePolicy.WAIT:
            # While one batch waits for an old group and another is in training, a third must be running.
            # With fewer groups, each wait would be followed by another.
            return min(3 * self.groups_per_step, self.max_outstanding)
        # One batch alone is the synchronous loop, which only max_lag = 0 asks for.
        return min(self.groups_per_step + 1, self.max_outstanding)


@dataclass(frozen=True, slots=True)
class Selection:
    """Group ids, oldest first."""

    delivered: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    """Groups dropped for age under REQUEUE and DROP; the gate has forgotten them."""


class StalenessGate:
    """`now` is seconds on any monotonic clock; it only feeds the freshness controller. With
    `freshness=False` the bound on outstanding groups stays at its largest, `(L+1)*B`."""

    def __init__(
        self, contract: StalenessContract, trainer_version: int = 0, *, freshness: bool = True
    ) -> None:
        if trainer_version < 0:
            raise ValueError(f"trainer_version must be at least 0, got {trainer_version}")
        self.contract = contract
        self.trainer_version = trainer_version
        most = contract.max_outstanding
        fewest = contract.fewest_outstanding if freshness else most
        self._controller = FreshnessController(contract.groups_per_step, fewest, most)
        self.running: dict[str, int] = {}
        """The oldest version that may sample in each running group."""
        self.completed: dict[str, int] = {}
        """The oldest version of each group that is completed and not yet delivered, in order of
        completion."""
        self._due: Counter[int] = Counter()
        """Number of outstanding groups by deadline."""
        self._batch: OrderedDict[str, None] = OrderedDict()
        """Ids of groups delivered at the version the trainer holds. May exceed a step: the trainer will
        refuse some, or trained them before the server restarted and gets them again."""
        self._most_remembered = max(1024, 4 * contract.max_outstanding)
        self._meter = StepMeter()

    @property
    def target(self) -> int:
        """Most groups outstanding and delivered at this version."""
        return self._controller.target

    @property
    def outstanding(self) -> int:
        """Groups admitted and not yet delivered or released; `restore` and `adopt` may exceed `target`."""
        return len(self.running) + len(self.completed)

    @property
    def delivered(self) -> int:
        """Groups delivered at the version the trainer holds, at most `groups_per_step`."""
        return min(len(self._batch), self.contract.groups_per_step)

    def advance(self, trainer_version: int, now: float) -> None:
        """Repeating a version changes nothing. A lower one means that the trainer restarted from an
        older checkpoint."""
        if trainer_version < 0:
            raise ValueError(f"trainer_version must be at least 0, got {trainer_version}")
        if trainer_version == self.trainer_version:
            return
        restarted = trainer_version < self.trainer_version
        self.trainer_version = trainer_version
        self._batch.clear()
        observed = self._meter.close_step(len(self.completed), now)
        if observed is not None and not restarted:
            self._controller.observe(observed)
        if restarted:
            # The engine may continue with successors of this version, in the running groups too.
            for group_id, oldest in self.running.items():
                self._move_deadline(oldest, min(oldest, trainer_version))
                self.running[group_id] = min(oldest, trainer_version)

    def may_admit(self, active_version: int) -> bool:
        """Whether one more group may start while `active_version` samples."""
        if lag(self.trainer_version, active_version) > self.contract.max_lag:
            return False  # Its first tokens would already be too old; the switch is on its way.
        if not self._has_place():
            return False
        if self.contract.late_policy is not LatePolicy.WAIT:
            return True
        deadline = self._first_version(active_version) + self.contract.max_lag
        return all(
            load + 1 <= self._capacity(k)
            for k, load in enumerate(self._loads())
            if self.trainer_version + k >= deadline
        )

    def admit(self, group_id: str, active_version: int) -> None:
        """Raises ValueError for a known id, or if `may_admit` is false. An id may return after it was
        released, dropped or delivered at an earlier version."""
        self._refuse_known(group_id)
        if not self.may_admit(active_version):
            raise ValueError(
                f"group {group_id!r} may not start at version {active_version}: "
                f"trainer at {self.trainer_version}, {self.outstanding} outstanding"
            )
        self.adopt(group_id, active_version)
        self._meter.step.filled = self._meter.step.filled or not self._has_place()

    def adopt(self, group_id: str, admission_version: int) -> None:
        """Take over a group that was running before this gate was made, without an admission check.
        `admission_version` was active when the group began. Raises ValueError for a known id."""
        self._refuse_known(group_id)
        first = self._first_version(admission_version)
        self.running[group_id] = first
        self._due[first + self.contract.max_lag] += 1

    def complete(self, group_id: str, oldest_version: int | None, now: float) -> None:
        """`oldest_version` is the version of its oldest policy token. None means that the group has no
        policy token, as in a group of failures. It then cannot be late, and keeps the deadline of its
        admission. Raises ValueError unless the group runs."""
        first = self.running.pop(group_id, None)
        if first is None:
            raise ValueError(f"group {group_id!r} is not running")
        oldest = first if oldest_version is None else oldest_version
        self._move_deadline(first, oldest)
        self.completed[group_id] = oldest
        self._meter.supply(len(self.completed), now)

    def release(self, group_id: str) -> None:
        """Free the slot of a group in any state, because it failed, expired or was refused. Ignores
        unknown ids, because a failure and a drop may both report a group."""
        if (first := self.running.pop(group_id, None)) is not None:
            self._forget_deadline(first)
        elif (oldest := self.completed.pop(group_id, None)) is not None:
            self._forget_deadline(oldest)
        else:
            self._batch.pop(group_id, None)

    def restore(self, group_id: str, oldest_version: int | None) -> None:
        """Return a delivered group to the completed ones for another delivery, without an admission check.
        Call it after `advance`. Raises ValueError for an outstanding group."""
        if group_id in self.running or group_id in self.completed:
            raise ValueError(f"group {group_id!r} is outstanding already")
        self._batch.pop(group_id, None)
        oldest = self.trainer_version if oldest_version is None else oldest_version
        self._due[oldest + self.contract.max_lag] += 1
        self.completed[group_id] = oldest

    def select(self, credit: int, now: float) -> Selection:
        """Deliver groups now, for an unmet demand of `credit` groups. Call it after every change of
        credit, completed groups or trainer version, with a credit of zero too: it also measures how long
        the trainer starves."""
        if credit < 0:
            raise ValueError(f"credit must be at least 0, got {credit}")
        late = self._drop_late() if credit > 0 else ()
        queue = sorted(self.completed, key=self.completed.__getitem__) if credit > 0 else []
        if self.contract.late_policy is LatePolicy.WAIT:
            delivered = self._whole_batch(queue, credit)
        else:
            delivered = tuple(queue[:credit])
        for group_id in delivered:
            self._forget_deadline(self.completed.pop(group_id))
            self._batch[group_id] = None
        while len(self._batch) > self._most_remembered:
            # If the weights of a run never change, the ids of its groups would accumulate.
            self._batch.popitem(last=False)
        unmet = min(credit - len(delivered), self.contract.groups_per_step - self.delivered)
        self._meter.demand(unmet, len(self.completed), now)
        if delivered and unmet <= 0:
            self._meter.step.surplus = len(self.completed)
        return Selection(delivered, late)

    def _whole_batch(self, queue: Iterable[str], credit: int) -> tuple[str, ...]:
        """Ids by earliest deadline, as many as credit and batch allow, or none."""
        wanted = min(credit, self.contract.groups_per_step - self.delivered)
        if wanted <= 0 or len(self.completed) < wanted:
            return ()
        loads = self._loads()
        chosen: list[str] = []
        for group_id in queue:
            slack = self.completed[group_id] + self.contract.max_lag - self.trainer_version
            before = range(min(max(slack, 0), len(loads)))
            if any(loads[k] + 1 > self._capacity(k) for k in before):
                break  # Groups with later deadlines must leave room for more, so they cannot fit either.
            for k in before:
                loads[k] += 1
            chosen.append(group_id)
            if len(chosen) == wanted:
                return tuple(chosen)
        return ()

    def _loads(self) -> list[int]:
        """`due(k) + t` for k in 0..L. After a restart there may be later deadlines, but those always fit.
        Everything else that is due before them is bounded by `max_outstanding`, the capacity up to k =
        L."""
        horizon = range(self.trainer_version, self.trainer_version + self.contract.max_lag + 1)
        overdue = sum(n for deadline, n in self._due.items() if deadline < horizon.start)
        loads: list[int] = []
        load = overdue + self.delivered
        for deadline in horizon:
            load += self._due[deadline]
            loads.append(load)
        return loads

    def _has_place(self) -> bool:
        # A delivered group keeps its slot until the trainer has the next version. Freeing it at once
        # would let groups fall L+1 versions behind.
        return self.outstanding + self.delivered < self.target

    def _capacity(self, k: int) -> int:
        return self.contract.groups_per_step * (k + 1)

    def _first_version(self, active_version: int) -> int:
        # If the engine is ahead of a restarted trainer, it may still switch to the trainer's next version.
        return min(active_version, self.trainer_version)

    def _drop_late(self) -> tuple[str, ...]:
        if not self.contract.late_policy.drops:
            return ()
        late = [
            group_id
            for group_id, oldest in self.completed.items()
            if lag(self.trainer_version, oldest) > self.contract.max_lag
        ]
        late.sort(key=self.completed.__getitem__)
        for group_id in late:
            self.release(group_id)
        return tuple(late)

    def _refuse_known(self, group_id: str) -> None:
        if group_id in self.running or group_id in self.completed or group_id in self._batch:
            raise ValueError(f"group {group_id!r} is admitted already")

    def _move_deadline(self, oldest: int, to: int) -> None:
        self._forget_deadline(oldest)
        self._due[to + self.contract.max_lag] += 1

    def _forget_deadline(self, oldest: int) -> None:
        deadline = oldest + self.contract.max_lag
        self._due[deadline] -= 1
        if not self._due[deadline]:
            del self._due[deadline]
