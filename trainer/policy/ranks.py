"""One run on several processes: rank 0 leads it, the others follow.

Rank 0 is the trainer as `loop` describes it: it has the configuration, the data, the server, the run's
folder. The others have their part of the model, and do what rank 0 says. Where each process finds its
place: torchrun's environment, RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, on any number of
hosts; `penstock train --ranks N` starts N - 1 more processes on this host and gives them the same.

    rank 0                                          every other rank
    meets the others (process group)                meets the others
    listens, says where, lets each in               connects
    makes its part of the model                     makes its part of the model
    a command ───────────────────────────────────►  waits for it, however long
    does its part       ◄── collectives ──►         does its part
    ...                                             ...
    end(0) ──────────────────────────────────────►  its process exits
    waits until all are gone; exits

There are two kinds of connection. The **process group** is for collectives: they have a deadline (torch's),
and are begun only by a command, so that nobody is in one while rank 0 waits for a batch. The **control
connections**, one from each rank to rank 0, carry commands one way and a failure the other way. They are
silent for as long as rank 0 has nothing to say, and know no deadline: that a process has gone the kernel
tells at once, whatever else this one is doing. Frames are bytes, never pickled; a key that rank 0 makes,
and the group hands round, keeps out who is no rank. Rank 0 listens at a port that the kernel chooses, at
every address of its host; only at the loopback address where it has started the others itself.

What a failure does; the run ends in each case, with an exit status that is not zero, and what is on disk
is as after a kill -9, which all of it is written for:

    an error on another rank    the rank waits a moment, lest it report what is only the consequence of
                                  another's end; tells rank 0; exits. Rank 0 says it on stderr and exits
                                  at once, in whatever it was: a collective may never come back
    another rank is killed      its connection ends: rank 0 says which rank is gone, and exits at once
    an error on rank 0          rank 0 waits the same moment for a rank that failed before it, which then
                                  has the word. Otherwise the error takes its course: the run unwinds,
                                  rank 0 sends end(status), the others exit with it at once
    rank 0 is killed            the others' connections end: they exit at once
    a rank stands still         (SIGSTOP) the collective's deadline, which is an error like any other
    a host is unreachable       its connections are probed while they are silent, and end
    SIGTERM, SIGINT             rank 0's is the stop on request that `loop` describes; the others ignore
                                  both, for they end with rank 0
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing.connection
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn, cast

from penstock.trainer.core.errors import ConfigInvalid, TrainerError

if TYPE_CHECKING:
    import torch

# How long an error waits for news of one that came before it, on another rank.
MOMENT_SECONDS = 2.0
# How long rank 0 waits at the end until the others are gone.
PARTING_SECONDS = 30.0
KEY_BYTES = 32
PORT_BYTES = 4
PR_SET_PDEATHSIG = 1
END = b"end"
# Variable with the process id of rank 0 where that has started the others: no torchrun is there, which
# would have a store to meet at.
LOCAL = "PENSTOCK_LOCAL_RANKS"
EXIT_STOPPED, EXIT_CONFIG = 1, 2
# In which who connects to rank 0 has to prove that it is a rank.
LET_IN_SECONDS = 5
# A host that is gone without a word is noticed after about so long.
SILENT_SECONDS, PROBE_SECONDS, PROBES = 60, 15, 4
# Longest time a command waits for room on its connection, where a rank does not read.
SEND_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the run's processes this is."""

    rank: int
    size: int
    """How many there are."""
    local_rank: int
    """Which of those on this host; its device has the same number."""
    local: bool = False
    """Whether rank 0 started it, or is rank 0 and started the others."""

    @property
    def leads(self) -> bool:
        """Whether it is rank 0."""
        return self.rank == 0


ALONE = Place(0, 1, 0)


