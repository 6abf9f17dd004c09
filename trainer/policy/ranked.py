"""A policy on several ranks: what rank 0 is asked, it has every rank do at once. See `ranks`.

Both sides call the same method of their own part of the policy, in the same order. The parts differ in what
they hold of the model, and in the micro-batches they compute: a step's are cut into as many shares as there
are data-parallel ranks, so that ranks that hold different parts of the same layer get the same share.

    step         each rank its share of the plan; the result is rank 0's
    weights      every rank iterates to the end; what rank 0 gets is whole
    save, load,  every rank, with the same folder; rank 0 writes what is whole, and who comes back first
    save_model     waits for the others
    score        rank 0 alone, with the tensors it is given
    adapter      rank 0 alone
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from penstock.trainer.batching.plan_bytes import decode_plan, encode_plan
from penstock.trainer.batching.planning import StepPlan
from penstock.trainer.policy.protocol import Policy, StepResult
from penstock.trainer.policy.ranks import Follower, Leader
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class RankPolicy(Policy, Protocol):
    """One rank's part of a policy. But for `score` and `adapter`, all ranks call a method or none."""

    @property
    def data_ranks(self) -> int:
        """Shares that a step's micro-batches are cut into."""
        ...

    def data_rank(self, rank: int) -> int:
        """Which of them a rank computes."""
        ...

    def supports_trees(self) -> bool:
        """Whether the model computes a prefix tree as it computes its sequences one by one."""
        ...


class LeadingPolicy:
    """Rank 0's part, and through it that of all ranks."""

    def __init__(self, own: RankPolicy, leader: Leader) -> None:
        self._own = own
        self._leader = leader

    @property
    def data_ranks(self) -> int:
        """See `RankPolicy`."""
        return self._own.data_ranks

    def data_rank(self, rank: int) -> int:
        """See `RankPolicy`."""
        return self._own.data_rank(rank)

    def supports_trees(self) -> bool:
        """See `RankPolicy`."""
        self._leader.tell_all("supports_trees")
        with self._leader.together():
            return self._own.supports_trees()

    def step(self, plan: StepPlan) -> StepResult:
        """See `policy.Policy`."""
        shares = [plan.share(index, self.data_ranks) for index in range(self.data_ranks)]
        encoded = [encode_plan(share) for share in shares]
        for rank in range(1, self._leader.size):
            self._leader.tell(rank, "step", encoded[self.data_rank(rank)])
        del encoded
        with self._leader.together():
            return self._own.step(shares[self.data_rank(0)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `policy.Policy`."""
        self._leader.tell_all("weights")
        with self._leader.together():
            tensors = self._own.weights()
            try:
                # Not `yield from`, which would close it where this one is closed.
                for named in tensors:  # noqa: UP028
                    yield named
            finally:
                # The others go to the end whatever becomes of the one who wanted them.
                for _ in tensors:
                    pass

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """See `policy.Policy`."""
        return self._own.adapter()

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See `policy.Policy`."""
        return self._own.score(tensors, token_ids)

    def save_model(self, folder: Path) -> None:
        """See `policy.Policy`."""
        self._leader.tell_all("save_model", _encode_path(folder))
        with self._leader.together():
            self._own.save_model(folder)

    def save(self, folder: Path) -> None:
        """See `policy.Policy`."""
        self._leader.tell_all("save", _encode_path(folder))
        with self._leader.together():
            self._own.save(folder)

    def load(self, folder: Path) -> None:
        """See `policy.Policy`."""
        self._leader.tell_all("load", _encode_path(folder))
        with self._leader.together():
            self._own.load(folder)


def obey(follower: Follower, policy: RankPolicy) -> None:
    """What another rank does: each command, until rank 0 ends."""
    for command, payload in follower.commands():
        match command:
            case "step":
                policy.step(decode_plan(payload))
            case "weights":
                for _ in policy.weights():
                    pass
            case "supports_trees":
                policy.supports_trees()
            case "save_model":
                policy.save_model(_decode_path(payload))
            case "save":
                policy.save(_decode_path(payload))
            case "load":
                policy.load(_decode_path(payload))
            case _:
                raise RuntimeError(f"no such command: {command}")


def _encode_path(folder: Path) -> bytes:
    return str(folder.absolute()).encode()


def _decode_path(payload: bytes) -> Path:
    return Path(payload.decode())
