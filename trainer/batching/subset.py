"""Removes sequences from a micro-batch. Suffixes as in `batching`."""
# ruff: noqa: N803, N806 - a name ends with its dimensions.

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.algorithms.batches import Sequences
from penstock.trainer.batching.batching import EMPTY, MicroBatch


def keep_sequences(batch: MicroBatch, kept_S: Tensor) -> MicroBatch:
    """Return the micro-batch with only the sequences for which `kept_S`, a bool tensor, is true.

    Positions that no remaining prediction attends to are removed. The remaining predictions are unchanged.
    """
    if bool(kept_S.all()):
        return batch
    kept_N = kept_S[batch.sequences.index_N]
    if not bool(kept_N.any()):
        return EMPTY
    kept_M = torch.zeros(len(batch.sources_M), dtype=torch.bool)
    kept_M[batch.predictions_N[kept_N]] = True
    width = batch.token_ids_BT.shape[1]
    rows_M, columns_M = batch.sources_M[kept_M] // width, batch.sources_M[kept_M] % width
    needed_BT = _seen_from(batch, rows_M, columns_M)
    rows = [int(row) for row in needed_BT.any(1).nonzero()]
    own = [needed_BT[row].nonzero().flatten() for row in rows]
    shape = len(rows), max(map(len, own))
    token_ids_BT, positions_BT = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
    parents_BT = None if batch.parents_BT is None else torch.full(shape, -1)
    if parents_BT is None:
        # Rows without parents have consecutive positions, as in `batching`.
        positions_BT += torch.arange(shape[1])
    # The new flat place of each remaining position.
    places_BT = torch.zeros_like(batch.token_ids_BT)
    for new, (row, columns) in enumerate(zip(rows, own, strict=True)):
        count = len(columns)
        places_BT[row, columns] = new * shape[1] + torch.arange(count)
        token_ids_BT[new, :count] = batch.token_ids_BT[row, columns]
        positions_BT[new, :count] = batch.positions_BT[row, columns]
        if parents_BT is not None and batch.parents_BT is not None:
            before = batch.parents_BT[row, columns]
            # The parent of a kept position is always kept too.
            own_places = places_BT[row, before.clamp(min=0)] - new * shape[1]
            parents_BT[new, :count] = torch.where(before < 0, before, own_places)
    return MicroBatch(
        token_ids_BT=token_ids_BT,
        positions_BT=positions_BT,
        parents_BT=parents_BT,
        sources_M=places_BT[rows_M, columns_M],
        targets_M=batch.targets_M[kept_M],
        temperatures_M=batch.temperatures_M[kept_M],
        predictions_N=_numbers(kept_M)[batch.predictions_N[kept_N]],
        behaviour_logprobs_N=batch.behaviour_logprobs_N[kept_N],
        advantages_N=batch.advantages_N[kept_N],
        tokens_N=batch.tokens_N[kept_N],
        sequences=Sequences(_numbers(kept_S)[batch.sequences.index_N[kept_N]], int(kept_S.sum())),
    )


def _seen_from(batch: MicroBatch, rows_M: Tensor, columns_M: Tensor) -> Tensor:
    """Return which positions any of these predictions attends to, shape [B, T]."""
    count, width = batch.token_ids_BT.shape
    mask = batch.attention_mask()
    if mask is not None:
        looks = torch.zeros(count, width, dtype=torch.int64)
        return looks.index_add(0, rows_M, mask[rows_M, 0, columns_M].long()) > 0
    last_B = torch.full((count,), -1).scatter_reduce(0, rows_M, columns_M, "amax")
    return torch.arange(width) <= last_B.unsqueeze(1)


def _numbers(kept: Tensor) -> Tensor:
    return kept.long().cumsum(0) - 1
