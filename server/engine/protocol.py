"""The engine seam: what the server asks of a sampler, and nothing of how it is done.

`vllm_engine.VllmEngine` is the real one. The tests' fake is a function of (prefix, weight version), so
that every token can be recomputed. Types here are small frozen dataclasses: the engine's own types and
protobuf's never meet.

Order of a weight switch, which the server's `WeightSwitch` drives under one lock:

    prepare -> pause -> load -> resume -> score, where there is a probe

Where the weights come by a collective that the engine joined before, `load` is

    begin_collective -> receive_collective, once for each round -> finish_collective
                  or -> abandon_collective

Between the return of `pause` and the call of `resume` the engine samples nothing. Each delta names the
weight version whose forward pass sampled it: the server hands the version over in `load`, at the pause
boundary, and the engine attaches it to every later step. A delta never spans two versions.

An adapter is a version of its own beside the full weights. It is added and removed without a pause; a
request that names one is sampled by it and by no other, and its deltas carry that adapter's version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Finish(Enum):
    """Why the engine stopped."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample one attempt; already validated, every default already applied."""

    max_tokens: int
    """Tokens this attempt may write, at least 1: what is left of the turn's budget."""
    temperature: float = 1.0
    """Zero is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Zero means no limit."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False


WHOLE = 1 << 20
"""Stream interval of a request that nobody reads before it ends."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One attempt at a turn."""

    request_id: str
    """Unique among all attempts ever made."""
    token_ids: NDArray[np.int32]
    """Everything the policy sees, shape [n], n >= 1."""
    sampling: Sampling
    cache_salt: str
    """Requests share key-value cache only with requests of the same salt."""
    priority: int = 0
    """Lower runs earlier."""
    stream_interval: int = 1
    """Tokens the engine may gather before it hands them over; the first and the last never wait."""
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """W3C context for the engine's own span."""
    adapter_version: int | None = None
    """Version of the adapter that samples it, which the engine has; None for the full weights alone."""
    trajectory_id: str = ""
    group_id: str = ""
    """What it belongs to, for an engine that has several places."""
    required_weight_version: int = 0
    """The only version that may sample it; zero for any."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens sampled since the delta before, all by one weight version."""

    token_ids: NDArray[np.int32]
    """Shape [n], n >= 0."""
    logprobs: NDArray[np.float32]
    """Log-probability of each token under the distribution it was sampled from, shape [n]."""
    weight_version: int
    """Version that sampled them."""
    finish: Finish | None = None
    """Set on the last delta."""
    cached_token_count: int = 0
    """Context tokens taken from the cache; meaningful on the last delta."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape of one tensor as the checkpoint names it."""

    shape: tuple[int, ...]
    optional: bool = False
    """Whether a full upload may leave it out, such as a tied `lm_head.weight`."""


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """One verified tensor inside a staged file; row-major, little-endian."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """One complete, verified version, in a file another process of this host can map."""

    weight_version: int
    path: Path
    tensors: tuple[StagedTensor, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One complete, verified adapter."""

    weight_version: int
    folder: Path
    """As PEFT writes it; it stays until the engine no longer has the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an engine offers for adapters."""

    max_rank: int
    max_adapters: int
    """Most that sample at the same time; one more can be there."""


CollectiveUpdate = Mapping[str, object] | Sequence[Mapping[str, object]]
"""One description for every worker, or one for each."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What does not change while the engine lives."""

    model: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    weight_dtype: str
    """Torch dtype name an uploaded tensor must have."""
    tensors: Mapping[str, TensorMeta]
    """Hugging Face parameter name -> shape, for every tensor of a full upload."""
    checkpoint: Path | None = None
    """Folder of safetensors files that version 0 was read from, where there is one."""
    adapters: AdapterLimits | None = None
    """None where it was started without adapters."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Load now."""

    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    """Requests that lost their place in the cache and were computed again, ever."""


class RequestLost(Exception):
    """The engine is there, but nobody works on this request any more. What its deltas had stands; the
    rest can be asked for again."""


class EngineLost(Exception):
    """The engine died; nothing on it can be continued without a new one."""


class EngineLoadFailed(Exception):
    """Loading weights failed. Where it was `load`, what the engine holds cannot be trusted."""


class Engine(Protocol):
    """A sampler with swappable weights. Methods are called from one event loop."""

    @property
    def description(self) -> EngineDescription: ...

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Returns once the engine has the request; then yields until a delta's `finish` is set.

        A request that the engine had before a `pause` belongs to the version before it, one made later
        to the version after it: that is why this is a coroutine and not merely a generator. Closing the
        generator early stops the request. Requests made while paused wait. Raises EngineLost, at once or
        from the generator, and from that RequestLost.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stops requests; returns once the engine no longer works on them.

        Their iterators yield what was sampled and end with ABORTED. Unknown ids are ignored.
        """
        ...

    async def pause(self, *, drop_cache: bool) -> None:
        """Freezes every request at a step boundary and returns when nothing is being sampled.

        With `drop_cache` the key-value cache is discarded, that of frozen requests included; they
        recompute it after `resume`, under the weights then active.
        """
        ...

    async def prepare(self, weights: StagedWeights) -> None:
        """Does as much of `load` as can be done while requests go on, so that the pause is short.

        It may be nothing, and `load` does the rest. What was prepared and then not loaded is given up with
        the next `prepare` or `load`. Raises EngineLoadFailed, after which everything is as it was, and
        EngineLost.
        """
        ...

    async def load(self, weights: StagedWeights) -> None:
        """Replaces the weights; only while paused. Later tokens carry `weights.weight_version`.

        Raises EngineLoadFailed, after which only another `load` can make the engine usable.
        """
        ...

    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        """Joins a collective in place of the one it is in, if any; `rendezvous` is the backend's own.

        The engine may stand still meanwhile. Raises WeightRefused where it did not come to be: the engine
        is in no collective then. Raises EngineLost where it is not back within about `seconds`.
        """
        ...

    async def begin_collective(self) -> None:
        """Begins an update by the collective; only while paused. Changes nothing yet."""
        ...

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        """Takes part in one transfer, which `update` describes in the backend's own words.

        After an error the update has ended and the collective is left. Raises WeightRefused where the
        weights are what they were, EngineLoadFailed where they are not, and EngineLost as joining does.
        """
        ...

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        """Makes what came the weights; later tokens carry `weight_version`.

        Raises as `receive_collective`.
        """
        ...

    async def abandon_collective(self, seconds: float) -> bool:
        """Ends an update without finishing it, and leaves the collective.

        Returns whether the weights are what they were. Raises EngineLost.
        """
        ...

    async def resume(self) -> None:
        """Ends a pause."""
        ...

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        """Log-probability of each token but the first, given those before it, at temperature 1.

        Shape [n] -> [n - 1], n >= 2; one place of the context has to stay free. Computed anew by the
        weights that are there, with that adapter where one is named, before any request that still waits
        for a place; not while paused. Raises EngineLost.
        """
        ...

    async def add_adapter(self, adapter: Adapter) -> None:
        """Makes an adapter known, beside those that are there; nothing pauses.

        Raises EngineLoadFailed, after which everything is as it was, and EngineLost.
        """
        ...

    async def remove_adapter(self, weight_version: int) -> None:
        """Frees an adapter; no request that names it is left. Raises EngineLost."""
        ...

    def stats(self) -> EngineStats:
        """Load now."""
        ...

    async def lost(self) -> str:
        """Returns only when the engine has died, with the reason."""
        ...

    async def close(self) -> None:
        """Stops the engine and everything it started."""
        ...
