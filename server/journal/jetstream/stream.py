"""The stream of a journal: made where there is none, checked where there is, cleared of what nobody needs.

A stream keeps what it is given until it is told otherwise: nothing in it expires, and what is read stays.
It has the retention of a work queue, so that nobody but its server can be made to wait on it, and refuses
what does not fit (`discard new`) rather than to forget what is oldest.

A server that is killed in the middle of a compaction leaves the copy that it was making, which the next
compaction removes. Several of them may leave so much that the next has no room: the stream is made larger
for it, and as large as it should be again once it is done.

NATS acknowledges a message once it is written, which survives its own end; that it survives the loss of
power it has to be told (`sync_interval: always`), and says only where it is monitored.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from http.client import HTTPException
from typing import Any, cast

from penstock.server.journal.jetstream.answers import Refused, StreamState, state_in
from penstock.server.journal.jetstream.connection import NO_ROOM, STREAM_NOT_FOUND, Connection
from penstock.server.journal.records import JournalUnreadable

logger = logging.getLogger(__name__)

SLACK_BYTES = 16 << 20
"""Room beside what may be in the stream, for what is appended while it is compacted."""
MONITOR_SECONDS = 5.0
DUPLICATE_WINDOW_NANOSECONDS = 120 * 10**9


def wanted_config(connection: Connection, room: int) -> dict[str, Any]:
    """The stream as it has to be."""
    subjects = connection.subjects
    return {
        "name": subjects.stream,
        "subjects": [subjects.all_of_log, subjects.all_outside],
        "retention": "workqueue",
        "storage": "file",
        "discard": "new",
        "max_bytes": room,
        "max_msgs": -1,
        "max_age": 0,
        "max_msg_size": -1,
        "max_msgs_per_subject": -1,
        "num_replicas": 1,
        "duplicate_window": DUPLICATE_WINDOW_NANOSECONDS,
        "allow_direct": True,
    }


async def open_stream(connection: Connection, max_bytes: int) -> StreamState:
    """What is in the stream, which is made where there is none. Raises Refused, Unreachable and
    JournalUnreadable."""
    wanted = wanted_config(connection, max_bytes + SLACK_BYTES)
    try:
        state = await connection.state()
    except Refused as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        return state_in(await _make_room(connection, "STREAM.CREATE", wanted))
    # How much may be in it may change; what becomes of it may not.
    fixed = {name: value for name, value in wanted.items() if name != "max_bytes"}
    other = [
        f"{name} is {found!r} and not {value!r}"
        for name, value in fixed.items()
        if (found := state.config.get(name)) != value
    ]
    if other:
        raise JournalUnreadable(
            f"the stream {wanted['name']} is no journal's: {'; '.join(other)}; name another one"
        )
    await fit_stream(connection, state, state.byte_count, max_bytes)
    return state


async def fit_stream(
    connection: Connection, state: StreamState, byte_count: int, max_bytes: int
) -> None:
    """Has the stream take `max_bytes`, or so many where that is more: of one that is too small for what it
    holds NATS would drop the oldest. Where NATS has no room for more, it stays as it is.

    Raises Refused and Unreachable.
    """
    room = max(byte_count, max_bytes) + SLACK_BYTES
    if state.config.get("max_bytes") == room:
        return
    config = {**state.config, **wanted_config(connection, room)}
    try:
        await _make_room(connection, "STREAM.UPDATE", config)
    except Refused as error:
        if error.code not in NO_ROOM or byte_count <= max_bytes:
            raise
        logger.warning("a stream that is fuller than it should be stays as it is: %s", error)


async def _make_room(connection: Connection, verb: str, config: dict[str, Any]) -> dict[str, Any]:
    """Asks for a stream, whose room is set aside for it. Raises Refused, with what to do."""
    try:
        return await connection.ask(verb, config)
    except Refused as error:
        if error.code not in NO_ROOM:
            raise
        wanted = config["max_bytes"]
        raise Refused(
            f"the NATS server has no {wanted} bytes to set aside for it (journal.max_bytes): {error}",
            error.code,
        ) from error


async def why_not_synced(monitor: str, server_id: str) -> str | None:
    """None where the NATS server of this id says that it syncs every write, else what to do. Raises
    OSError."""
    try:
        server = await asyncio.to_thread(_read_monitor, f"{monitor.rstrip('/')}/varz")
    except (OSError, HTTPException, ValueError) as error:
        raise OSError(f"the NATS server's monitor does not answer: {error}") from error
    if server.get("server_id") != server_id:
        # Of a cluster, the client may connect to any.
        return (
            f"journal.monitor is of the NATS server {server.get('server_id')}, and the one that is "
            f"connected to is {server_id}: what it promises is not known"
        )
    config = cast("dict[str, Any]", server.get("jetstream", {})).get("config", {})
    if config.get("sync_always") is True:
        return None
    return (
        f"the NATS server {server.get('version')} does not sync every write: set `sync_interval: "
        'always` in its jetstream section, which 2.10 and later know, or journal.durability = "process"'
    )


def _read_monitor(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=MONITOR_SECONDS) as answer:
        return cast("dict[str, Any]", json.load(answer))


async def purge_log(connection: Connection, before: int) -> None:
    """Removes what was appended before a snapshot. Raises Refused and Unreachable."""
    await _purge(connection, connection.subjects.all_of_log, before)


async def _purge(connection: Connection, subject: str, before: int) -> None:
    # To NATS "before the first" is the same as "all of them".
    if before > 1:
        await connection.ask("STREAM.PURGE", {"filter": subject, "seq": before})


async def purge_outside(
    connection: Connection, before: int, kept: set[int], gone: set[int]
) -> None:
    """Removes records that are outside, by their first messages, which are all before a snapshot.

    Raises Refused and Unreachable.
    """
    subjects = connection.subjects
    # Mostly the oldest go, which is one request for all of them.
    oldest = min(kept | {before})
    if any(first < oldest for first in gone):
        await _purge(connection, subjects.all_outside, oldest)
    for first in sorted(first for first in gone if first >= oldest):
        await connection.ask("STREAM.PURGE", {"filter": subjects.outside(first)})


async def list_outside(connection: Connection) -> set[int]:
    """First messages of the records that are outside. Raises Refused and Unreachable."""
    found: set[int] = set()
    offset = 0
    while True:
        table = await connection.ask(
            "STREAM.INFO", {"subjects_filter": connection.subjects.all_outside, "offset": offset}
        )
        names = cast("dict[str, int]", table["state"].get("subjects") or {})
        found |= {int(name.rpartition(".")[2]) for name in names}
        offset += len(names)
        if not names or offset >= int(table.get("total", 0)):
            return found
