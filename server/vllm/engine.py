"""The engine of `penstock serve`: vLLM's AsyncLLM behind the interface of an engine.

vLLM runs its scheduler and the model in a separate process, the engine process. This module drives
its front end. The contract rests on three facts:

- The engine process attaches a label to the output of each step. The label is the weight version: "0" for
  the base model, then what `load` set. It can only change while paused. For each request, vLLM's front end
  keeps the token index at which each label began. Deltas are cut at these, however vLLM groups its outputs.
- The engine process handles its commands in the order they were sent. So the answer to a command
  proves that earlier commands have taken effect. `abort` ends with such a round trip.
- The engine process dies with this one, however this one dies; see `process`.

An adapter is a vLLM LoRA with the version as its id. The label of a step names the full weights
under it, so the deltas of a request that an adapter samples carry the adapter's version instead.
"""

from __future__ import annotations

# First, because vLLM reads the environment when it is imported.
import penstock.server.vllm.environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from penstock.server.engine.protocol import (
    Adapter,
    Delta,
    EngineLoadFailed,
    EngineLost,
    EngineRequest,
    EngineStats,
    Sampling,
    StagedWeights,
)
from penstock.server.vllm.collective import VllmCollective
from penstock.server.vllm.process import EngineOwner
from penstock.server.vllm.translation import cut, describe, sampling_params, update_info

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.output_processor import RequestOutputCollector

# Ahead of every request of a caller.
PROBE_PRIORITY = -(1 << 40)