def find_place(environment: Mapping[str, str]) -> Place:
    """The place that torchrun, or rank 0, gave this process; alone where nobody did.

    Raises ConfigInvalid.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return ALONE
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank, local = int(environment.get("LOCAL_RANK", rank)), LOCAL in environment
        place = Place(rank, size, local_rank, local)
    except ValueError as error:
        raise ConfigInvalid(f"the variables RANK, WORLD_SIZE, LOCAL_RANK: {error}") from error
    if not 0 <= place.rank < place.size:
        raise ConfigInvalid(f"the variables RANK, WORLD_SIZE: no rank {rank} among {size}")
    return place


class LocalRanks:
    """The other ranks of a run on this host, as processes that this one, rank 0, starts."""

    def __init__(self, count: int, command: Sequence[str]) -> None:
        """Starts `count` - 1 of them, each `command`. They end when this process does."""
        # From here on whoever comes waits in its backlog until torch is loaded and takes it over.
        self._listening = socket.create_server(("127.0.0.1", 0))
        port = cast("tuple[str, int]", self._listening.getsockname())[1]
        os.environ |= {
            LOCAL: str(os.getpid()),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # By itself gloo resolves the host's name, which need not lead back to this host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._joined = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env={**os.environ, **own})
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def listening_descriptor(self) -> int:
        """Of the socket through which they meet; the caller's from now on."""
        return self._listening.detach()

    def joined(self) -> None:
        """They are connected, and what becomes of them is seen from that."""
        self._joined.set()

    def wait(self) -> None:
        """Until they have ended; who does not end is killed."""
        for process in self._processes:
            try:
                process.wait(PARTING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Until they are connected nothing else would tell of one that has ended."""
        status = process.wait()
        if not self._joined.is_set():
            # A configuration that cannot be used has said so itself.
            exit_at_once(f"rank {rank} ended with {status} before it joined", max(status, 1))


class Leader:
    """Rank 0's end of the control connections. `tell` is called from one thread at a time."""

    def __init__(self, connections: Mapping[int, Connection[bytes, bytes]]) -> None:
        """By rank."""
        self._connections = dict(connections)
        self._ending = threading.Event()
        self._lost = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    @property
    def size(self) -> int:
        """Ranks, this one included."""
        return len(self._connections) + 1

    def tell(self, rank: int, command: str, payload: bytes = b"") -> None:
        """Has a rank begin a command; does not wait until it is done."""
        connection = self._connections[rank]
        try:
            connection.send_bytes(command.encode())
            connection.send_bytes(payload)
        except OSError:
            # The thread that watches says why, and ends the process.
            self.await_news()
            raise

    def tell_all(self, command: str, payload: bytes = b"") -> None:
        """The same for every rank."""
        for rank in self._connections:
            self.tell(rank, command, payload)

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Around rank 0's own part of a command: an error of another rank that came before one here has
        the word."""
        try:
            yield
        except Exception:
            self.await_news()
            raise

    def await_news(self) -> None:
        """Returns only where no rank has failed."""
        self._lost.wait(MOMENT_SECONDS)

    def end(self, status: int) -> None:
        """Ends the other ranks: when they have done what they were told where `status` is zero, and at
        once where it is not. Returns when they are gone."""
        self._ending.set()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(END)
                connection.send_bytes(str(status).encode())
        self._watching.join(PARTING_SECONDS)

    def _watch(self) -> None:
        """Until every connection has ended."""
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
    """Another rank's end of its control connection."""

    def __init__(self, connection: Connection[bytes, bytes], rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._commands: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._never = threading.Event()
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def commands(self) -> Iterator[tuple[str, bytes]]:
        """Each command with its payload, until rank 0 ends."""
        while (command := self._commands.get()) is not None:
            yield command

    @contextlib.contextmanager
    def reporting(self) -> Generator[None]:
        """Around all this rank does: its error is rank 0's to tell."""
        try:
            yield
        except Exception as error:
            # Where rank 0 ends meanwhile, so does this process.
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
            # It may be in a collective that nobody else will enter.
            os._exit(status)
        self._commands.put(None)


def exit_at_once(message: str, status: int) -> NoReturn:
    """Ends this process with a line on stderr, whatever its other threads are in."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # A live table hides the cursor.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"penstock train: stopped: {message}\n")
        sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> None:
    """Has the kernel end this process, which follows, with the one that started it; and not by the
    signals that ask rank 0 to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(LOCAL)
    if parent is not None and os.getppid() != int(parent):
        sys.exit(EXIT_STOPPED)  # It ended before this could be asked.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def join_group(place: Place, local: LocalRanks | None) -> None:
    """Makes torch's process group: NCCL between GPUs where there are any, gloo between CPUs."""
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    backend = "gloo"
    if torch.cuda.is_available():
        if place.local_rank >= (count := torch.cuda.device_count()):
            raise ConfigInvalid(
                f"rank {place.rank} is the one of local rank {place.local_rank} on a host of {count} GPUs: "
                "each rank of a host needs one of its own"
            )
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    if not place.local:
        distributed.init_process_group(backend)
        return
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        place.size,
        is_master=place.leads,
        wait_for_workers=False,
        master_listen_fd=None if local is None else local.listening_descriptor(),
    )
    distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)


