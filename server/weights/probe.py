"""The probe: a fixed sequence that the trainer scored, compared with the engine's own score of it.

Checksums prove that the bytes arrived; the probe proves that the engine computes with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.server.core.errors import FieldInvalid
from penstock.server.engine.protocol import EngineDescription
from penstock.v1 import weights_pb2
from penstock.wire import codec
from penstock.wire.messages import WeightProbeResult

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A token sequence and the trainer's log-probabilities for it."""

    token_ids: NDArray[np.int32]
    """Shape [n], n >= 2."""
    logprobs: NDArray[np.float32]
    """Of each token but the first, at temperature 1, shape [n - 1]."""
    tolerance: float
    """Maximum mean of the absolute differences, in nats."""

    def message(self) -> weights_pb2.WeightProbe:
        return weights_pb2.WeightProbe(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            tolerance=self.tolerance,
        )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Differences between the engine's and the trainer's scores, in nats; may be NaN."""

    mean_difference: float
    max_difference: float

    def message(self) -> weights_pb2.WeightProbeResult:
        return WeightProbeResult(
            mean_difference=self.mean_difference, max_difference=self.max_difference
        )


def compare(probe: Probe, scored: NDArray[np.float32]) -> ProbeResult:
    differences = np.abs(scored.astype(np.float64) - probe.logprobs)
    return ProbeResult(float(differences.mean()), float(differences.max()))


def read_probe(message: weights_pb2.WeightProbe, description: EngineDescription) -> Probe:
    """Raises FIELD_INVALID if the engine could not score the probe."""
    try:
        token_ids, logprobs = codec.token_ids(message), codec.logprobs(message)
    except codec.MalformedMessage as error:
        raise FieldInvalid("header.probe", str(error)) from error
    # The engine samples one more token after it, which is discarded.
    longest = description.max_context_length - 1
    if not 2 <= len(token_ids) <= longest:
        raise FieldInvalid(
            "header.probe.token_ids", f"must be 2 to {longest} tokens", len(token_ids)
        )
    if len(logprobs) != len(token_ids) - 1:
        raise FieldInvalid(
            "header.probe.logprobs", f"must be {len(token_ids) - 1} values", len(logprobs)
        )
    outside = (token_ids < 0) | (token_ids >= description.vocab_size)
    if outside.any():
        raise FieldInvalid(
            "header.probe.token_ids",
            f"must be from 0 to {description.vocab_size - 1}",
            int(token_ids[outside.argmax()]),
        )
    if not np.isfinite(logprobs).all():
        raise FieldInvalid("header.probe.logprobs", "must be finite")
    if not 0 < message.tolerance < float("inf"):
        raise FieldInvalid(
            "header.probe.tolerance", "must be positive and finite", message.tolerance
        )
    return Probe(token_ids, logprobs, message.tolerance)
