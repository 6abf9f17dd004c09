"""The stream of one journal, over a connection to NATS.

Each message states the sequence it must get (`Nats-Expected-Last-Sequence`) and carries an id made of this
writer and that sequence (`Nats-Msg-Id`). So the connection sends it again after any failure until it is
acknowledged. NATS stores it once: either it still knows the id, or the message itself occupies the
sequence. If another message occupies it, another server writes to the stream, and nothing more is sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from nats import errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from penstock.server.config.journal import JournalSection
from penstock.server.journal.jetstream.answers import (
    Fenced,
    Fetched,
    StreamRefused,
    StreamState,
    Unreachable,
    state_in,
)
from penstock.server.journal.jetstream.frames import StreamMessage, Subjects
from penstock.server.journal.jetstream.link import (
    AGAIN_SECONDS,
    ANSWER_SECONDS,
    FAILED,
    NO_RESPONDERS,
    WINDOW_BYTES,
    Check,
    Link,
)

logger = logging.getLogger(__name__)

NOT_FOUND = 404
WRONG_LAST_SEQUENCE = 10071
STREAM_NOT_FOUND = 10059


class Connection(Link):
    def __init__(self, section: JournalSection, check: Check | None = None) -> None:
        super().__init__(section, check)
        self.subjects = Subjects(section.stream)
        self.writer = uuid.uuid4().hex
        """Id of this writer, part of the ids of its messages."""
        self._answering: Subscription | None = None
        """Subscription that identifies this server as the writer; None while it is not."""

    # Requests

    async def ask(self, verb: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request of the JetStream API about this stream, such as STREAM.INFO.

        Repeats it until it is answered. Raises StreamRefused and Unreachable.
        """
        subject = f"$JS.API.{verb}.{self.subjects.stream}"
        answer = await self._request(subject, json.dumps(body or {}).encode())
        table = cast("dict[str, Any]", json.loads(answer.data))
        if (error := table.get("error")) is not None:
            raise StreamRefused(
                str(error.get("description")), int(error.get("err_code", error["code"]))
            )
        return table

    async def state(self) -> StreamState:
        """Raises StreamRefused and Unreachable."""
        return state_in(await self.ask("STREAM.INFO"))

    async def fetch(self, sequence: int) -> Fetched | None:
        """Return the message with this sequence, or None. Raises StreamRefused and Unreachable."""
        return await self.fetch_one({"seq": sequence})

    async def fetch_one(self, wanted: dict[str, Any]) -> Fetched | None:
        """Like `fetch`, with a condition of NATS, such as `last_by_subj`."""
        subject = f"$JS.API.DIRECT.GET.{self.subjects.stream}"
        answer = await self._request(subject, json.dumps(wanted).encode())
        headers = answer.headers or {}
        if (status := headers.get("Status")) is not None:
            if int(status) == NOT_FOUND:
                return None
            raise StreamRefused(
                f"NATS answered {status} {headers.get('Description', '')}", int(status)
            )
        return Fetched(
            int(headers["Nats-Sequence"]),
            headers["Nats-Subject"],
            headers.get("Nats-Msg-Id", ""),
            answer.data,
        )

    # Writing

    async def store(self, messages: Sequence[StreamMessage]) -> None:
        """Store messages under their sequences; returns once all are acknowledged.

        Raises Fenced, StreamRefused and Unreachable.
        """
        window: list[StreamMessage] = []
        size = 0
        for message in messages:
            if window and size + len(message.body) > WINDOW_BYTES:
                await self._store_window(window)
                window, size = [], 0
            window.append(message)
            size += len(message.body)
        await self._store_window(window)

    async def _store_window(self, window: Sequence[StreamMessage]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        done = 0
        while done < len(window):
            left, replies = window[done:], list[str]()
            try:
                for message in left:
                    headers = {
                        "Nats-Msg-Id": self._id(message.sequence),
                        "Nats-Expected-Last-Sequence": str(message.sequence - 1),
                    }
                    replies.append(await self._send(message.subject, message.body, headers))
                for message, reply in zip(left, replies, strict=True):
                    await self._check_stored(message, await self._answer(reply))
                    done += 1
                    until = clock() + self._patience
            except FAILED as error:
                await self._again(until - clock(), error)
            finally:
                for reply in replies:
                    self._answers.pop(reply, None)

    def _id(self, sequence: int) -> str:
        return f"{self.writer}.{sequence}"

    async def _check_stored(self, message: StreamMessage, answer: Msg) -> None:
        """Raise the error of an answer, or ConnectionResetError if the message should be sent again."""
        table = json.loads(answer.data)
        error = table.get("error")
        if error is None:
            if table["seq"] != message.sequence:
                raise StreamRefused(f"NATS stored message {message.sequence} as {table['seq']}", 0)
        elif error.get("err_code") == WRONG_LAST_SEQUENCE:
            await self._check_taken(message.sequence)
        else:
            raise StreamRefused(str(error.get("description")), int(error.get("err_code", 0)))

    async def _check_taken(self, sequence: int) -> None:
        """Return if the refused sequence already holds this very message.

        Otherwise raises Fenced, StreamRefused, or ConnectionResetError if the message should be sent
        again.
        """
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
            raise StreamRefused(
                f"the stream {stream} ends at message {last}, but {sequence - 1} were acknowledged: "
                "NATS has lost messages that it had acknowledged",
                WRONG_LAST_SEQUENCE,
            )
        raise ConnectionResetError("an earlier message was lost with the connection")

    # Ownership

    async def ask_owner(self, seconds: float, absent_seconds: float) -> str | None:
        """Ask which server writes to the stream; returns its answer, or None.

        None means that a writer listens but did not answer within `seconds`, or that no writer listened for
        `absent_seconds`. That time starts again if the connection is lost, because the writer may have lost
        its connection too and may come back later. Raises Unreachable.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._patience
        absent_since: float | None = None
        while True:
            try:
                answer = await self._ask_owner_once(seconds)
            except FAILED as error:
                absent_since = None
                await self._again(until - clock(), error)
                continue
            if answer is None:
                logger.warning(
                    "stream %s: its writer has not answered for %.0f s; taking over",
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
        """Ask once; returns the owner's answer or NATS's "no responders".

        None means that a server listens but does not answer. Raises FAILED.
        """
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
        """Answer other servers that look for the stream's writer, with the text `what`."""

        async def answer(asked: Msg) -> None:
            with suppress(*FAILED):
                await asked.respond(what.encode())

        self._answering = await self._subscribe(self.subjects.owner, answer)

    async def stop_answering(self) -> None:
        """Stop answering, so that this server does not find itself when it asks. Raises Unreachable."""
        assert self._answering is not None
        answering, self._answering = self._answering, None
        try:
            await answering.unsubscribe()
        except errors.Error as error:
            raise Unreachable(f"the connection to NATS has ended: {error}") from error
