"""Calls to one server: channel, deadlines, retries, trace context.

- UNAVAILABLE from an idempotent unary call: gRPC retries for a few seconds, by the service config of
  `wire.channel`. For a `patient` call, this module then retries until the server is back or
  `Patience.reconnect_seconds` have passed.
- RESOURCE_EXHAUSTED with RetryInfo, or from gRPC itself, which gives no reason: this module retries after
  the delay, within a bound.
- A lost stream: its owner (`trajectory`, `leases`) recovers it, because only the owner knows its state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from penstock.client.errors import Overloaded, PenstockError, ServerUnavailable, from_rpc
from penstock.common import telemetry
from penstock.v1 import rollout_service_pb2 as rollout
from penstock.wire import methods
from penstock.wire.failure import why_unreachable
from penstock.wire.security import Security, open_channel

M = TypeVar("M", bound=Message)

TurnRequest = rollout.GenerateRequest | rollout.ContinueRequest


@dataclass(frozen=True, slots=True)
class Patience:
    call_seconds: float = 30.0
    """Deadline of a unary call."""
    reconnect_seconds: float = 60.0
    """How long to wait for a lost server before the turn or close that needs it fails."""
    overload_seconds: float = 120.0
    """How long to retry with a server that is full and names a retry delay."""


class Backoff:
    """Growing, jittered waits. Their bound starts with the first wait."""

    def __init__(self, limit_seconds: float, *, first: float = 0.1, longest: float = 5.0) -> None:
        self._limit, self._first, self._longest = limit_seconds, first, longest
        self._delay = first
        self._give_up_at: float | None = None

    def reset(self) -> None:
        self._delay, self._give_up_at = self._first, None

    async def wait(self, at_least: float = 0.0) -> bool:
        """Waits once. Returns False at once if the wait would exceed the bound."""
        now = asyncio.get_running_loop().time()
        if self._give_up_at is None:
            self._give_up_at = now + self._limit
        delay = max(at_least, self._delay * random.uniform(0.5, 1.0))
        if now + delay > self._give_up_at:
            return False
        self._delay = min(self._delay * 2, self._longest)
        await asyncio.sleep(delay)
        return True


class Calls:
    """One channel to one server. The first call opens it, on its own event loop."""

    def __init__(self, address: str, patience: Patience, security: Security | None = None) -> None:
        """Raises CredentialsUnusable and ValueError."""
        self.address = address
        self.patience = patience
        self._security = security or Security()
        # Checked here, so that the error surfaces at setup and not in an agent's first turn.
        self._security.check(address)

    @cached_property
    def _channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, self._security)

    async def close(self) -> None:
        """Closes the channel. Calls in flight are cancelled."""
        if "_channel" in self.__dict__:
            await self._channel.close()

    async def why_unreachable(self) -> str:
        """Why the server cannot be reached, in words; empty if it answers."""
        return await why_unreachable(self._channel)

    async def get_server_info(
        self, *, wait_for_ready: bool = False
    ) -> rollout.GetServerInfoResponse:
        """Describes the server. With `wait_for_ready`, waits for the server without a limit."""
        patient = None if wait_for_ready else False
        request = rollout.GetServerInfoRequest()
        return await self.ask(request, rollout.GetServerInfoResponse, patient=patient)

    async def ask(self, request: Message, response: type[M], *, patient: bool | None = False) -> M:
        """Makes the unary call that answers with `response`.

        If `patient`, waits for a lost server within the bound; if None, without a limit.
        """
        call = methods.unary(self._channel, response)
        clock = asyncio.get_running_loop().time
        timeout = None if patient is None else self.patience.call_seconds
        give_up_at = clock() + self.patience.reconnect_seconds
        lost = Backoff(self.patience.reconnect_seconds)
        overload = Backoff(self.patience.overload_seconds)
        while True:
            if patient:
                timeout = max(0.0, give_up_at - clock())
            try:
                return await call(
                    request,
                    timeout=timeout,
                    metadata=telemetry.outgoing(),
                    wait_for_ready=patient is not False,
                )
            except grpc.aio.AioRpcError as error:
                if patient and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    seconds = self.patience.reconnect_seconds
                    message = f"no answer from {self.address} for {seconds:g} s"
                    if cause := await self.why_unreachable():
                        message += f": {cause}"
                    raise ServerUnavailable(message) from error
                failed = from_rpc(error, self.address)
                if patient and isinstance(failed, ServerUnavailable) and await lost.wait():
                    continue
                if not await outlasts(overload, failed):
                    raise failed from error
                # The server answered, so a later loss starts a new wait.
                give_up_at = clock() + self.patience.reconnect_seconds
                lost.reset()

    async def stream(
        self,
        request: Message,
        response: type[M],
        timeout: float | None,
        metadata: telemetry.Metadata,
    ) -> AsyncGenerator[M]:
        """Closing the iterator cancels the call.

        Raises PenstockError; ServerUnavailable if the stream was lost.
        """
        method = methods.streaming(self._channel, response)
        call = method(request, timeout=timeout, metadata=metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, self.address) from error
        finally:
            call.cancel()


async def outlasts(overload: Backoff, failed: PenstockError) -> bool:
    """Waits as long as a full server asked. Returns False without a delay, or past the bound."""
    if not isinstance(failed, Overloaded) or failed.retry_after_seconds is None:
        return False
    return await overload.wait(at_least=failed.retry_after_seconds)
