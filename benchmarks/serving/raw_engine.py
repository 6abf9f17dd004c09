"""vLLM's engine without a server, in a separate process.

    python -m benchmarks.serving.raw_engine MODEL

It reads one line of JSON and answers with one line of JSON, repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from benchmarks.serving.load import ENGINE, SAMPLING, prompt
from benchmarks.support.processes import started


async def raw_main(model: str) -> None:
    """Answers each line of {"turns", "tokens", "mode"} with the seconds that the turns took."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from penstock.server.vllm.options import engine_arguments

    engine = AsyncLLM.from_engine_args(engine_arguments(["--model", model, *ENGINE]))
    count = 0

    async def turn(tokens: int, mode: str) -> None:
        nonlocal count
        count += 1
        delta = mode != "final"
        params = VllmSamplingParams(
            **SAMPLING,
            max_tokens=tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if delta else RequestOutputKind.FINAL_ONLY,
            stream_interval=int(mode) if delta else None,
        )
        got = 0
        async for output in engine.generate(tokens_input(prompt()), params, f"raw-{count}"):
            completion = output.outputs[0]
            assert completion.logprobs is not None
            got += len(completion.token_ids)
        assert got == tokens, got

    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        began = time.perf_counter()
        await asyncio.gather(
            *(turn(request["tokens"], request["mode"]) for _ in range(request["turns"]))
        )
        print(json.dumps(time.perf_counter() - began), flush=True)
    engine.shutdown()
    # AsyncLLM would shut down again when it is garbage-collected, in a partly finalized interpreter.
    os._exit(0)


@contextlib.asynccontextmanager
async def raw_engine(model: str) -> AsyncIterator[Callable[[int, int, str], Awaitable[float]]]:
    """Starts the process; yields what runs a number of turns there and returns their seconds."""
    command = ("-m", "benchmarks.serving.raw_engine", model)
    async with started(*command, end_seconds=None) as process:
        await process.ready()

        async def run(turns: int, tokens: int, mode: str) -> float:
            request = {"turns": turns, "tokens": tokens, "mode": mode}
            return float(await process.ask(json.dumps(request)))

        yield run


if __name__ == "__main__":
    asyncio.run(raw_main(sys.argv[1]))
