"""A connection to NATS that outlives its servers. This module and `connection` alone import nats.

Requests wait for an unreachable NATS until `patience` seconds have passed since its last answer.

States: connected -> checked -> up -> lost -> connected again. A NATS server that comes back may no longer
meet the requirements, such as syncing each write. Nothing is sent before that is checked again, and nothing
more if the check fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.common.distribution import pip_install
from penstock.server.config.journal import JournalSection
from penstock.server.journal.jetstream.answers import StreamRefused, Unreachable

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5
ANSWER_SECONDS = 5.0
"""Timeout of an answer, after which a message is sent again."""
AGAIN_SECONDS = 0.1
PING_SECONDS = 5
WINDOW_BYTES = 8 << 20
"""Maximum of bytes sent but not yet acknowledged."""
NO_RESPONDERS = "503"
STORE_FAILED = 10077
NO_ROOM = (10023, 10047)
"""JetStream error codes: too little storage on the server, or for the account."""
FAILED = (errors.Error, OSError)
PASSING = (
    errors.TimeoutError,
    errors.NoRespondersError,
    errors.OutboundBufferLimitError,
    errors.ConnectionReconnectingError,
    errors.StaleConnectionError,
    errors.FlushTimeoutError,
    OSError,
)
"""Those of FAILED that pass once NATS is reachable again."""

Check = Callable[[], Awaitable[str | None]]
"""Returns why the connected NATS server is unsuitable, or None. Raises OSError if it does not answer."""


class _Client(Client):
    """The nats-py client, with a fix: it leaks the socket of an attempt that failed in its handshake."""

    async def _connect_to_server(self, s: Any) -> None:
        transport: Any = self._transport
        if transport is not None:
            transport.close()
        await super()._connect_to_server(s)

    def told(self, name: str) -> str:
        return str(self._server_info.get(name, ""))


class Link:
    def __init__(self, section: JournalSection, check: Check | None = None) -> None:
        """`check` runs after each connect."""
        assert section.url is not None
        self._section = section
        self._servers = section.url.split(",")
        self._check = check
        self._checking: asyncio.Task[None] | None = None
        self._against: str | None = None
        """Why nothing may be sent to this NATS server; None if it is suitable."""
        self._patience = section.patience_seconds
        self._client = _Client()
        self._begun = False
        """Whether the client needs closing."""
        self._inbox = ""
        self._answers: dict[str, asyncio.Future[Msg | None]] = {}
        """Pending answers by reply subject; None is set if the connection was lost first."""
        self._asked = 0
        self._failures: dict[str, None] = {}
        """Distinct errors of attempts to connect since the connection was last up, in order."""
        self._up = asyncio.Event()

    async def connect(self) -> None:
        """Connect and check the NATS server. Raises Unreachable and StreamRefused."""
        options = _security(self._section)
        self._begun = True
        try:
            async with asyncio.timeout(self._patience):
                await self._client.connect(
                    servers=self._servers,
                    name=f"penstock {self._section.stream}",
                    connect_timeout=CONNECT_SECONDS,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=cast("int", AGAIN_SECONDS),
                    ping_interval=PING_SECONDS,
                    max_outstanding_pings=2,
                    pending_size=2 * WINDOW_BYTES,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_lost,
                    reconnected_cb=self._on_back,
                    **options,
                )
        except (TimeoutError, OSError, errors.Error, ValueError) as error:
            # On a timeout, the client leaves the socket open that it was connecting.
            await self.close()
            # Report all errors: a server that rejects the login may state that, or just hang up.
            reason = str(error) or "; ".join(self._failures) or type(error).__name__
            raise Unreachable(f"NATS cannot be reached: {reason}") from error
        except ModuleNotFoundError as error:
            self._begun = False
            raise StreamRefused(
                f"journal.credentials needs {error.name}: {pip_install('jetstream')}", 0
            ) from error
        against: str | None = None
        if self._check is not None:
            try:
                against = await self._check()
            except OSError as error:
                raise Unreachable(
                    f"cannot check whether NATS syncs every write: {error}"
                ) from error
        # If the connection was lost meanwhile, `_check_again` decides when it is up.
        if self._client.is_connected and self._checking is None:
            self._against = against
            self._up.set()
        self._inbox = self._client.new_inbox()
        await self._subscribe(f"{self._inbox}.*", self._on_answer)

    @property
    def max_payload(self) -> int:
        """Maximum bytes of a message, headers included."""
        return self._client.max_payload

    def told(self, name: str) -> str:
        """Return a field of the info that the NATS server sent on connecting, such as `server_id`."""
        return self._client.told(name)

    async def close(self) -> None:
        self._stop_checking()
        self._lose_answers()
        if not self._begun:
            return
        try:
            with suppress(*FAILED):
                await self._client.close()
        except asyncio.CancelledError:
            # When nats-py cancels its own attempt to connect, the cancellation also surfaces here.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    # The connection's own events

    async def _on_error(self, error: Exception) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # nats-py was cancelled while connecting, and the attempt's error replaced the cancellation.
            raise asyncio.CancelledError
        # Each attempt to reconnect fails with an error; only the first of a kind is worth a warning.
        text = str(error) or type(error).__name__
        logger.log(logging.DEBUG if text in self._failures else logging.WARNING, "NATS: %s", text)
        self._failures[text] = None

    async def _on_lost(self) -> None:
        self._stop_checking()
        self._up.clear()
        self._lose_answers()

    async def _on_back(self) -> None:
        logger.warning("connected to NATS again")
        self._failures.clear()
        if self._check is None:
            self._up.set()
        else:
            # In a separate task, because the client reads nothing until this callback returns.
            self._checking = asyncio.create_task(self._check_again(self._check))

    async def _check_again(self, check: Check) -> None:
        said = ""
        while True:
            try:
                self._against = await check()
                self._up.set()
                return
            except OSError as error:
                if str(error) != said:
                    logger.warning(
                        "cannot check whether NATS syncs every write, retrying: %s", error
                    )
                said = str(error)
            await asyncio.sleep(AGAIN_SECONDS)

    def _stop_checking(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None

    async def _on_answer(self, message: Msg) -> None:
        waiting = self._answers.get(message.subject)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _lose_answers(self) -> None:
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> str:
        """Send a request; returns its reply subject. The caller removes the entry from `_answers`.

        Raises FAILED, and StreamRefused if the NATS server is unsuitable.
        """
        if not self._up.is_set():
            raise ConnectionResetError("the connection was lost")
        if self._against is not None:
            raise StreamRefused(self._against, 0)
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        self._answers[reply] = asyncio.get_running_loop().create_future()
        try:
            await self._client.publish(subject, body, reply, headers)
        except BaseException:
            del self._answers[reply]
            raise
        return reply

    async def _answer(self, reply: str) -> Msg:
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await self._answers[reply]
        if answer is None:
            raise ConnectionResetError("the connection was lost")
        if _unavailable(answer):
            raise errors.NoRespondersError
        return answer

    async def _request(self, subject: str, body: bytes) -> Msg:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        while True:
            reply = ""
            try:
                reply = await self._send(subject, body)
                return await self._answer(reply)
            except FAILED as error:
                await self._again(until - clock(), error)
            finally:
                self._answers.pop(reply, None)

    async def _again(self, left: float, error: Exception) -> None:
        """Return when another attempt is worthwhile. Raises Unreachable if no time is left, or if the
        error does not pass."""
        if not isinstance(error, PASSING):
            raise Unreachable(f"the connection to NATS has ended: {error}") from error
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    # Connected but without an answer: NATS may still be loading its streams.
                    await asyncio.sleep(AGAIN_SECONDS)
                    await self._up.wait()
                    return
        reason = str(error) or type(error).__name__
        raise Unreachable(f"NATS has not answered for {self._patience:.0f} s: {reason}")

    async def _subscribe(
        self, subject: str, what: Callable[[Msg], Awaitable[None]]
    ) -> Subscription:
        # Cast: `subscribe` has an untyped parameter.
        return await cast("Any", self._client).subscribe(subject, cb=what)


def _unavailable(answer: Msg) -> bool:
    if answer.headers:
        return answer.headers.get("Status") == NO_RESPONDERS
    error: dict[str, Any] = json.loads(answer.data).get("error") or {}
    # A lack of storage has the same code, but does not pass.
    full = error.get("err_code") in (STORE_FAILED, *NO_ROOM)
    return error.get("code") == int(NO_RESPONDERS) and not full


def _security(section: JournalSection) -> dict[str, Any]:
    """Return the client's options for credentials and TLS. Raises StreamRefused, naming the setting."""
    for name in ("credentials", "ca", "certificate", "key"):
        path = getattr(section, name)
        try:
            # Check first: the client would retry forever.
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise StreamRefused(f"journal.{name}: {error.strerror}: {path}", 0) from error
    options: dict[str, Any] = {}
    if section.credentials is not None:
        options["user_credentials"] = str(section.credentials)
    if section.ca is not None or section.certificate is not None:
        try:
            options["tls"] = context = ssl.create_default_context(cafile=section.ca)
            if section.certificate is not None:
                context.load_cert_chain(section.certificate, section.key)
        except OSError as error:
            raise StreamRefused(f"journal.ca, certificate, key: {error}", 0) from error
    return options
