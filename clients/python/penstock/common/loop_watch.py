"""Notices when an event loop stands still, and says where.

The loop runs a callback every BEAT_SECONDS. A thread looks every LOOK_SECONDS whether it ran, and takes the
stack of the loop's thread once it is overdue. Work that holds Python's lock also stops the watching thread,
so a late beat counts too if the loop's thread was computing meanwhile. The time for which it was ready to
run and had no processor is left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

BEAT_SECONDS = 0.02
"""A stall is measured too short by at most this."""
LOOK_SECONDS = 0.04
STALL_SECONDS = 0.05
"""Shorter delays are ordinary."""
LOG_SECONDS = 0.25
"""Shorter stalls are measured and not logged."""
MOST_PLACES = 100
"""Places that are logged; one line each."""
FRAMES = 6


class LoopWatch:
    """Watches the running loop from `start` to `stop`."""

    def __init__(self, name: str, on_stall: Callable[[float], None]) -> None:
        """`name` is of the process. `on_stall` is called in the loop with the seconds of each stall, after
        it."""
        self._name = name
        self._on_stall = on_stall
        self.longest_seconds = 0.0
        self._places: set[str] = set()
        self._stopped = threading.Event()
        self._stack = ""
        """Where the loop's thread was when it was overdue; empty while it is not."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._clocks = _Clocks()
        self._beat_at, self._beat_cpu, self._beat_ready = self._clocks.read()
        self._handle = self._loop.call_later(BEAT_SECONDS, self._beat)
        threading.Thread(target=self._watch, name=f"{self._name} watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._handle.cancel()
        self._clocks.close()

    def _beat(self) -> None:
        now, cpu, ready = self._clocks.read()
        late = now - self._beat_at - BEAT_SECONDS - (ready - self._beat_ready)
        stack, self._stack = self._stack, ""
        if late >= STALL_SECONDS and (stack or cpu - self._beat_cpu >= late / 2):
            self._stalled(late, stack)
        self._beat_at, self._beat_cpu, self._beat_ready = now, cpu, ready
        self._handle = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _stalled(self, seconds: float, stack: str) -> None:
        self.longest_seconds = max(self.longest_seconds, seconds)
        self._on_stall(seconds)
        where = stack or "a call that holds Python's lock"
        if seconds >= LOG_SECONDS and where not in self._places and len(self._places) < MOST_PLACES:
            self._places.add(where)
            logger.warning(
                "the event loop of the %s stood still for %.0f ms: %s",
                *(self._name, 1000 * seconds, where),
            )

    def _watch(self) -> None:
        while not self._stopped.wait(LOOK_SECONDS):
            overdue = time.monotonic() - self._beat_at - BEAT_SECONDS
            if overdue >= STALL_SECONDS - LOOK_SECONDS and not self._stack:
                self._stack = _stack_of(self._thread_id)


class _Clocks:
    """The clocks of the thread that makes and reads them."""

    def __init__(self) -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._scheduler = os.open(path, os.O_RDONLY) if path.exists() else None

    def read(self) -> tuple[float, float, float]:
        """Seconds of the wall, seconds computed, and seconds ready without a processor."""
        ready = 0.0
        if self._scheduler is not None:
            ready = int(os.pread(self._scheduler, 64, 0).split()[1]) / 1e9
        return time.monotonic(), time.thread_time(), ready

    def close(self) -> None:
        if self._scheduler is not None:
            os.close(self._scheduler)
            self._scheduler = None


def _stack_of(thread_id: int) -> str:
    """The innermost calls of a thread, in one line."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    walk = traceback.walk_stack(frames[thread_id])
    # Without the text of the lines, for which files would be read.
    calls = traceback.StackSummary.extract(walk, limit=FRAMES, lookup_lines=False)
    return " < ".join(f"{c.name} ({c.filename.rpartition('/')[2]}:{c.lineno})" for c in calls)
