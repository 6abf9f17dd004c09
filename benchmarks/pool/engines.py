"""The engine servers of `benchmarks/pool/hub.py`: sampling takes no processor time, at a realistic pace.

    python -m benchmarks.pool.engines served            one `penstock serve` with a fake engine
    python -m benchmarks.pool.engines many --count N    N addresses in one process, which speak the protocol
                                                        but have no engine

Run it in the root of a checkout. It prints one line, `serving PORT...`, and stops when standard input ends.
`many` reads commands there, one a line:

- `count` prints the number of calls so far, by kind, as JSON;
- `restart N` makes N engines a second behave like new processes, which have no weights.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import cache
from typing import Any

import click
import grpc
import numpy as np
from tests.support.fakes import EOS, TENSORS, VOCAB_SIZE, ByteRenderer, FakeEngine

from penstock.common import allocator
from penstock.server.assembly import Serving
from penstock.server.config import settings as config
from penstock.server.engine.protocol import Delta, EngineRequest, EngineStats, Finish
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind
from penstock.v1 import rollout_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec, messages
from penstock.wire.channel import server_options

SLOTS = 32
TOKENS_PER_SECOND = 20_000.0
"""Rate of one engine with SLOTS turns or more."""
FEWEST = 64
"""Tokens after which the pace is computed again."""
MAX_CONTEXT = 32_768
ENGINES_PER_HOST = 8

read_generate = codec.decoder(rollout_service_pb2.GenerateRequest)
read_info = codec.decoder(rollout_service_pb2.GetServerInfoRequest)


class PacedEngine(FakeEngine):
    """Samples arbitrary tokens at the pace of an engine with 20,000 tokens a second over 32 turns.

    With more than 32 turns, each turn is slower.
    """

    def __init__(self) -> None:
        super().__init__(max_context=MAX_CONTEXT, keeps_history=False)
        self._running_count = 0
        self._aborted: set[str] = set()
        self._tokens = np.full(MAX_CONTEXT, 97, np.int32)
        self._logprobs = np.full(MAX_CONTEXT, -0.5, np.float32)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        return self._paced(request)

    async def _paced(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        loop = asyncio.get_running_loop()
        total, interval = request.sampling.max_tokens, request.stream_interval
        sampled = handed_over = 0
        self._running_count += 1
        due = loop.time()
        try:
            while True:
                # The first token is sent at once, as with vLLM.
                wanted = min(total, handed_over + interval) if handed_over else 1
                count = min(wanted - sampled, FEWEST)
                due += count * max(SLOTS, self._running_count) / TOKENS_PER_SECOND
                await asyncio.sleep(due - loop.time())
                sampled += count
                aborted = request.request_id in self._aborted
                if sampled < wanted and not aborted:
                    continue
                part = slice(handed_over, sampled)
                finish = Finish.ABORTED if aborted else Finish.LENGTH if sampled == total else None
                yield Delta(self._tokens[part], self._logprobs[part], self.version, finish, 0)
                handed_over = sampled
                if finish is not None:
                    return
        finally:
            self._running_count -= 1
            self._aborted.discard(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(request_ids)

    def stats(self) -> EngineStats:
        return EngineStats(self._running_count, 0, 0.2)


async def serve() -> None:
    """Serves one engine server, built like `penstock serve`."""
    loaded = config.load(None, ["listen=127.0.0.1:0", "http.listen="])
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    journal = await open_journal(loaded.journal)
    life = Lifecycle(Serving(PacedEngine(), ByteRenderer(), loaded, journal), server)
    await life.start()
    print(f"serving {port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await life.stop(0.0)


@cache
def segment_bytes(count: int, version: int) -> bytes:
    """An event with `count` tokens, as bytes."""
    segment = messages.Segment(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=codec.array_bytes(np.full(count, 97, np.int32)),
        logprobs=codec.array_bytes(np.full(count, -0.5, np.float32), codec.LOGPROB),
        weight_version=version,
        temperature=1.0,
    )
    return messages.GenerateResponse(segment=segment).SerializeToString()


class BareEngine:
    """The parts of one engine server that a hub sees."""

    def __init__(self, number: int, tokens_per_second: float, asked: Counter[str]) -> None:
        """`tokens_per_second` is the pace of a turn; calls are counted in `asked`."""
        self._host_id = f"host-{number // ENGINES_PER_HOST}"
        self._tokens_per_second = tokens_per_second
        self._asked = asked
        self.restart()

    def restart(self) -> None:
        """Behaves like a new process from now on."""
        self._server_id = uuid.uuid4().hex
        self._active = 0

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers for a gRPC server, with bytes as requests and responses."""
        return grpc.method_handlers_generic_handler(
            "penstock.v1.RolloutService",
            {
                "GetServerInfo": grpc.unary_unary_rpc_method_handler(self._info),
                "Generate": grpc.unary_stream_rpc_method_handler(self._generate),
                "Abort": grpc.unary_unary_rpc_method_handler(self._abort),
                "UpdateWeights": grpc.stream_stream_rpc_method_handler(self._update),
            },
        )

    async def _info(self, data: bytes, _: object) -> bytes:
        self._asked["looks"] += 1
        tensors = [
            {"name": name, "shape": tensor.shape, "optional": tensor.optional}
            for name, tensor in TENSORS.items()
            if read_info(data).with_tensors
        ]
        answer: Any = {
            "model": "fake",
            "active_weight_version": self._active,
            "max_context_length": MAX_CONTEXT,
            "vocab_size": VOCAB_SIZE,
            "weight_dtype": "float32",
            "eos_token_ids": [EOS],
            "server_id": self._server_id,
            "host_id": self._host_id,
            "load": {"kv_cache_usage": 0.2},
            # So the hub can have it fetch a version from the engine server of another host.
            "weight_sources": [weights_pb2.WEIGHT_SOURCE_KIND_PEER],
            "replicas": [{"state": rollout_service_pb2.REPLICA_STATE_SERVING}],
            "tensors": tensors,
        }
        return messages.GetServerInfoResponse(**answer).SerializeToString()

    async def _generate(self, data: bytes, _: object) -> AsyncIterator[bytes]:
        request = read_generate(data)
        total = request.sampling_params.max_tokens
        flush = request.stream_options.flush_interval.ToNanoseconds() / 1e9
        per_flush = max(1, int(flush * self._tokens_per_second))
        self._asked["turns"] += 1
        loop = asyncio.get_running_loop()
        yield messages.GenerateResponse(
            started={"weight_version": self._active}
        ).SerializeToString()
        sampled, due = 0, loop.time()
        while sampled < total:
            count = min(per_flush, total - sampled)
            due += count / self._tokens_per_second
            await asyncio.sleep(due - loop.time())
            sampled += count
            self._asked["segments"] += 1
            yield segment_bytes(count, self._active)
        finished = {
            "finish_reason": trajectory_pb2.FINISH_REASON_LENGTH,
            "policy_token_count": total,
        }
        yield messages.GenerateResponse(finished=finished).SerializeToString()

    async def _abort(self, data: bytes, _: object) -> bytes:
        self._asked["aborts"] += 1
        return b""

    async def _update(self, requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        version = 0
        async for data in requests:
            message = weights_pb2.UpdateWeightsRequest.FromString(data)
            kind = message.WhichOneof("message")
            if kind == "header":
                version = message.header.weight_version
                state = weights_pb2.WEIGHT_STATE_READY
            elif kind == "commit":
                state = weights_pb2.WEIGHT_STATE_STAGED
            elif kind == "activate":
                self._asked["updates"] += 1
                self._active = version
                state = weights_pb2.WEIGHT_STATE_ACTIVE
            else:
                continue
            answer = messages.UpdateWeightsResponse(
                weight_version=version, state=state, active_weight_version=self._active
            )
            if state == weights_pb2.WEIGHT_STATE_STAGED:
                # The hub makes other engine servers of this host read the version here.
                answer.memory.name = "/dev/null"
                answer.memory.host_namespace = self._host_id
            yield answer.SerializeToString()
            if state == weights_pb2.WEIGHT_STATE_ACTIVE:
                return


async def serve_many(count: int, tokens_per_second: float) -> None:
    """Serves each engine on a separate port, and so with a separate connection."""
    asked: Counter[str] = Counter()
    engines = [BareEngine(number, tokens_per_second, asked) for number in range(count)]
    servers: list[grpc.aio.Server] = []
    ports: list[int] = []
    for engine in engines:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((engine.handlers(),))
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    print("serving", *ports, flush=True)
    loop = asyncio.get_running_loop()
    restarting: asyncio.Task[None] | None = None
    while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if line[0] == "count":
            print(json.dumps(asked), flush=True)
        else:
            if restarting is not None:
                restarting.cancel()
            restarting = asyncio.create_task(restart(engines, float(line[1])))
    if restarting is not None:
        restarting.cancel()
    await asyncio.gather(*(server.stop(0.0) for server in servers))


async def restart(engines: Sequence[BareEngine], per_second: float) -> None:
    """Restarts the engines one after the other, at an even pace."""
    if not per_second:
        return
    due = asyncio.get_running_loop().time()
    for engine in itertools.cycle(engines):
        engine.restart()
        due += 1 / per_second
        await asyncio.sleep(due - asyncio.get_running_loop().time())


@click.command()
@click.argument("kind", type=click.Choice(["served", "many"]))
@click.option("--count", default=1)
@click.option("--tokens-per-second", default=TOKENS_PER_SECOND / SLOTS)
def main(kind: str, count: int, tokens_per_second: float) -> None:
    """Serve until standard input ends."""
    allocator.keep_freed_memory()
    asyncio.run(serve() if kind == "served" else serve_many(count, tokens_per_second))


if __name__ == "__main__":
    main()
