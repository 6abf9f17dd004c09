"""The processes of a run: the place of each, those that rank 0 starts, and their process group.

Each process reads its place from torchrun's variables. `penstock train --ranks N` starts N - 1 more
processes on this host and sets the same variables for them. `ranks` has the commands that they get.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

from penstock.trainer.core.errors import ConfigInvalid

# How long rank 0 waits at the end for the other ranks to exit.
PARTING_SECONDS = 30.0
PR_SET_PDEATHSIG = 1
# Variable with rank 0's process id, set if rank 0 started the other ranks, which then have no torchrun's
# store.
LOCAL = "PENSTOCK_LOCAL_RANKS"
EXIT_STOPPED, EXIT_CONFIG = 1, 2


@dataclass(frozen=True, slots=True)
class Place:
    """Which of the run's processes this is."""

    rank: int
    size: int
    """Number of ranks in the run."""
    local_rank: int
    """Rank among those on this host; also the number of its device."""
    local: bool = False
    """Whether rank 0 started the other ranks, so that all are on this host."""

    @property
    def leads(self) -> bool:
        return self.rank == 0


ALONE = Place(0, 1, 0)


def find_place(environment: Mapping[str, str]) -> Place:
    """Read the place that torchrun or rank 0 gave this process; `ALONE` without one.

    Raises ConfigInvalid if the variables are not numbers or name an impossible rank.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return ALONE
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", rank))
    except ValueError as error:
        raise ConfigInvalid(f"the variables RANK, WORLD_SIZE, LOCAL_RANK: {error}") from error
    if not 0 <= rank < size:
        raise ConfigInvalid(
            f"the variables RANK, WORLD_SIZE: rank {rank} is out of range for {size} ranks"
        )
    return Place(rank, size, local_rank, LOCAL in environment)


class LocalRanks:
    """The other ranks of a run on this host, started as processes by rank 0."""

    def __init__(self, count: int, command: Sequence[str]) -> None:
        """Start `count` - 1 processes that run `command`. They end when this process does."""
        # Early connections wait in the backlog until torch is loaded and takes the socket over.
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
        # By default gloo resolves the host's name, which need not lead back to this host.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.joined = threading.Event()
        """Set once the ranks are connected: from then on their connections show if one ends."""
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, env={**os.environ, **own})
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def listening_descriptor(self) -> int:
        """Return the descriptor of the socket through which the ranks meet. The caller owns it now."""
        return self._listening.detach()

    def wait(self) -> None:
        """Wait for the processes to end; kill those that do not end in PARTING_SECONDS each."""
        for process in self._processes:
            try:
                process.wait(PARTING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """End this process if a rank exits before it joined; nothing else would report that."""
        status = process.wait()
        if not self.joined.is_set():
            # If its configuration was unusable, the rank has printed the reason itself.
            message = f"rank {rank} exited with status {status} before it joined"
            exit_at_once(message, max(status, 1))


def exit_at_once(message: str, status: int) -> NoReturn:
    """Print a line on stderr and end this process, whatever its other threads are doing."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # A live table hides the cursor.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"penstock train: stopped: {message}\n")
        sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> None:
    """Have the kernel end this rank's process together with its parent; ignore requests to stop."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.get(LOCAL)
    if parent is not None and os.getppid() != int(parent):
        sys.exit(EXIT_STOPPED)  # The parent had ended before the prctl.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def join_group(place: Place, local: LocalRanks | None) -> None:
    """Create torch's process group: NCCL between GPUs if there are any, gloo between CPUs.

    Raises ConfigInvalid if the rank has no GPU for itself on a host with GPUs.
    """
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    backend = "gloo"
    if torch.cuda.is_available():
        if place.local_rank >= (count := torch.cuda.device_count()):
            raise ConfigInvalid(
                f"rank {place.rank} has local rank {place.local_rank} on a host with {count} GPUs: "
                "each rank of a host needs its own GPU"
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


def leave_group() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