class VllmEngine(VllmCollective):
    """vLLM as a `penstock.server.engine.protocol.LocalEngine`, which documents each method."""

    def __init__(self, owner: EngineOwner, llm: AsyncLLM) -> None:
        super().__init__(owner, llm)
        self.description = describe(llm)
        self._prepared: StagedWeights | None = None
        """The version last prepared in the engine process and not loaded since."""
        self._adapters: dict[int, LoRARequest] = {}
        self._scored = 0

    @classmethod
    async def start(cls, arguments: AsyncEngineArgs) -> VllmEngine:
        """Does not block the event loop. Raises what vLLM raises on arguments it cannot serve."""
        owner = EngineOwner(arguments)
        engine = cls(owner, await owner.build())
        try:
            await engine._begin()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _begin(self) -> None:
        self._watch()
        await self._ask(self._llm.update_weight_version(str(self._weight_version)))
        # The first step of a process takes seconds on the CPU. No caller's turn should pay for it.
        prompt = np.zeros(1, np.int32)
        sampling = Sampling(max_tokens=2)
        warm_up = EngineRequest("warm-up", prompt, sampling, "warm-up")
        async for _ in await self.generate(warm_up):
            pass

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        # The engine process reads its commands in order, so it has this request before a later pause.
        collector = await self._submit(request)
        if request.adapter_version is not None:
            return self._deltas(collector, ((str(request.adapter_version), 0),))
        # vLLM appends to this list when labels change, before it passes on their tokens.
        state = self._llm.output_processor.request_states.get(collector.request_id)
        return self._deltas(collector, state.weight_version_starts if state else None)

    async def _deltas(
        self, collector: RequestOutputCollector, starts: Sequence[tuple[str, int]] | None
    ) -> AsyncGenerator[Delta]:
        finished = False
        position = 0
        try:
            while not finished:
                output = cast(RequestOutput, collector.get_nowait() or await collector.get())
                finished = output.finished
                completion = output.outputs[0]
                if isinstance(completion.stop_reason, str):
                    # vLLM's front end found the stop string. It may tell the engine process only after it
                    # has passed on this output, and an adapter could be removed in between.
                    await self._llm.engine_core.abort_requests_async([collector.request_id])
                if starts is None:  # The request finished before it could be looked up.
                    spans = completion.weight_versions or []
                    starts = [(span.version, span.start) for span in spans]
                for delta in cut(output, completion, position, starts, self._weight_version):
                    yield delta
                position += len(completion.token_ids)
        except EngineDeadError as error:
            finished = True
            raise EngineLost(self._reason()) from error
        finally:
            if not finished:
                await self._llm.abort(collector.request_id, internal=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        # vLLM's front end ends the iterators at once and drops later outputs. Only then does it tell the
        # engine process, whose answer to the next command shows that it has obeyed.
        await self._llm.abort(list(request_ids))
        await self._ask(self._llm.engine_core.is_scheduler_paused_async())

    async def pause(self, *, drop_cache: bool) -> None:
        # Not AsyncLLM.pause_generation, which sleeps so that outputs arrive before it returns. Here outputs
        # carry their version and may arrive at any time.
        core = self._llm.engine_core
        await self._ask(core.pause_scheduler_async(mode="keep", clear_cache=drop_cache))

    async def prepare(self, weights: StagedWeights) -> None:
        self._prepared = None
        update: dict[str, object] | None = update_info(weights)
        more = True
        with _loading(f"making weight version {weights.weight_version} ready"):
            while more:
                # Between two commands the engine process runs a step if it has any work.
                asked = cast(
                    "Awaitable[list[bool]]",
                    self._llm.collective_rpc("prepare_weights", args=(update,)),  # pyright: ignore[reportUnknownMemberType]
                )
                update, more = None, any(await self._ask(asked))
        self._prepared = weights

    async def load(self, weights: StagedWeights) -> None:
        # The same object, because another version may have the same number or the same file.
        prepared, self._prepared = weights is self._prepared, None
        described = {**update_info(weights), "prepared": prepared}
        update = WeightTransferUpdateRequest(update_info=described)
        with _loading(f"loading weight version {weights.weight_version}"):
            await self._ask(self._update(update, weights.weight_version))

    async def resume(self) -> None:
        await self._ask(self._llm.resume_generation())

    async def add_adapter(self, adapter: Adapter) -> None:
        version = adapter.weight_version
        lora = LoRARequest(f"policy@v{version}", version, str(adapter.folder))
        with _loading(f"adding adapter {version}"):
            added = await self._ask(self._llm.add_lora(lora))
        if not added:
            raise EngineLoadFailed(f"adding adapter {version} failed: vLLM did not take it")
        self._adapters[version] = lora

    async def remove_adapter(self, weight_version: int) -> None:
        # The engine process already knows of the end of every request with this adapter.
        del self._adapters[weight_version]
        await self._ask(self._llm.remove_lora(weight_version))

    async def score(
        self, token_ids: NDArray[np.int32], adapter_version: int | None = None
    ) -> NDArray[np.float32]:
        # vLLM scores a prompt by its unmodified logits and without its cache.
        self._scored += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        name = f"score-{self._scored}"
        request = EngineRequest(
            name, token_ids, Sampling(1), name, PROBE_PRIORITY, adapter_version=adapter_version
        )
        collector = await self._submit(request, params)
        try:
            # FINAL_ONLY: the only output is the complete one.
            output = cast(RequestOutput, collector.get_nowait() or await collector.get())
        except EngineDeadError as error:
            raise EngineLost(self._reason()) from error
        except asyncio.CancelledError:
            await self._llm.abort(collector.request_id, internal=True)
            raise
        # The first token has no log-probability.
        scored = cast(FlatLogprobs, output.prompt_logprobs).logprobs
        if len(scored) != len(token_ids) - 1:
            raise RuntimeError(f"{len(token_ids)} tokens were scored with {len(scored)} values")
        return np.asarray(scored, np.float32)

    def stats(self) -> EngineStats:
        return self._owner.load.stats(idle=self._llm.get_num_unfinished_requests() == 0)

    async def _submit(
        self, request: EngineRequest, params: SamplingParams | None = None
    ) -> RequestOutputCollector:
        prompt = tokens_input(request.token_ids.tolist(), cache_salt=request.cache_salt)
        adapter = request.adapter_version
        try:
            return await self._llm.add_request(
                request.request_id,
                prompt,
                params or sampling_params(request),
                lora_request=None if adapter is None else self._adapters[adapter],
                trace_headers=request.trace_headers or None,
                priority=request.priority,
            )
        except EngineDeadError as error:
            raise EngineLost(self._reason()) from error
        except VLLMClientError as error:
            raise ValueError(str(error)) from error

    async def _update(self, update: WeightTransferUpdateRequest, version: int) -> None:
        await self._llm.start_weight_update()
        await self._llm.update_weights(update)
        await self._llm.finish_weight_update(weight_version=str(version))
        self._weight_version = version


@contextlib.contextmanager
def _loading(what: str) -> Generator[None]:
    """vLLM reports every failure of the worker as a bare Exception."""
    try:
        yield
    except EngineLost:
        raise
    except Exception as error:
        raise EngineLoadFailed(f"{what} failed: {error}") from error
