"""A hub's calls to an engine server after the hub closed the connection,
because the server was unlisted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from penstock.server.pool.remote import EngineRefused, EngineServer, Unanswered
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire.security import Security
from tests.support.scripted_trainer_server import refuse


class Silent(grpc.GenericRpcHandler):
    """Accepts every call and never answers."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def wait(requests: object, context: object) -> None:
            self.called.set()
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(wait)


@pytest.fixture
async def silent() -> AsyncGenerator[tuple[Silent, EngineServer]]:
    server, handler = grpc.aio.server(), Silent()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield handler, EngineServer(f"127.0.0.1:{port}", Security())
    await server.stop(None)


async def stage(engine: EngineServer) -> None:
    await engine.stage(weights_pb2.WeightHeader(weight_version=1)).staged()


async def info(engine: EngineServer) -> None:
    await engine.info()


async def generate(engine: EngineServer) -> None:
    request = rollout_service_pb2.GenerateRequest(trajectory_id="a")
    async for _ in engine.generate(request, ()):
        pass


@pytest.mark.parametrize("ask", [stage, info, generate])
async def test_a_call_whose_connection_is_closed_is_unanswered_and_cancels_nobody(
    silent: tuple[Silent, EngineServer], ask: Callable[[EngineServer], Awaitable[None]]
) -> None:
    handler, engine = silent
    asking = asyncio.ensure_future(ask(engine))
    await asyncio.wait_for(handler.called.wait(), 10)
    await engine.close()
    await asyncio.wait([asking], timeout=10)
    assert not asking.cancelled()
    with pytest.raises(Unanswered):
        await asking


class Full(grpc.GenericRpcHandler):
    """Is ready for an upload and reads no more of it."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def wait(requests: AsyncIterator[bytes], context: Any) -> None:
            await anext(requests)
            ready = weights_pb2.UpdateWeightsResponse(state=weights_pb2.WEIGHT_STATE_READY)
            await context.write(ready.SerializeToString())
            self.called.set()
            await asyncio.Event().wait()

        return grpc.stream_stream_rpc_method_handler(wait)  # type: ignore[arg-type]


async def test_an_upload_whose_server_stops_during_a_write_is_unanswered() -> None:
    payload = bytes(32 * 2**20)
    header = weights_pb2.WeightHeader(weight_version=1)
    header.inline.length_bytes = len(payload)
    # gRPC reports the status of the server to some of these uploads, and the failed write to most.
    for _ in range(10):
        server, handler = grpc.aio.server(), Full()
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        engine = EngineServer(f"127.0.0.1:{port}", Security())
        there = engine.stage(header, (payload,))
        staged = asyncio.ensure_future(there.staged())
        await asyncio.wait_for(handler.called.wait(), 10)
        await server.stop(None)
        with pytest.raises(Unanswered):
            await staged
        there.cancel()
        await engine.close()


async def test_who_gives_up_a_call_is_cancelled(silent: tuple[Silent, EngineServer]) -> None:
    handler, engine = silent
    asking = asyncio.ensure_future(stage(engine))
    await asyncio.wait_for(handler.called.wait(), 10)
    asking.cancel()
    await asyncio.wait([asking], timeout=10)
    assert asking.cancelled()
    await engine.close()


class Refusing(grpc.GenericRpcHandler):
    """Refuses every call with one status of the error table."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        self._code, self._reason = code, reason

    def service(self, handler_call_details: object) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def answer(requests: object, context: object) -> None:
            await refuse(context, self._code, self._reason)

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.mark.parametrize(
    ("code", "reason", "raised"),
    [
        (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", Unanswered),
        (grpc.StatusCode.UNAVAILABLE, "WEIGHTS_INCONSISTENT", Unanswered),
        (grpc.StatusCode.UNAVAILABLE, "DRAINING", Unanswered),
        (grpc.StatusCode.UNAVAILABLE, "JOURNAL_FAILED", Unanswered),
        (grpc.StatusCode.INTERNAL, "INTERNAL_ERROR", EngineRefused),
    ],
)
async def test_only_one_that_is_of_no_use_to_anybody_is_as_one_that_does_not_answer(
    code: grpc.StatusCode, reason: str, raised: type[Exception]
) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(code, reason),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = EngineServer(f"127.0.0.1:{port}", Security())
    with pytest.raises(raised):
        await generate(engine)
    await engine.close()
    await server.stop(None)
