"""The interface between the server and a sampler.

A pool of engine servers is an `Engine` only, because it switches its engines by their own rpcs. The tests'
fake is a function of (prefix, weight version), so that every token can be recomputed. The types here keep
the engine's own types apart from protobuf's.

Order of a weight switch, which the server's `EngineSwitch` drives under one lock:

    prepare -> pause -> load -> resume -> score, if there is a probe

If the weights arrive through a collective that the engine has joined, `load` is replaced by

    begin_collective -> receive_collective, once for each round -> finish_collective
                  or -> abandon_collective

Between the return of `pause` and the call of `resume` the engine samples nothing. A delta never spans two
versions: `load` names the version during the pause, and every later delta carries it.

An adapter is a separate version on top of the full weights, added and removed without a pause. A request
that names an adapter is sampled by that adapter only, and its deltas carry the adapter's version.
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
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Validated, with every default applied."""

    max_tokens: int
    """At least 1; what is left of the turn's budget."""
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
"""Stream interval of a request whose tokens are only read at its end."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A turn that is resumed makes several."""

    request_id: str
    """Unique among all requests ever made."""
    token_ids: NDArray[np.int32]
    """All tokens that the policy sees, shape [n], n >= 1."""
    sampling: Sampling
    cache_salt: str
    """Requests share the key-value cache only with requests of the same salt."""
    priority: int = 0
    """Lower values run earlier."""
    stream_interval: int = 1
    """Tokens the engine may gather before it hands them over. The first and the last never wait."""
    trace_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """W3C trace context for the engine's own span."""
    adapter_version: int | None = None
    """The engine must have it. None for the full weights."""
    trajectory_id: str = ""
    group_id: str = ""
    """Trajectory and group of the request, for an engine that routes between several servers."""
    required_weight_version: int = 0
    """The only version that may sample it; zero for any version."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens sampled since the previous delta, all by one weight version."""

    token_ids: NDArray[np.int32]
    """Shape [n], n >= 0."""
    logprobs: NDArray[np.float32]
    """Log-probability of each token under the distribution it was sampled from, shape [n]."""
    weight_version: int
    finish: Finish | None = None
    """Set on the last delta."""
    cached_token_count: int = 0
    """Context tokens taken from the cache; meaningful on the last delta."""


