"""Groups to micro-batches. Suffixes: B rows, T positions, N trained tokens, M distinct predictions.

    TrajectoryGroup -> Sample per trajectory -> Row (a tree of tokens) -> MicroBatch

Between the first two arrows `planning` computes advantages, which may need all groups of a step.

Siblings begin with the same prompt, and often with the same words. Therefore a row is a prefix tree. Each
distinct prefix is one position, which attends only to its ancestors, so that shared tokens are computed
once, with the results of computing each sequence separately. On short answers to a shared prompt this
takes a third to a fifth of the work.
"""
# ruff: noqa: N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.trainer.algorithms.batches import Sequences
from penstock.trainer.batching.balancing import attention_cost, level, spread_evenly
from penstock.v1 import trajectory_pb2
from penstock.wire import branches, codec, staleness
from penstock.wire.agent_marks import MarkInvalid, read_untrained, read_unwanted

log = logging.getLogger(__name__)

# A tree needs a T x T mask. Beyond this length, sharing saves less than the mask costs.
MAX_TREE_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory as the optimizer sees it. Arrays have shape [n] for n tokens."""

    trajectory_id: str
    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    """Policy tokens fresh enough to carry a gradient."""
    behaviour_logprobs: NDArray[np.float32]
    """Log-probability under the policy that sampled the token; zero for tokens that no policy sampled."""
    temperatures: NDArray[np.float32]
    """Temperature at which to recompute the log-probability; one for tokens that no policy sampled."""
    reward: float
    counts_in_baseline: bool = True
    """False for a branch."""


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample with its advantages and its place in the step. K counts its trained tokens."""

    sample: Sample
    advantages_K: NDArray[np.float32]
    first_token: int
    """Index of its first trained token among the trained tokens of the step."""


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    samples: tuple[Sample, ...]
    """Every trajectory that did not fail."""
    rewards: tuple[float, ...]
    """Rewards of the samples as agents gave them, before any length penalty."""
    failures: int
    """Number of trajectories that failed."""
    policy_tokens: int
    masked_tokens: int
    """Policy tokens whose lag exceeds the limit."""
    lags: NDArray[np.int64]
    """Lag of each policy token that is not masked."""
    unwanted: str = ""
    """Why an agent declared the group unusable; empty if none did."""

    @property
    def attempt_rewards(self) -> list[float]:
        """Rewards that form a baseline: those without branches."""
        pairs = zip(self.rewards, self.samples, strict=True)
        return [reward for reward, sample in pairs if sample.counts_in_baseline]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward and backward pass."""

    token_ids_BT: Tensor
    positions_BT: Tensor
    """Distance from the beginning of the sequence, int64."""
    parents_BT: Tensor | None
    """Column of each token's predecessor in its sequence, -1 for the first token, int64. None means that
    it is always the previous column. The T x T mask is built from it only when needed
    (`attention_mask`)."""
    sources_M: Tensor
    """Flat position b * T + t of the output that predicts, int64."""
    targets_M: Tensor
    """The predicted token, int64."""
    temperatures_M: Tensor
    predictions_N: Tensor
    """Index into M for each trained token. Siblings with equal tokens share a prediction."""
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    tokens_N: Tensor
    """Index of each trained token among those of the step, int64."""
    sequences: Sequences
    """Sequences whose trained tokens are in this micro-batch. It contains all tokens of each."""

    @property
    def is_empty(self) -> bool:
        """Whether it only keeps a rank in step with the others."""
        return len(self.tokens_N) == 0

    def attention_mask(self) -> Tensor | None:
        """Returns a mask that is True if the row may attend to the column, shape [B, 1, T, T]; None
        for plain causal attention. Padding attends to itself, so that its softmax is finite."""
        if self.parents_BT is None:
            return None
        count, width = self.parents_BT.shape
        mask_BTT = np.zeros((count, width, width), np.bool_)
        for mask, parents in zip(mask_BTT, self.parents_BT.numpy(), strict=True):
            np.fill_diagonal(mask, True)
            for node, parent in enumerate(parents.tolist()):
                if parent >= 0:
                    mask[node] |= mask[parent]
        return torch.from_numpy(mask_BTT).unsqueeze(1)  # pyright: ignore[reportUnknownMemberType]


def read_group(
    group: trajectory_pb2.TrajectoryGroup, *, trainer_version: int, max_lag: int
) -> TrainingGroup:
    """Reads a delivered group. `trainer_version` is the version the trainer held when it took the group."""
    lags: list[NDArray[np.int64]] = []
    samples: list[Sample] = []
    policy_tokens = masked_tokens = 0
    scored = [t for t in group.trajectories if t.outcome.WhichOneof("result") == "reward"]
    shared = branches.shared_prefixes(group)
    for trajectory in scored:
        sample, token_lags = _read_trajectory(
            trajectory, shared[trajectory.trajectory_id], trainer_version, max_lag
        )
        young = token_lags[token_lags <= max_lag]
        policy_tokens += len(token_lags)
        masked_tokens += len(token_lags) - len(young)
        lags.append(young)
        samples.append(sample)
    return TrainingGroup(
        samples=tuple(samples),
        rewards=tuple(sample.reward for sample in samples),
        failures=len(group.trajectories) - len(samples),
        policy_tokens=policy_tokens,
        masked_tokens=masked_tokens,
        lags=np.concatenate(lags) if lags else np.zeros(0, np.int64),
        unwanted=next(filter(None, (read_unwanted(t.outcome.metadata) for t in scored)), ""),
    )


def _read_trajectory(
    trajectory: trajectory_pb2.Trajectory,
    shared: NDArray[np.int32],
    trainer_version: int,
    max_lag: int,
) -> tuple[Sample, NDArray[np.int64]]:
    """Reads a trajectory and the lag of each of its policy tokens. Tokens shared with its parent are
    context, because they are trained there."""
    tokens: list[NDArray[np.int32]] = [shared]
    trained: list[NDArray[np.bool_]] = [np.zeros(len(shared), np.bool_)]
    behaviour: list[NDArray[np.float32]] = [np.zeros(len(shared), np.float32)]
    temperatures: list[NDArray[np.float32]] = [np.ones(len(shared), np.float32)]
    lags: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    for segment in trajectory.segments:
        ids = codec.token_ids(segment)
        count, temperature = len(ids), 1.0
        logprobs, young = np.zeros(count, np.float32), False
        if segment.author == trajectory_pb2.AUTHOR_POLICY:
            logprobs = codec.logprobs(segment)
            if len(logprobs) != count:
                raise codec.MalformedMessage(
                    f"{trajectory.trajectory_id}: {count} tokens with {len(logprobs)} logprobs"
                )
            lag = staleness.lag(trainer_version, segment.weight_version)
            young = lag <= max_lag
            # Greedy tokens carry temperature zero, but their log-probability is the one at temperature one.
            temperature = segment.temperature or 1.0
            lags.append(np.full(count, lag, np.int64))
        tokens.append(ids)
        trained.append(np.full(count, young, np.bool_))
        behaviour.append(logprobs)
        temperatures.append(np.full(count, temperature, np.float32))
    mask = np.concatenate(trained)
    # No prediction exists for the first token of a sequence.
    mask[:1] = False
    try:
        untrained = read_untrained(trajectory.outcome.metadata, len(mask))
    except MarkInvalid as error:
        log.warning("trajectory %s is not trained: %s", trajectory.trajectory_id, error)
        untrained = np.ones(len(mask), np.bool_)
    if untrained is not None:
        mask &= ~untrained
    sample = Sample(
        trajectory.trajectory_id,
        np.concatenate(tokens),
        mask,
        np.concatenate(behaviour),
        np.concatenate(temperatures),
        trajectory.outcome.reward,
        not trajectory.parent_trajectory_id,
    )
    return sample, np.concatenate(lags)


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trained token of a row."""

    prediction: int
    behaviour_logprob: float
    advantage: float
    token: int
    """Index of the token in the step."""
    sequence: int
    """Index of its sequence in the row."""


