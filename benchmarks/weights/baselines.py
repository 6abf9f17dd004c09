"""The minimal baselines that `benchmarks/weights/transports.py` compares weight uploads with.

    Memcpy        one copy of all bytes into shared memory that already exists
    Tcp           the bytes through a socket on loopback, into memory that already exists
    Calls         a unary call for each tensor, to a plain grpc.aio server
    engine()      vLLM alone: its load, its reload from disk, its restart

If a baseline needs another side, that side runs in a separate process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection

import grpc
import numpy as np
from benchmarks.support.processes import Process, started

from penstock.common.memory_file import MemoryFile

ACKNOWLEDGED = b"\1"
PAUSED_BEFORE = 0.02
"""Seconds that AsyncLLM.pause_generation sleeps after the engine has stopped, before it returns."""
SPAWN = multiprocessing.get_context("spawn")


class Memcpy:
    """The lower bound for any transport through shared memory."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data
        self._file = MemoryFile(data.nbytes)
        self._target = np.frombuffer(self._file.view, np.uint8)
        self()

    def __call__(self) -> float:
        """Copies all bytes; returns the seconds that took."""
        began = time.perf_counter()
        np.copyto(self._target, self._data)
        return time.perf_counter() - began


class Tcp:
    """The lower bound for any transport through a connection."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = memoryview(data)
        mine, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_receive, args=(theirs, data.nbytes), daemon=True)
        self._process.start()
        self._socket = socket.create_connection(("127.0.0.1", mine.recv()))
        self()

    def __call__(self) -> float:
        """Sends all bytes; returns the seconds until the other side has received them."""
        began = time.perf_counter()
        self._socket.sendall(self._data)
        assert self._socket.recv(1) == ACKNOWLEDGED
        return time.perf_counter() - began

    def close(self) -> None:
        self._socket.close()
        self._process.join()


def _receive(ready: Connection, length: int) -> None:
    view = memoryview(bytearray(length))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ready.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        while True:
            filled = 0
            while filled < length:
                count = connection.recv_into(view[filled:])
                if not count:
                    return
                filled += count
            connection.sendall(ACKNOWLEDGED)


class Calls:
    """One call for each tensor, one after the other."""

    def __init__(self) -> None:
        mine, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{mine.recv()}", options=[("grpc.max_send_message_length", -1)]
        )
        self._call = self._channel.unary_unary("/baseline/Take")

    async def __call__(self, tensors: Sequence[memoryview]) -> float:
        """Makes one call for each tensor; returns the seconds they took."""
        began = time.perf_counter()
        for tensor in tensors:
            await self._call(bytes(tensor))
        return time.perf_counter() - began

    async def close(self) -> None:
        await self._channel.close()
        self._process.terminate()
        self._process.join()


def _answer(ready: Connection) -> None:
    async def take(request: bytes, _: object) -> bytes:
        return ACKNOWLEDGED

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handler = grpc.unary_unary_rpc_method_handler(take)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("baseline", {"Take": handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


# vLLM alone, in a separate process: a line of JSON in, a line of JSON out.


class Engine:
    """vLLM without a server around it."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def __call__(self, **command: object) -> float:
        """Runs a command in the engine's process; returns the seconds it took."""
        return float(await self._process.ask(json.dumps(command)))


@contextlib.asynccontextmanager
async def engine(model: str, options: Sequence[str]) -> AsyncIterator[Engine]:
    command = ("-m", "benchmarks.weights.baselines", model, *options)
    async with started(*command, end_seconds=None) as process:
        await process.ready()
        yield Engine(process)


class _Bare:
    """vLLM's AsyncLLM with the options and the weight loader that `penstock serve` uses."""

    def __init__(self, model: str, options: Sequence[str]) -> None:
        from penstock.server.vllm.options import engine_arguments

        self._arguments = engine_arguments(["--model", model, *options])
        self._count = 0

    async def start(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(self._arguments)
        await self._turn([0], 1)

    async def _turn(self, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        self._count += 1
        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        async for _ in self.llm.generate(tokens_input(prompt), params, f"bare-{self._count}"):
            pass

    async def load(self, update: dict[str, object]) -> float:
        """Returns the seconds the otherwise idle engine takes to load a staged version."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        began = time.perf_counter()
        await self.llm.start_weight_update()
        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self.llm.finish_weight_update(weight_version="1")
        return time.perf_counter() - began

    async def reload(self, path: str, turns: int, tokens: int) -> float:
        """Returns the seconds that vLLM's own pause, reload from disk and resume stop turns in flight."""
        running = [
            asyncio.ensure_future(self._turn([100 + index] * 8, tokens)) for index in range(turns)
        ]
        await asyncio.sleep(0.3)
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        began = time.perf_counter() - PAUSED_BEFORE
        await self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        await self.llm.resume_generation()
        seconds = time.perf_counter() - began
        await asyncio.gather(*running)
        return seconds

    async def restart(self) -> float:
        """Returns the seconds from the order to stop to the first token of a new engine."""
        began = time.perf_counter()
        await asyncio.to_thread(self.llm.shutdown)
        await self.start()
        return time.perf_counter() - began


async def _engine_main(model: str, options: Sequence[str]) -> None:
    # vLLM prints to standard output, so answers use a separate descriptor.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    bare = _Bare(model, options)
    await bare.start()
    print("ready", file=answers, flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        seconds = await getattr(bare, command.pop("do"))(**command)
        print(json.dumps(seconds), file=answers, flush=True)
    bare.llm.shutdown()
    # AsyncLLM would shut down again when it is garbage-collected, in a partly finalized interpreter.
    os._exit(0)


if __name__ == "__main__":
    from penstock.server.vllm import environment as vllm_environment

    vllm_environment.set_cpu_defaults()
    asyncio.run(_engine_main(sys.argv[1], sys.argv[2:]))
