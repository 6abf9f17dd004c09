from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TypedDict

from penstock.v1 import rollout_service_pb2
from penstock.wire import messages


class SamplingOptions(TypedDict, total=False):
    """Each replaces one field of the current parameters."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] | str
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample: `SamplingParams(temperature=0.7, max_tokens=256)`."""

    temperature: float | None = None
    """Unset means 1; zero is greedy."""
    top_p: float | None = None
    """Unset means 1."""
    top_k: int = 0
    """Zero means no limit."""
    max_tokens: int = 0
    """Bound on the policy's tokens in one turn, across retries; zero uses the server's bound."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    """None draws a new seed."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""

    def with_options(self, options: SamplingOptions) -> SamplingParams:
        """Returns these parameters with some replaced. Raises TypeError for an unknown option."""
        stop = options.get("stop")
        if isinstance(stop, str):
            options = {**options, "stop": (stop,)}
        return replace(self, **options)

    def to_wire(self) -> rollout_service_pb2.SamplingParams:
        return messages.SamplingParams(**asdict(self))


def read_sampling(params: rollout_service_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p if params.HasField("top_p") else None,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        seed=params.seed if params.HasField("seed") else None,
        ignore_eos=params.ignore_eos,
    )