@dataclass(slots=True)
class _Row:
    """A prefix tree under construction. A node always comes after its parent."""

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    depths: list[int] = field(default_factory=list[int])
    children: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    predictions: dict[tuple[int, int, float], int] = field(
        default_factory=dict[tuple[int, int, float], int]
    )
    """(predicting node, token, temperature) -> index among the row's predictions."""
    trained: list[_Trained] = field(default_factory=list[_Trained])
    sequences: int = 0
    chain: bool = True
    """Whether every node's parent is the previous node, which needs no mask."""

    def new_tokens(self, token_ids: Sequence[int]) -> int:
        """Returns the number of positions that adding this sequence would cost."""
        node: int | None = -1
        for shared, token in enumerate(token_ids):
            node = self.children.get((node, token))
            if node is None:
                return len(token_ids) - shared
        return 0

    def add(self, placed: PlacedSample, length: int) -> None:
        """Adds the first `length` tokens of a sequence, which include at least one trained token."""
        sample, sequence = placed.sample, self.sequences
        self.sequences += 1
        advantages = iter(placed.advantages_K.tolist())
        node, index = -1, placed.first_token
        rows = zip(
            sample.token_ids[:length].tolist(),
            sample.trained[:length].tolist(),
            sample.behaviour_logprobs[:length].tolist(),
            sample.temperatures[:length].tolist(),
            strict=True,
        )
        for depth, (token, trained, behaviour, temperature) in enumerate(rows):
            if trained:
                key = (node, token, temperature)
                prediction = self.predictions.setdefault(key, len(self.predictions))
                self.trained.append(
                    _Trained(prediction, behaviour, next(advantages), index, sequence)
                )
                index += 1
            # The last token is predicted and predicts nothing, so it needs no position.
            if depth < length - 1:
                node = self._extend(node, token, depth)

    def _extend(self, parent: int, token: int, depth: int) -> int:
        node = self.children.get((parent, token))
        if node is None:
            node = len(self.tokens)
            self.children[parent, token] = node
            self.chain = self.chain and parent == node - 1
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(depth)
        return node


