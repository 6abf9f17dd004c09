"""One run on several processes: rank 0 leads, the others follow.

Rank 0 is the trainer that `loop` describes. It holds the configuration, the data, the server connections
and the run's folder. The other ranks hold their shard of the model and execute rank 0's commands.

    rank 0                                          every other rank
    joins the process group                         joins the process group
    listens, sends its port, accepts each rank      connects
    builds its shard of the model                   builds its shard of the model
    a command ───────────────────────────────────►  waits for it without a deadline
    does its part       ◄── collectives ──►         does its part
    ...                                             ...
    end(0) ──────────────────────────────────────►  its process exits
    waits until all are gone; exits

The **process group** runs the collectives, which have torch's deadline. Only a command starts a
collective, so no rank sits in one while rank 0 waits for a batch. The **control connections**, one from
each rank to rank 0, carry commands in one direction and a failure in the other, as bytes that are never
pickled. They are silent while rank 0 has no command, and have no deadline. If a process dies, the kernel
closes its connection at once. Rank 0 broadcasts a key over the process group; a process without it is not
accepted. Rank 0 listens on a port that the kernel chooses, at every address of its host, or on the
loopback address if it started the other ranks.

A failure ends the run in every case, with a non-zero exit status. The files on disk are then as after a
kill -9, which every file format here is designed for:

    an error on another rank    the rank waits MOMENT_SECONDS, in case its error is only the consequence of
                                  another rank's end. Then it reports to rank 0 and exits. Rank 0 prints the
                                  error on stderr and exits at once, because a collective may never return
    another rank is killed      its connection ends. Rank 0 prints which rank is gone and exits at once
    an error on rank 0          rank 0 waits just as long for a rank that failed earlier; that rank's error
                                  is then the one reported. Otherwise the run unwinds, rank 0 sends
                                  end(status), and the others exit with that status at once
    rank 0 is killed            the others' connections end, and they exit at once
    a rank hangs                (SIGSTOP) the collective's deadline expires, an error like any other
    a host is unreachable       TCP keepalive probes the silent connections, and ends them
    SIGTERM, SIGINT             on rank 0: the stop on request that `loop` describes. The others ignore them
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Generator, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import cast

from penstock.trainer.core.errors import ConfigInvalid, TrainerError
from penstock.trainer.policy.process_group import (
    EXIT_CONFIG,
    EXIT_STOPPED,
    LOCAL,
    PARTING_SECONDS,
    exit_at_once,
)

# How long a failed rank waits for news of an earlier failure on another rank.
MOMENT_SECONDS = 2.0
KEY_BYTES = 32
PORT_BYTES = 4
END = b"end"
# Time that a process has to prove that it is a rank, after it connects to rank 0.
LET_IN_SECONDS = 5
# TCP keepalive: an unreachable host is noticed after about SILENT_SECONDS + PROBES * PROBE_SECONDS.
SILENT_SECONDS, PROBE_SECONDS, PROBES = 60, 15, 4
# Longest time that sending a command blocks if the rank does not read.
SEND_SECONDS = 1800


class Leader:
    """Rank 0's end of the control connections. Call `tell` from one thread at a time."""

    def __init__(self, connections: Mapping[int, Connection[bytes, bytes]]) -> None:
        """`connections` are keyed by rank."""
        self._connections = dict(connections)
        self._ending = threading.Event()
        self._lost = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def size(self) -> int:
        """Number of ranks, including this one."""
        return len(self._connections) + 1

    def tell(self, rank: int, command: str, payload: bytes = b"") -> None:
        """Send a command to a rank, without waiting for it to be executed."""
        connection = self._connections[rank]
        try:
            connection.send_bytes(command.encode())
            connection.send_bytes(payload)
        except OSError:
            # The watching thread reports why and ends the process.
            self.await_news()
            raise

    def tell_all(self, command: str, payload: bytes = b"") -> None:
        for rank in self._connections:
            self.tell(rank, command, payload)

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Wrap rank 0's own part of a command. If another rank failed before an error here, that rank's
        error is the one reported."""
        try:
            yield
        except Exception:
            self.await_news()
            raise

    def await_news(self) -> None:
        """Wait MOMENT_SECONDS. If a rank fails meanwhile, this process ends instead."""
        self._lost.wait(MOMENT_SECONDS)

    def end(self, status: int) -> None:
        """End the other ranks and wait until they are gone, for at most PARTING_SECONDS.

        With status zero they finish their commands first. With any other status they exit at once.
        """
        self._ending.set()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(END)
                connection.send_bytes(str(status).encode())
        self._watching.join(PARTING_SECONDS)

    def _watch(self) -> None:
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while ranks:
            for ready in multiprocessing.connection.wait(list(ranks)):
                connection = cast("Connection[bytes, bytes]", ready)
                try:
                    failure = cast("dict[str, object]", json.loads(connection.recv_bytes()))
                    self._end_for(str(failure["message"]), cast("int", failure["status"]))
                except (EOFError, OSError):
                    self._end_for(f"rank {ranks[connection]} is gone", EXIT_STOPPED)
                    del ranks[connection]

    def _end_for(self, message: str, status: int) -> None:
        if not self._ending.is_set():
            exit_at_once(message, status)


class Follower:
    """Another rank's end of its control connection to rank 0."""

    def __init__(self, connection: Connection[bytes, bytes], rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._commands: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._never = threading.Event()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def commands(self) -> Iterator[tuple[str, bytes]]:
        """Yield each command with its payload, until rank 0 ends."""
        while (command := self._commands.get()) is not None:
            yield command

    @contextlib.contextmanager
    def reporting(self) -> Generator[None]:
        """Wrap everything this rank does, so that rank 0 reports its error."""
        try:
            yield
        except Exception as error:
            # If rank 0 ends during this wait, so does this process.
            self._never.wait(MOMENT_SECONDS)
            said = str(error) if isinstance(error, TrainerError) else f"{error!r}"
            status = EXIT_CONFIG if isinstance(error, ConfigInvalid) else EXIT_STOPPED
            failure = {"message": f"rank {self._rank}: {said}", "status": status}
            with contextlib.suppress(OSError):
                self._connection.send_bytes(json.dumps(failure).encode())
            raise

    def _listen(self) -> None:
        try:
            while True:
                command = self._connection.recv_bytes()
                payload = self._connection.recv_bytes()
                if command == END:
                    break
                self._commands.put((command.decode(), payload))
        except (EOFError, OSError):
            exit_at_once(f"rank {self._rank}: rank 0 is gone", EXIT_STOPPED)
        if status := int(payload):
            # The main thread may be in a collective that no other rank will enter.
            os._exit(status)
        self._commands.put(None)


def lead(size: int) -> Leader:
    """Accept the control connection of every other rank. The process group must exist."""
    key = secrets.token_bytes(KEY_BYTES)
    # MASTER_ADDR is this host's name as other hosts know it. On this host the name may resolve to a
    # loopback address, such as 127.0.1.1 on Debian. With several hosts, listen at all addresses.
    host = os.environ["MASTER_ADDR"] if LOCAL in os.environ else ""
    with multiprocessing.connection.Listener((host, 0), backlog=size) as listener:
        port = cast("tuple[str, int]", listener.address)[1]
        _hand_round(port.to_bytes(PORT_BYTES, "big") + key)
        connections: dict[int, Connection[bytes, bytes]] = {}
        while len(connections) < size - 1:
            try:
                connection = cast("Connection[bytes, bytes]", listener.accept())
                rank = _let_in(connection, key)
            except (multiprocessing.AuthenticationError, EOFError, OSError):
                continue  # Not a rank, or one that exited again: its starter reports that.
            connections[rank] = connection
    return Leader(connections)


def _let_in(connection: Connection[bytes, bytes], key: bytes) -> int:
    """Authenticate a connection and return the rank at its other end.

    Raises AuthenticationError, EOFError or OSError if the peer, which can be any process that reaches the
    port, is not a rank or stays silent for LET_IN_SECONDS.
    """
    try:
        _limit_reading(connection, LET_IN_SECONDS)
        multiprocessing.connection.deliver_challenge(connection, key)
        multiprocessing.connection.answer_challenge(connection, key)
        rank = int(connection.recv_bytes())
        # From now on the connection may be silent for as long as there are no commands.
        _limit_reading(connection, 0)
        _notice_silence(connection)
    except BaseException:
        connection.close()
        raise
    return rank


def follow(rank: int) -> Follower:
    """Connect to rank 0. The process group must exist."""
    said = _hand_round(bytes(PORT_BYTES + KEY_BYTES))
    port, key = int.from_bytes(said[:PORT_BYTES], "big"), said[PORT_BYTES:]
    address = (os.environ["MASTER_ADDR"], port)
    connection = cast(
        "Connection[bytes, bytes]", multiprocessing.connection.Client(address, authkey=key)
    )
    _notice_silence(connection)
    connection.send_bytes(str(rank).encode())
    return Follower(connection, rank)


def _limit_reading(connection: Connection[bytes, bytes], seconds: int) -> None:
    """Set how long a read waits; zero means forever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _notice_silence(connection: Connection[bytes, bytes]) -> None:
    """Have the kernel end a connection whose other host is unreachable or stops reading."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))


def _hand_round(content: bytes) -> bytes:
    """Broadcast rank 0's content to all ranks, which pass as many bytes."""
    import torch
    from torch import distributed

    tensor = torch.tensor(list(content), dtype=torch.uint8)
    distributed.broadcast(tensor, 0)  # pyright: ignore[reportUnknownMemberType]
    return tensor.numpy().tobytes()
