"""One connection to NATS, and the stream of a journal on it. The only module that imports nats.

Writing: each message says which place it is for (`Nats-Expected-Last-Sequence`) and carries an id of this
writer and that place (`Nats-Msg-Id`). So whatever becomes of the connection it is sent again until it is
acknowledged, and is stored once: the server knows the id, or, where it has forgotten it, the place is taken
by the message itself. Where it is taken by another one, another server writes: nothing is sent any more.

Waiting: what cannot be reached is waited for, `patience` seconds since anything was last answered.

Whom it speaks to: connected -> checked -> up -> lost -> connected again. What NATS has to be, such as one
that syncs each write, it may no longer be when it comes back: nothing is sent before it is asked, and
nothing any more where it says no.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.server.config.settings import JournalSection
from penstock.server.journal.jetstream.answers import (
    Fenced,
    Fetched,
    Refused,
    StreamState,
    Unreachable,
    state_in,
)
from penstock.server.journal.jetstream.frames import Message, Subjects

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5
ANSWER_SECONDS = 5.0
"""After which a message is sent again."""
AGAIN_SECONDS = 0.1
PING_SECONDS = 5
WINDOW_BYTES = 8 << 20
"""Sent and not yet acknowledged."""
NO_RESPONDERS = "503"
NOT_FOUND = 404
WRONG_LAST_SEQUENCE = 10071
STORE_FAILED = 10077
STREAM_NOT_FOUND = 10059
NO_ROOM = (10023, 10047)
"""Errors of JetStream: too little storage in all, or for the account."""
# Errors of the client that pass by themselves, once the server is there again.
PASSING = (
    errors.TimeoutError,
    errors.NoRespondersError,
    errors.OutboundBufferLimitError,
    errors.ConnectionReconnectingError,
    errors.StaleConnectionError,
    errors.FlushTimeoutError,
    OSError,
)


Check = Callable[[], Awaitable[str | None]]
"""Says what speaks against the server that is connected to. Raises OSError where that one does not say."""


class _Client(Client):
    """nats-py's, which connects anew over the socket of a try that failed in its handshake: nobody would
    close that one."""

    async def _connect_to_server(self, s: Any) -> None:
        transport: Any = self._transport
        if transport is not None:
            transport.close()
        await super()._connect_to_server(s)

    def told(self, name: str) -> str:
        """What the server said of itself as it was connected to."""
        return str(self._server_info.get(name, ""))


class Connection:
    """To the stream of one journal."""

    def __init__(self, section: JournalSection, check: Check | None = None) -> None:
        """`check` is asked each time it is connected."""
        assert section.url is not None
        self._section = section
        self._check = check
        self._checking: asyncio.Task[None] | None = None
        self._against: str | None = None
        """Why nothing is sent any more."""
        self.subjects = Subjects(section.stream)
        self._patience = section.patience_seconds
        self.writer = uuid.uuid4().hex
        """Who writes here, in the ids of its messages."""
        self._client = _Client()
        self._begun = False
        """Whether there is something to close."""
        self._inbox = ""
        self._answers: dict[str, asyncio.Future[Msg | None]] = {}
        """What is waited for, by where it comes to; None where the connection was lost before."""
        self._asked = 0
        self._failures: dict[str, None] = {}
        """What tries to connect failed with since it was last connected, each once."""
        self._up = asyncio.Event()
        self._answering: Subscription | None = None
        """To who asks which server writes; None while this one does not."""

    async def connect(self) -> None:
        """Raises Unreachable and Refused."""
        section = self._section
        options = _security(section)
        self._begun = True
        try:
            async with asyncio.timeout(self._patience):
                await self._client.connect(
                    servers=cast("str", section.url).split(","),
                    name=f"penstock {section.stream}",
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
            # It does not close what it was about to connect when its time was over.
            await self.close()
            # All of them: a server that lets nobody in says so, or only ends the connection.
            reason = str(error) or "; ".join(self._failures) or type(error).__name__
            raise Unreachable(f"NATS cannot be reached: {reason}") from error
        except ModuleNotFoundError as error:
            self._begun = False
            raise Refused(
                f"journal.credentials needs {error.name}: pip install 'penstock[jetstream]'", 0
            ) from error
        against: str | None = None
        if self._check is not None:
            try:
                against = await self._check()
            except OSError as error:
                raise Unreachable(f"what NATS promises is not known: {error}") from error
        # Where it was lost meanwhile, another check says when it is up.
        if self._client.is_connected and self._checking is None:
            self._against = against
            self._up.set()
        self._inbox = self._client.new_inbox()
        await self._subscribe(f"{self._inbox}.*", self._on_answer)

    @property
    def max_payload(self) -> int:
        """Most bytes of a message, headers included."""
        return self._client.max_payload

    @property
    def server_id(self) -> str:
        """Of the server that is connected to."""
        return self._client.told("server_id")

    @property
    def server_name(self) -> str:
        """Of the server that is connected to."""
        return self._client.told("server_name")

    async def close(self) -> None:
        """Ends it."""
        self._stop_checking()
        self._lose_answers()
        if not self._begun:
            return
        try:
            with suppress(errors.Error, OSError):
                await self._client.close()
        except asyncio.CancelledError:
            # The library gives up its try to connect, and with it cancels what it waits for here itself.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    # The connection's own events

    async def _on_error(self, error: Exception) -> None:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            # It was told to end while it tried to connect: what the try failed with took the place of that.
            raise asyncio.CancelledError
        # Each try to connect again fails with one, of which the first of a kind says all.
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
            # In a task of its own: the client reads nothing before this returns.
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
                    logger.warning("what NATS promises is not known: %s", error)
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
        """Sends what is answered; returns where to. Whoever calls takes it from `_answers`.

        Raises PASSING, and Refused where NATS is not what it has to be.
        """
        if not self._up.is_set():
            raise ConnectionResetError("the connection was lost")
        if self._against is not None:
            raise Refused(self._against, 0)
        self._asked += 1
        reply = f"{self._inbox}.{self._asked}"
        self._answers[reply] = asyncio.get_running_loop().create_future()
        await self._client.publish(subject, body, reply, headers)
        return reply

    async def _answer(self, reply: str) -> Msg:
        """Raises PASSING."""
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await self._answers[reply]
        if answer is None:
            raise ConnectionResetError("the connection was lost")
        if _unavailable(answer):
            raise errors.NoRespondersError
        return answer

    # Requests

    async def ask(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request of JetStream's own, such as STREAM.INFO of this stream; asked until it is answered.

        Raises Refused and Unreachable.
        """
        subject = f"$JS.API.{verb}.{self.subjects.stream}"
        answer = await self._request(subject, json.dumps(body or {}).encode())
        table = cast("dict[str, Any]", json.loads(answer.data))
        if (error := table.get("error")) is not None:
            raise Refused(str(error.get("description")), int(error.get("err_code", error["code"])))
        return table

    async def _request(self, subject: str, body: bytes) -> Msg:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        while True:
            reply = ""
            try:
                reply = await self._send(subject, body)
                return await self._answer(reply)
            except PASSING as error:
                await self._again(until - clock(), error)
            except errors.Error as error:
                raise Unreachable(f"the connection to NATS has ended: {error}") from error
            finally:
                self._answers.pop(reply, None)

    async def _again(self, left: float, error: Exception) -> None:
        """Returns when it is worth another try. Raises Unreachable."""
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    # Connected, and nobody answers: the server is about to find its streams.
                    await asyncio.sleep(AGAIN_SECONDS)
                    await self._up.wait()
                    return
        reason = str(error) or type(error).__name__
        raise Unreachable(f"NATS has not answered for {self._patience:.0f} s: {reason}")

    async def state(self) -> StreamState:
        """Raises Refused and Unreachable."""
        return state_in(await self.ask("STREAM.INFO"))

    async def fetch(self, sequence: int) -> Fetched | None:
        """The message in a place; None where there is none. Raises Refused and Unreachable."""
        return await self._fetch({"seq": sequence})

    async def fetch_last(self, subject: str) -> Fetched | None:
        """The newest of a subject."""
        return await self._fetch({"last_by_subj": subject})

    async def _fetch(self, wanted: dict[str, Any]) -> Fetched | None:
        subject = f"$JS.API.DIRECT.GET.{self.subjects.stream}"
        answer = await self._request(subject, json.dumps(wanted).encode())
        headers = answer.headers or {}
        if (status := headers.get("Status")) is not None:
            if int(status) == NOT_FOUND:
                return None
            raise Refused(f"NATS answers {status} {headers.get('Description', '')}", int(status))
        return Fetched(
            int(headers["Nats-Sequence"]),
            headers["Nats-Subject"],
            headers.get("Nats-Msg-Id", ""),
            answer.data,
        )

    # Writing

    async def store(self, messages: Sequence[Message]) -> None:
        """Returns once all are stored in their places. Raises Fenced, Refused and Unreachable."""
        window: list[Message] = []
        size = 0
        for message in messages:
            if window and size + len(message.body) > WINDOW_BYTES:
                await self._store_window(window)
                window, size = [], 0
            window.append(message)
            size += len(message.body)
        await self._store_window(window)

    async def _store_window(self, window: Sequence[Message]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        done = 0
        while done < len(window):
            try:
                async for _ in self._stored(window[done:]):
                    done += 1
                    until = clock() + self._patience
            except PASSING as error:
                await self._again(until - clock(), error)
            except errors.Error as error:
                raise Unreachable(f"the connection to NATS has ended: {error}") from error

    async def _stored(self, messages: Sequence[Message]) -> AsyncIterator[Message]:
        """Sends messages, and yields each in its order once it is stored. Raises PASSING."""
        replies: list[str] = []
        try:
            for message in messages:
                headers = {
                    "Nats-Msg-Id": self._id(message.sequence),
                    "Nats-Expected-Last-Sequence": str(message.sequence - 1),
                }
                replies.append(await self._send(message.subject, message.body, headers))
            for message, reply in zip(messages, replies, strict=True):
                await self._check_stored(message, await self._answer(reply))
                yield message
        finally:
            for reply in replies:
                self._answers.pop(reply, None)

    def _id(self, sequence: int) -> str:
        return f"{self.writer}.{sequence}"

    async def _check_stored(self, message: Message, answer: Msg) -> None:
        """Raises what the answer says; ConnectionResetError where it is worth another try."""
        table = json.loads(answer.data)
        error = table.get("error")
        if error is None:
            if table["seq"] != message.sequence:
                raise Refused(f"message {message.sequence} came to be in {table['seq']}", 0)
        elif error.get("err_code") == WRONG_LAST_SEQUENCE:
            await self._check_taken(message.sequence)
        else:
            raise Refused(str(error.get("description")), int(error.get("err_code", 0)))

    async def _check_taken(self, sequence: int) -> None:
        """Returns where a place that was refused holds the message that was meant for it already."""
        stream = self.subjects.stream
        found = await self.fetch(sequence)
        if found is not None:
            if found.message_id == self._id(sequence):
                return
            raise Fenced(f"another server writes to the stream {stream}")
        last = (await self.state()).last
        if last >= sequence:
            raise Fenced(f"another server has cleared the stream {stream}")
        if last < sequence - 1:
            raise Refused(
                f"the stream {stream} ends at message {last}, and {sequence - 1} were acknowledged: "
                "NATS has lost what it had said was stored",
                WRONG_LAST_SEQUENCE,
            )
        raise ConnectionResetError("a message before it was lost with the connection")

    # Who writes

    async def ask_owner(self, seconds: float, absent_seconds: float) -> str | None:
        """What the server that writes says of itself; None where there is none, or it does not answer.

        There is none once nobody has listened for `absent_seconds`. That begins anew where the connection
        is lost: whoever writes has lost theirs too, and may come back later. Raises Unreachable.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        absent_since: float | None = None
        while True:
            try:
                answer = await self._ask_owner_once(seconds)
            except PASSING as error:
                absent_since = None
                await self._again(until - clock(), error)
                continue
            except errors.Error as error:
                raise Unreachable(f"the connection to NATS has ended: {error}") from error
            if answer is None:
                logger.warning(
                    "whoever writes to the stream %s has not answered for %.0f s and is taken over from",
                    self.subjects.stream,
                    seconds,
                )
                return None
            if (answer.headers or {}).get("Status") != NO_RESPONDERS:
                return answer.data.decode(errors="replace")
            absent_since = clock() if absent_since is None else absent_since
            if clock() >= absent_since + absent_seconds:
                return None
            await asyncio.sleep(AGAIN_SECONDS)

    async def _ask_owner_once(self, seconds: float) -> Msg | None:
        """The owner's answer, or that nobody listens; None where somebody does and says nothing. Raises
        PASSING where it is NATS that is away."""
        reply = await self._send(self.subjects.owner, b"")
        try:
            async with asyncio.timeout(seconds):
                answer = await self._answers[reply]
        except TimeoutError:
            await self._client.flush(cast("int", ANSWER_SECONDS))
            return None
        finally:
            self._answers.pop(reply, None)
        if answer is None:
            raise ConnectionResetError("the connection was lost")
        return answer

    async def answer_as_owner(self, what: str) -> None:
        """Tells whoever asks from here on who writes."""

        async def answer(asked: Msg) -> None:
            with suppress(errors.Error, OSError):
                await asked.respond(what.encode())

        self._answering = await self._subscribe(self.subjects.owner, answer)

    async def stop_answering(self) -> None:
        """Tells nobody any more, not itself either. Raises Unreachable."""
        assert self._answering is not None
        answering, self._answering = self._answering, None
        try:
            await answering.unsubscribe()
        except errors.Error as error:
            raise Unreachable(f"the connection to NATS has ended: {error}") from error

    async def _subscribe(
        self, subject: str, what: Callable[[Msg], Awaitable[None]]
    ) -> Subscription:
        # One of its parameters that is not used here is without a type.
        return await cast("Any", self._client).subscribe(subject, cb=what)


def _unavailable(answer: Msg) -> bool:
    """Whether there was nobody to answer, or nobody yet who could."""
    if answer.headers:
        return answer.headers.get("Status") == NO_RESPONDERS
    error = cast("dict[str, Any]", json.loads(answer.data).get("error") or {})
    # What there is no room for has the same code, and does not pass.
    full = error.get("err_code") in (STORE_FAILED, *NO_ROOM)
    return error.get("code") == int(NO_RESPONDERS) and not full


def _security(section: JournalSection) -> dict[str, Any]:
    """What the client is told of credentials and TLS. Raises Refused, with the setting."""
    for name in ("credentials", "ca", "certificate", "key"):
        path = getattr(section, name)
        try:
            # The client would try again and again.
            if path is not None:
                path.open("rb").close()
        except OSError as error:
            raise Refused(f"journal.{name}: {error.strerror}: {path}", 0) from error
    options: dict[str, Any] = {}
    if section.credentials is not None:
        options["user_credentials"] = str(section.credentials)
    if section.ca is not None or section.certificate is not None:
        try:
            options["tls"] = _tls(section)
        except OSError as error:
            raise Refused(f"journal.ca, certificate, key: {error}", 0) from error
    return options


def _tls(section: JournalSection) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=section.ca)
    if section.certificate is not None:
        context.load_cert_chain(section.certificate, section.key)
    return context