def lead(size: int) -> Leader:
    """Lets every other rank in. The group has been joined."""
    key = secrets.token_bytes(KEY_BYTES)
    # MASTER_ADDR is what other hosts call this one. Here its name may stand for a loopback address, as
    # 127.0.1.1 on Debian; so ranks of several hosts are let in at all of its addresses.
    host = os.environ["MASTER_ADDR"] if LOCAL in os.environ else ""
    with multiprocessing.connection.Listener((host, 0), backlog=size) as listener:
        port = cast("tuple[str, int]", listener.address)[1]
        _hand_round(_to_tensor(port.to_bytes(PORT_BYTES, "big") + key))
        connections: dict[int, Connection[bytes, bytes]] = {}
        while len(connections) < size - 1:
            try:
                connection = cast("Connection[bytes, bytes]", listener.accept())
                rank = _let_in(connection, key)
            except (multiprocessing.AuthenticationError, EOFError, OSError):
                continue  # Not one of ours, or one that has gone again: who started it says so.
            connections[rank] = connection
    return Leader(connections)


def _let_in(connection: Connection[bytes, bytes], key: bytes) -> int:
    """The rank at the other end. Raises AuthenticationError, EOFError and OSError where there is none, or
    it says nothing for a while: whoever reaches the port may connect, and the others wait meanwhile."""
    try:
        _limit_reading(connection, LET_IN_SECONDS)
        multiprocessing.connection.deliver_challenge(connection, key)
        multiprocessing.connection.answer_challenge(connection, key)
        rank = int(connection.recv_bytes())
        # From here on nothing is said for as long as there is nothing to say.
        _limit_reading(connection, 0)
        _notice_silence(connection)
    except BaseException:
        connection.close()
        raise
    return rank


def follow(rank: int) -> Follower:
    """Connects to rank 0. The group has been joined."""
    said = _hand_round(_to_tensor(bytes(PORT_BYTES + KEY_BYTES)))
    port, key = int.from_bytes(said[:PORT_BYTES], "big"), said[PORT_BYTES:]
    address = (os.environ["MASTER_ADDR"], port)
    connection = cast(
        "Connection[bytes, bytes]", multiprocessing.connection.Client(address, authkey=key)
    )
    _notice_silence(connection)
    connection.send_bytes(str(rank).encode())
    return Follower(connection, rank)


def leave_group() -> None:
    """Undoes `join_group`."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def _limit_reading(connection: Connection[bytes, bytes], seconds: int) -> None:
    """How long a read waits; zero is for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _notice_silence(connection: Connection[bytes, bytes]) -> None:
    """Has the kernel end a connection whose other host is gone, or does not take what is sent."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))


def _to_tensor(content: bytes) -> torch.Tensor:
    import torch

    return torch.tensor(list(content), dtype=torch.uint8)


def _hand_round(content: torch.Tensor) -> bytes:
    """What rank 0 has there."""
    from torch import distributed

    distributed.broadcast(content, 0)  # pyright: ignore[reportUnknownMemberType]
    return content.numpy().tobytes()
