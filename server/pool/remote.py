"""One engine server from the view of a hub: the calls and the meaning of their answers.

Every call returns its answer or raises `Unanswered` or `EngineRefused`. `Unanswered` means that the
process is gone, stops or cannot serve any caller, so the hub should try another engine server.
`EngineRefused` means that it rejects this particular call.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from functools import cached_property

import grpc
import numpy as np

from penstock.server.engine.protocol import Sampling
from penstock.server.turns.requests import sampling_message
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import Failure, read_failure
from penstock.wire.messages import (
    AbortRequest,
    GenerateRequest,
    GetServerInfoRequest,
    TokenSequence,
    TrajectorySelector,
)
from penstock.wire.reasons import Reason
from penstock.wire.security import Security, open_channel
from penstock.wire.upload import NotStaged, Piece, Staging

_SERVICE = "/penstock.v1.RolloutService"
INFO_SECONDS = 10.0
ABORT_SECONDS = 60.0
# Reasons for which an engine server is reachable but useless to every caller.
USELESS = (Reason.ENGINE_LOST, Reason.WEIGHTS_INCONSISTENT, Reason.DRAINING, Reason.JOURNAL_FAILED)


class Unanswered(Exception):
    """The engine server does not answer, or cannot serve any caller."""


class OutOfTime(Unanswered):
    """The answer did not arrive in time. The engine server may be alive, and hang or be busy."""


class EngineRefused(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason or failure.code.name}: {failure.message}")
        self.failure = failure


class EngineServer:
    """The first call makes the channels, on its own event loop."""

    def __init__(self, address: str, security: Security) -> None:
        """Raises CredentialsUnusable if `security` cannot be used for the address."""
        self.address = address
        self._security = security
        self._turns: dict[str, grpc.aio.Call] = {}
        security.check(address)

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, self._security, own_connection=True)

    @cached_property
    def _bulk(self) -> grpc.aio.Channel:
        # A separate connection, so that weights do not delay tokens.
        return open_channel(self.address, self._security, own_connection=True)

    async def close(self) -> None:
        for name in ("_channel", "_bulk"):
            if name in self.__dict__:
                await self.__dict__[name].close()

    async def info(
        self, *, with_tensors: bool = False, wait: bool = False
    ) -> rollout_service_pb2.GetServerInfoResponse:
        """With `wait`, waits a while for a connection."""
        decode = codec.decoder(rollout_service_pb2.GetServerInfoResponse)
        call = self._channel.unary_unary(f"{_SERVICE}/GetServerInfo", codec.encode, decode)
        with _answers():
            request = GetServerInfoRequest(with_tensors=with_tensors)
            return await call(request, timeout=INFO_SECONDS, wait_for_ready=wait)

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """Returns when the engine server no longer works on any of them."""
        decode = codec.decoder(rollout_service_pb2.AbortResponse)
        call = self._channel.unary_unary(f"{_SERVICE}/Abort", codec.encode, decode)
        selector = TrajectorySelector(trajectory_ids=trajectory_ids)
        with _answers():
            await call(AbortRequest(trajectories=selector), timeout=ABORT_SECONDS)

    async def generate(
        self, request: rollout_service_pb2.GenerateRequest, metadata: Iterable[tuple[str, str]]
    ) -> AsyncGenerator[rollout_service_pb2.GenerateResponse]:
        """Closing the generator early ends the turn."""
        decode = codec.decoder(rollout_service_pb2.GenerateResponse)
        method = self._channel.unary_stream(f"{_SERVICE}/Generate", codec.encode, decode)
        with _answers():
            call = method(request, metadata=tuple(metadata))
            self._turns[request.trajectory_id] = call
            try:
                async for event in call:
                    yield event
            finally:
                self._turns.pop(request.trajectory_id, None)
                call.cancel()

    def end_turns(self, trajectory_ids: Iterable[str] | None = None) -> None:
        """As if the connection was lost: each `generate` raises Unanswered. None ends all turns."""
        for name in list(self._turns) if trajectory_ids is None else trajectory_ids:
            if (call := self._turns.get(name)) is not None:
                call.cancel()

    async def sample(self, seconds: float) -> None:
        """Samples one token in a test turn. Raises EngineRefused, and Unanswered after `seconds`."""
        request = GenerateRequest(
            trajectory_id=uuid.uuid4().hex,
            tokens=TokenSequence(token_ids=codec.array_bytes(np.zeros(1, np.int32))),
            sampling_params=sampling_message(Sampling(max_tokens=1)),
            single_turn=True,
        )
        try:
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(self.generate(request, ())) as events,
            ):
                async for event in events:
                    if event.WhichOneof("event") == "segment":
                        return
        except TimeoutError as error:
            raise Unanswered(f"sampled nothing for {seconds:g} s") from error
        raise Unanswered("a turn ended without a token")

    def stage(self, header: weights_pb2.WeightHeader, payload: Iterable[Piece] = ()) -> StagedThere:
        """Begins the upload of a version that is activated later."""
        return StagedThere(self._bulk, header, payload)


class StagedThere(Staging):
    """A version on its way to an engine server. Raises Unanswered and EngineRefused."""

    async def staged(self) -> weights_pb2.UpdateWeightsResponse:
        with _answers():
            return await super().staged()

    async def activate(
        self, in_flight: weights_pb2.InFlightPolicy.ValueType
    ) -> weights_pb2.UpdateWeightsResponse:
        with _answers():
            return await super().activate(in_flight)


@contextlib.contextmanager
def _answers() -> Generator[None]:
    try:
        yield
    except asyncio.CancelledError as error:
        # gRPC also raises this if this side closes the connection, without a cancelled task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unanswered("the connection was closed") from error
    except (NotStaged, grpc.aio.UsageError) as error:
        # UsageError: the channel was closed in the meantime.
        raise Unanswered(str(error)) from error
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        if failure.reason in USELESS or (failure.is_unanswered and not failure.reason):
            late = failure.code == grpc.StatusCode.DEADLINE_EXCEEDED
            problem = failure.message or failure.code.name
            raise (OutOfTime if late else Unanswered)(problem) from error
        raise EngineRefused(failure) from error
