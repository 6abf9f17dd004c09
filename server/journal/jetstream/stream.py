"""Creates, checks and cleans up the stream of a journal.

The stream keeps messages until they are removed explicitly. It has work-queue retention, so that no other
consumer can hold it up. When it is full it refuses messages (`discard new`) instead of dropping the
oldest.

A server killed during a compaction leaves a partial copy, which the next compaction removes. Several of
them may leave too little room for the next one. The stream is then enlarged for that compaction, and reset
to its normal size afterwards.

NATS acknowledges a message once it is written. That survives a crash of NATS, but survives a loss of power
only with `sync_interval: always`. Only the monitoring endpoint of NATS reports that setting.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.request
from http.client import HTTPException
from typing import Any, cast

from penstock.server.journal.jetstream.answers import StreamRefused, StreamState, state_in
from penstock.server.journal.jetstream.connection import STREAM_NOT_FOUND, Connection
from penstock.server.journal.jetstream.link import NO_ROOM
from penstock.server.journal.protocol import JournalUnreadable

logger = logging.getLogger(__name__)

SLACK_BYTES = 16 << 20
"""Extra room in the stream for appends during a compaction."""
MONITOR_SECONDS = 5.0
DUPLICATE_WINDOW_NANOSECONDS = 120 * 10**9


def wanted_config(connection: Connection, room: int) -> dict[str, Any]:
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
    """Create the stream if it does not exist, check its configuration, and return its state.

    Raises StreamRefused, Unreachable and JournalUnreadable.
    """
    wanted = wanted_config(connection, max_bytes + SLACK_BYTES)
    try:
        state = await connection.state()
    except StreamRefused as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        return state_in(await _make_room(connection, "STREAM.CREATE", wanted))
    # The size may change between starts; the other settings must be as required.
    fixed = {name: value for name, value in wanted.items() if name != "max_bytes"}
    other = [
        f"{name} is {found!r}, not {value!r}"
        for name, value in fixed.items()
        if (found := state.config.get(name)) != value
    ]
    if other:
        raise JournalUnreadable(
            f"the stream {wanted['name']} is not a journal's: {'; '.join(other)}; choose another name"
        )
    await fit_stream(connection, state, state.byte_count, max_bytes)
    return state


async def fit_stream(
    connection: Connection, state: StreamState, byte_count: int, max_bytes: int
) -> None:
    """Set the stream's size to the larger of `max_bytes` and `byte_count`, plus slack.

    A stream smaller than its content would lose its oldest messages. If NATS has no room for a
    larger one, an overfull stream keeps its size. Raises StreamRefused and Unreachable.
    """
    room = max(byte_count, max_bytes) + SLACK_BYTES
    if state.config.get("max_bytes") == room:
        return
    config = {**state.config, **wanted_config(connection, room)}
    try:
        await _make_room(connection, "STREAM.UPDATE", config)
    except StreamRefused as error:
        if error.code not in NO_ROOM or byte_count <= max_bytes:
            raise
        logger.warning("cannot enlarge an overfull stream, keeping its size: %s", error)


async def _make_room(connection: Connection, verb: str, config: dict[str, Any]) -> dict[str, Any]:
    """Raises StreamRefused, naming the setting to change if NATS cannot reserve the room."""
    try:
        return await connection.ask(verb, config)
    except StreamRefused as error:
        if error.code not in NO_ROOM:
            raise
        wanted = config["max_bytes"]
        raise StreamRefused(
            f"the NATS server has no {wanted} bytes to set aside for it (journal.max_bytes): {error}",
            error.code,
        ) from error


async def why_not_synced(monitor: str, server_id: str) -> str | None:
    """Return None if the NATS server with this id syncs every write, else what the user must change.

    Raises OSError if its monitor does not answer.
    """
    try:
        server = await asyncio.to_thread(_read_monitor, f"{monitor.rstrip('/')}/varz")
    except (OSError, HTTPException, ValueError) as error:
        raise OSError(f"the NATS server's monitor does not answer: {error}") from error
    if server.get("server_id") != server_id:
        # In a cluster, the client may connect to any server.
        return (
            f"journal.monitor is of the NATS server {server.get('server_id')}, but the connection is to "
            f"{server_id}: cannot check that it syncs every write"
        )
    config = cast("dict[str, Any]", server.get("jetstream", {})).get("config", {})
    if config.get("sync_always") is True:
        return None
    return (
        f"the NATS server {server.get('version')} does not sync every write: set `sync_interval: "
        'always` in its jetstream section (NATS 2.10 or later), or journal.durability = "process"'
    )


def _read_monitor(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=MONITOR_SECONDS) as answer:
        return cast("dict[str, Any]", json.load(answer))


async def purge(connection: Connection, before: int, kept: set[int], gone: set[int]) -> None:
    """Remove the log's messages below `before`, where a snapshot starts, and records outside the log.

    `kept` and `gone` hold the first sequences of those; the ones of `gone` are below `before`. Raises
    StreamRefused and Unreachable.
    """
    subjects = connection.subjects
    await _purge_below(connection, subjects.all_of_log, before)
    # Usually the oldest are removed, and one request covers all of those.
    oldest = min(kept | {before})
    if any(first < oldest for first in gone):
        await _purge_below(connection, subjects.all_outside, oldest)
    for first in sorted(first for first in gone if first >= oldest):
        await connection.ask("STREAM.PURGE", {"filter": subjects.outside(first)})


async def _purge_below(connection: Connection, subject: str, before: int) -> None:
    # NATS would take "before the first" as "all of them".
    if before > 1:
        await connection.ask("STREAM.PURGE", {"filter": subject, "seq": before})


async def list_outside(connection: Connection) -> set[int]:
    """Return the first sequence of each record outside the log. Raises StreamRefused and Unreachable."""
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
