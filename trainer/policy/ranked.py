"""A policy on several ranks: every rank executes a call on rank 0 at the same time. See `ranks`.

A step's micro-batches are cut into as many shares as there are data-parallel ranks. Ranks that hold
different shards of the same layer get the same share.

    step         each rank computes its share of the plan; the result is rank 0's
    weights      every rank iterates to the end; rank 0 gets whole tensors
    save, load,  every rank, with the same folder; rank 0 writes whole files, and each rank waits for the
      save_model   others before it returns
    score,       rank 0 alone
      adapter
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
    """One rank's part of a policy. Except for `score` and `adapter`, all ranks call a method or none."""

    def data_rank(self, rank: int) -> int:
        """Return the share that a rank computes."""
        ...

    def supports_trees(self) -> bool:
        """Return whether the model computes a prefix tree like its sequences one by one."""
        ...


class LeadingPolicy:
    """Rank 0's part, which has the other ranks call the same methods."""

    def __init__(self, own: RankPolicy, leader: Leader) -> None:
        self._own = own
        self._leader = leader

    @property
    def data_ranks(self) -> int:
        return self._own.data_ranks

    def data_rank(self, rank: int) -> int:
        return self._own.data_rank(rank)

    def supports_trees(self) -> bool:
        self._leader.tell_all("supports_trees")
        with self._leader.together():
            return self._own.supports_trees()

    def step(self, plan: StepPlan) -> StepResult:
        shares = [plan.share(index, self.data_ranks) for index in range(self.data_ranks)]
        encoded = [encode_plan(share) for share in shares]
        for rank in range(1, self._leader.size):
            self._leader.tell(rank, "step", encoded[self.data_rank(rank)])
        del encoded
        with self._leader.together():
            return self._own.step(shares[self.data_rank(0)])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self._leader.tell_all("weights")
        with self._leader.together():
            tensors = self._own.weights()
            try:
                # Not `yield from`, which would close the inner iterator together with this one.
                for named in tensors:  # noqa: UP028
                    yield named
            finally:
                # The other ranks iterate to the end even if the caller stops early.
                for _ in tensors:
                    pass

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        return self._own.adapter()

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        return self._own.score(tensors, token_ids)

    def save_model(self, folder: Path) -> None:
        self._with_folder("save_model", folder)

    def save(self, folder: Path) -> None:
        self._with_folder("save", folder)

    def load(self, folder: Path) -> None:
        self._with_folder("load", folder)

    def _with_folder(self, command: str, folder: Path) -> None:
        self._leader.tell_all(command, str(folder.absolute()).encode())
        with self._leader.together():
            getattr(self._own, command)(folder)


def obey(follower: Follower, policy: RankPolicy) -> None:
    """Execute rank 0's commands on this rank, until rank 0 ends."""
    for command, payload in follower.commands():
        match command:
            case "step":
                policy.step(decode_plan(payload))
            case "weights":
                for _ in policy.weights():
                    pass
            case "supports_trees":
                policy.supports_trees()
            case "save_model" | "save" | "load":
                getattr(policy, command)(Path(payload.decode()))
            case _:
                raise RuntimeError(f"no such command: {command}")
