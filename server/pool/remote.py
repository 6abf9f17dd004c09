"""One engine server from the view of a hub: the calls and the meaning of their answers. Holds no state.

Every call ends in one of three ways: with its answer, with `Unanswered`, or with `EngineRefused`.
`Unanswered` means that the process is gone, stops or cannot serve any caller, so the hub should try
another engine server. `EngineRefused` means that it rejects this particular call.
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
from penstock.v1 import rollout_service_pb2, trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.failure import Failure, read_failure
from penstock.wire.reasons import Reason
from penstock.wire.security import Security, open_channel
from penstock.wire.upload import NotStaged, Piece, Staging

GenerateRequest = codec.twin(rollout_service_pb2.GenerateRequest)
GetServerInfoRequest = codec.twin(rollout_service_pb2.GetServerInfoRequest)
AbortRequest = codec.twin(rollout_service_pb2.AbortRequest)
TrajectorySelector = codec.twin(rollout_service_pb2.TrajectorySelector)
TokenSequence = codec.twin(trajectory_pb2.TokenSequence)

_SERVICE = "/penstock.v1.RolloutService"
INFO_SECONDS = 10.0
ABORT_SECONDS = 60.0
# Reasons for which an engine server is reachable but useless to every caller.
USELESS = (
    Reason.ENGINE_LOST,
    Reason.WEIGHTS_INCONSISTENT,
    Reason.DRAINING,
    Reason.JOURNAL_FAILED,
)


class Unanswered(Exception):
    """The engine server does not answer, or cannot serve any caller."""


class OutOfTime(Unanswered):
    """The answer did not arrive in time. The engine server may be alive, and hang or be busy."""


class EngineRefused(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.reason or failure.code.name}: {failure.message}")
        self.failure = failure

    @property
    def is_full(self) -> bool:
        """Whether it has no room now, but may have later."""
        return self.failure.is_full


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
        call = self._channel.unary_unary(
            f"{_SERVICE}/GetServerInfo",
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GetServerInfoResponse),
        )
        with _answers():
            return await call(
                GetServerInfoRequest(with_tensors=with_tensors),
                timeout=INFO_SECONDS,
                wait_for_ready=wait,
            )

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """Returns when the engine server no longer works on any of them."""
        call = self._channel.unary_unary(
            f"{_SERVICE}/Abort",
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.AbortResponse),
        )
        selector = TrajectorySelector(trajectory_ids=trajectory_ids)
        with _answers():
            await call(AbortRequest(trajectories=selector), timeout=ABORT_SECONDS)

    async def generate(
        self, request: rollout_service_pb2.GenerateRequest, metadata: Sequence[tuple[str, str]]
    ) -> AsyncGenerator[rollout_service_pb2.GenerateResponse]:
        """Closing the generator early ends the turn."""
        method = self._channel.unary_stream(
            f"{_SERVICE}/Generate",
            request_serializer=codec.encode,
            response_deserializer=codec.decoder(rollout_service_pb2.GenerateResponse),
        )
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
        """Samples one token in a turn of no caller. Raises EngineRefused, and Unanswered after
        `seconds`."""
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
        return StagedThere(Staging(self._bulk, header, payload))


class StagedThere:
    """A version on its way to an engine server, from the header to its activation."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    async def ready(self) -> bool:
        """False if the engine server already has the version or refuses it."""
        return await self._staging.ready()

    async def staged(self) -> weights_pb2.UpdateWeightsResponse:
        """Waits until the engine server has verified the version."""
        with _answers():
            return await self._staging.staged()

    async def activate(
        self, in_flight: weights_pb2.InFlightPolicy.ValueType
    ) -> weights_pb2.UpdateWeightsResponse:
        """Returns once the version is sampled."""
        with _answers():
            return await self._staging.activate(in_flight)

    def cancel(self) -> None:
        """Safe to repeat."""
        self._staging.cancel()


@contextlib.contextmanager
def _answers() -> Generator[None]:
    """Converts a call's errors to `Unanswered` and `EngineRefused`."""
    try:
        yield
    except asyncio.CancelledError as error:
        # gRPC also raises this if this side closes the connection, without a cancelled task.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Unanswered("the connection was closed") from error
    except NotStaged as error:
        raise Unanswered(str(error)) from error
    except grpc.aio.UsageError as error:
        # The channel was closed in the meantime.
        raise Unanswered(str(error)) from error
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        if failure.reason in USELESS or (failure.is_unanswered and not failure.reason):
            late = failure.code == grpc.StatusCode.DEADLINE_EXCEEDED
            problem = failure.message or failure.code.name
            raise (OutOfTime if late else Unanswered)(problem) from error
        raise EngineRefused(failure) from error


FINISHED = {
    trajectory_pb2.FINISH_REASON_STOP,
    trajectory_pb2.FINISH_REASON_LENGTH,
    trajectory_pb2.FINISH_REASON_ABORTED,
}