@dataclass(frozen=True, slots=True)
class TensorMeta:
    shape: tuple[int, ...]
    optional: bool = False
    """Whether a full upload may omit it, such as a tied `lm_head.weight`."""


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
    """One complete, verified version in a file that other processes on this host can map."""

    weight_version: int
    path: Path
    tensors: tuple[StagedTensor, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One complete, verified adapter."""

    weight_version: int
    folder: Path
    """Folder in PEFT's format. It remains until the engine no longer has the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    max_rank: int
    max_adapters: int
    """Most adapters that sample at the same time. The engine can hold one more."""


CollectiveUpdate = Mapping[str, object] | Sequence[Mapping[str, object]]
"""One description for all workers, or a list with one for each."""


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """Properties that stay the same for the lifetime of the engine."""

    model: str
    vocab_size: int
    max_context_length: int
    eos_token_ids: tuple[int, ...]
    weight_dtype: str
    """Torch dtype name that uploaded tensors must have."""
    tensors: Mapping[str, TensorMeta]
    """Hugging Face parameter name -> shape, for every tensor of a full upload."""
    checkpoint: Path | None = None
    """Folder of the safetensors files that version 0 was read from, if there is one."""
    adapters: AdapterLimits | None = None
    """None if the engine was started without adapters."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    preemptions: int = 0
    """Total number of requests evicted from the key-value cache and computed again."""


class RequestLost(Exception):
    """The engine is alive but dropped this request. Delivered tokens stay valid; retry the rest."""


class EngineLost(Exception):
    """The engine died. Its requests can only continue on a new engine."""


class EngineLoadFailed(Exception):
    """Loading weights failed. If `load` raised it, the weights in the engine cannot be trusted."""


class Engine(Protocol):
    """All methods are called from one event loop."""

    @property
    def description(self) -> EngineDescription: ...

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Returns once the engine has the request, then yields until a delta's `finish` is set.

        A request that the engine received before a `pause` belongs to the version before it, and a
        later one to the version after it. That is why this is a coroutine and not only a generator.
        Closing the generator early stops the request. Requests made during a pause wait. Raises
        EngineLost, at once or from the generator. The generator can also raise RequestLost.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Returns once the engine no longer works on the requests. Unknown ids are ignored.

        The iterators of the requests yield the tokens sampled so far and end with ABORTED.
        """

    def stats(self) -> EngineStats: ...

    async def lost(self) -> str:
        """Waits until the engine has died and returns the reason."""
        ...

    async def close(self) -> None:
        """Stops the engine and all processes it started."""


class SwitchableEngine(Engine, Protocol):
    async def pause(self, *, drop_cache: bool) -> None:
        """Freezes every request at a step boundary and returns when nothing is being sampled.

        With `drop_cache` the key-value cache is discarded, including that of frozen requests. They
        recompute it after `resume`, under the weights that are active then.
        """

    async def prepare(self, weights: StagedWeights) -> None:
        """Does as much of `load` as possible while requests continue, so that the pause is short.

        It may do nothing and leave all the work to `load`. A prepared version that is not loaded is
        discarded by the next `prepare` or `load`. Raises EngineLost. Raises EngineLoadFailed, after
        which the engine is unchanged.
        """

    async def load(self, weights: StagedWeights) -> None:
        """Replaces the weights; only while paused. Later tokens carry `weights.weight_version`. Raises
        EngineLoadFailed, after which only another `load` can make the engine usable."""

    async def resume(self) -> None:
        """Ends a pause. Frozen requests continue."""

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        """Log-probability of each token but the first, given those before it, at temperature 1.

        Shape [n] -> [n - 1], n >= 2; one position of the context must remain free. The engine computes
        them from scratch with its current weights, and with the named adapter if there is one. They run
        before any request that is still waiting. Not available while paused. Raises EngineLost.
        """
        ...


class CollectiveEngine(SwitchableEngine, Protocol):
    async def join_collective(
        self, backend: str, rendezvous: Mapping[str, object], seconds: float
    ) -> None:
        """Leaves the current collective, if any. `rendezvous` is specific to the backend.

        The engine may stop sampling in the meantime. Raises WeightRefused if the collective could not be
        formed; the engine is then in no collective. Raises EngineLost if the engine does not return within
        about `seconds`.
        """

    async def begin_collective(self) -> None:
        """Begins an update; only while paused. The weights do not change yet."""

    async def receive_collective(self, update: CollectiveUpdate, seconds: float) -> None:
        """Takes part in one transfer. `update` describes it in the backend's own format.

        After an error the update has ended and the engine has left the collective. Raises WeightRefused if
        the weights are unchanged, EngineLoadFailed if they are not, and EngineLost as joining does.
        """

    async def finish_collective(self, weight_version: int, seconds: float) -> None:
        """Later tokens carry `weight_version`. Raises the same errors as `receive_collective`."""

    async def abandon_collective(self, seconds: float) -> bool:
        """Also leaves the collective. Returns whether the weights are unchanged. Raises EngineLost."""
        ...


class AdapterEngine(SwitchableEngine, Protocol):
    async def add_adapter(self, adapter: Adapter) -> None:
        """Needs no pause. Raises EngineLost, and EngineLoadFailed, after which the engine is unchanged."""

    async def remove_adapter(self, weight_version: int) -> None:
        """Frees an adapter that no request uses any more. Raises EngineLost."""


class LocalEngine(CollectiveEngine, AdapterEngine, Protocol):
    """An engine that this process owns."""