def build_micro_batches(
    groups: Sequence[Sequence[PlacedSample]],
    *,
    token_budget: int,
    share_prefixes: bool = True,
    ranks: int = 1,
) -> list[MicroBatch]:
    """Cuts samples, group by group, into micro-batches of at most `token_budget` padded tokens.

    A sequence longer than the budget gets a separate micro-batch; one without trained tokens gets none.
    Each rank gets about the same amount of computation in the same number of micro-batches, which the
    result interleaves by rank. If a rank has too few rows, its last micro-batches are empty.
    """
    rows = [row for group in groups for row in _build_rows(group, token_budget, share_prefixes)]
    fair = -(-sum(len(row.tokens) for row in rows) // ranks)
    if ranks > 1 and any(len(row.tokens) > fair for row in rows):
        # A tree larger than one rank's share would leave the others idle.
        budget = min(token_budget, max(fair, 1))
        rows = [row for group in groups for row in _build_rows(group, budget, share_prefixes)]
    shares = [
        _cut([rows[index] for index in own], token_budget)
        for own in spread_evenly([attention_cost(len(row.tokens)) for row in rows], ranks)
    ]
    count = max(map(len, shares))
    levelled = [level(share, count) for share in shares]
    return [_assemble(own) for turn in zip(*levelled, strict=True) for own in turn]


def _cut(rows: list[_Row], token_budget: int) -> list[list[_Row]]:
    # Trees come before chains, because a micro-batch with only chains needs no mask.
    rows.sort(key=lambda row: (row.chain, -len(row.tokens)))
    cuts = [0]
    for index, row in enumerate(rows):
        first = rows[cuts[-1]]
        width = max(len(first.tokens), len(row.tokens))
        full = (index - cuts[-1] + 1) * width > token_budget
        if index > cuts[-1] and (full or row.chain != first.chain):
            cuts.append(index)
    return [rows[a:b] for a, b in pairwise([*cuts, len(rows)]) if b > a]


def _build_rows(
    group: Sequence[PlacedSample], token_budget: int, share_prefixes: bool
) -> list[_Row]:
    budget = min(token_budget, MAX_TREE_TOKENS)
    rows: list[_Row] = []
    for placed in group:
        sample = placed.sample
        if not sample.trained.any():
            continue
        row = rows[-1] if rows else None
        # Tokens after the last trained one do not affect the loss.
        length = int(np.flatnonzero(sample.trained)[-1]) + 1
        seen = sample.token_ids[: length - 1].tolist()
        if row is None or not share_prefixes or len(row.tokens) + row.new_tokens(seen) > budget:
            row = _Row()
            rows.append(row)
        row.add(placed, length)
    return rows


def _assemble(rows: Sequence[_Row]) -> MicroBatch:
    if not rows:
        return EMPTY
    width = max(len(row.tokens) for row in rows)
    token_ids_BT = np.zeros((len(rows), width), np.int64)
    positions_BT = np.zeros((len(rows), width), np.int64)
    parents_BT: Tensor | None = None
    if all(row.chain for row in rows):
        # Padding continues the count. If positions restarted, transformers would treat the rest as
        # another sequence in the same row and build a T x T mask.
        positions_BT[:] = np.arange(width)
    else:
        parents_BT = torch.full((len(rows), width), -1, dtype=torch.int64)
    sources: list[int] = []
    targets: list[int] = []
    temperatures: list[float] = []
    trained: list[_Trained] = []
    predictions: list[int] = []
    sequences: list[int] = []
    sequence_count = 0
    for b, row in enumerate(rows):
        length, offset = len(row.tokens), len(sources)
        token_ids_BT[b, :length] = row.tokens
        positions_BT[b, :length] = row.depths
        if parents_BT is not None:
            parents_BT[b, :length] = torch.tensor(row.parents)
        for node, token, temperature in row.predictions:
            sources.append(b * width + node)
            targets.append(token)
            temperatures.append(temperature)
        trained += row.trained
        predictions += [offset + t.prediction for t in row.trained]
        sequences += [sequence_count + t.sequence for t in row.trained]
        sequence_count += row.sequences
    return MicroBatch(
        token_ids_BT=torch.as_tensor(token_ids_BT),
        positions_BT=torch.as_tensor(positions_BT),
        parents_BT=parents_BT,
        sources_M=torch.tensor(sources, dtype=torch.int64),
        targets_M=torch.tensor(targets, dtype=torch.int64),
        temperatures_M=torch.tensor(temperatures, dtype=torch.float32),
        predictions_N=torch.tensor(predictions, dtype=torch.int64),
        behaviour_logprobs_N=torch.tensor(
            [t.behaviour_logprob for t in trained], dtype=torch.float32
        ),
        advantages_N=torch.tensor([t.advantage for t in trained], dtype=torch.float32),
        tokens_N=torch.tensor([t.token for t in trained], dtype=torch.int64),
        sequences=Sequences(torch.tensor(sequences, dtype=torch.int64), sequence_count),
    )


EMPTY = MicroBatch(
    # One position, so that a rank with nothing to compute still runs the model as the others do.
    token_ids_BT=torch.zeros(1, 1, dtype=torch.int64),
    positions_BT=torch.zeros(1, 1, dtype=torch.int64),
    parents_BT=None,
    sources_M=torch.zeros(1, dtype=torch.int64),
    targets_M=torch.zeros(1, dtype=torch.int64),
    temperatures_M=torch.ones(1),
    predictions_N=torch.zeros(0, dtype=torch.int64),
    behaviour_logprobs_N=torch.zeros(0),
    advantages_N=torch.zeros(0),
    tokens_N=torch.zeros(0, dtype=torch.int64),
    sequences=Sequences(torch.zeros(0, dtype=torch.int64), 0),
)
