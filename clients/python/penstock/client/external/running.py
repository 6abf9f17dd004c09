"""One external process as the worker sees it: its keeper, its output, its end.

It needs no thread and no child watcher. The keeper's control socket reports events, and the event
loop reads the output. An end always proceeds in this order: the keeper ends the tree; the keeper
reports; the output reaches its end; the worker reaps the keeper.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from penstock.client.external.keeper import Order

logger = logging.getLogger("penstock.rollout")

KEEPER = Path(__file__).with_name("keeper.py")
# Bytes kept of the end of each process's output.
KEPT_OUTPUT_BYTES = 16 * 1024
_PACKET_BYTES = 64 * 1024
_MOST_LISTENERS = 4
# A killed process that remains is blocked in a system call, perhaps on a dead file system.
_END_SECONDS = 30.0
_OUTPUT_SECONDS = 5.0


@dataclass(frozen=True)
class Report:
    seconds: float
    peak_bytes: int
    status: int | None = None
    signal: int | None = None


class Running:
    def __init__(
        self, keeper: subprocess.Popen[bytes], control: socket.socket, output: int
    ) -> None:
        self._keeper = keeper
        self._control = control
        self._output = output
        self._loop = asyncio.get_running_loop()
        self.listening: asyncio.Future[list[socket.socket]] = self._loop.create_future()
        """The process's listening sockets in its sandbox, once it is about to run the command.
        Cancelled if it never gets there."""
        self._report: asyncio.Future[Report | None] = self._loop.create_future()
        self._kept = bytearray()
        self._output_ended = asyncio.Event()
        self._loop.add_reader(control, self._read_control)
        self._loop.add_reader(output, self._read_output)

    @classmethod
    def start(cls, order: Order, environment: Mapping[str, str]) -> Self:
        """Starts a keeper, which starts the command. Sets `order.control`. Raises OSError."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output, written = os.pipe()
        try:
            order["control"] = its.fileno()
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), json.dumps(order)],
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                pass_fds=[its.fileno()],
                env=dict(environment),
                # Ctrl-C in the worker's terminal must reach only the worker.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            its.close()
            os.close(written)
        ours.setblocking(False)
        os.set_blocking(output, False)
        return cls(keeper, ours, output)

    @property
    def output(self) -> str:
        """The end of the output so far."""
        return self._kept[-KEPT_OUTPUT_BYTES:].decode(errors="replace")

    async def ended(self) -> Report | None:
        """Waits for the end of the tree. Returns None if the keeper was killed."""
        return await asyncio.shield(self._report)

    async def end(self) -> Report | None:
        """Ends the tree and waits for its end. Call it once, even if the tree has already ended."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        report: Report | None = None
        try:
            async with asyncio.timeout(_END_SECONDS):
                report = await asyncio.shield(self._report)
            async with asyncio.timeout(_OUTPUT_SECONDS):
                await self._output_ended.wait()
        except TimeoutError:
            logger.warning(
                "descendants of keeper %d did not end; the worker stops waiting for them",
                self._keeper.pid,
            )
        finally:
            self._close()
        return report

    def _close(self) -> None:
        """Releases every resource. If the keeper has not finished, it continues alone."""
        self._loop.remove_reader(self._control)
        self._loop.remove_reader(self._output)
        self._control.close()
        os.close(self._output)
        if not self.listening.done():
            self.listening.cancel()
        elif not self.listening.cancelled():
            for listener in self.listening.result():
                listener.close()
        if self._report.done():
            # The keeper has reported or is gone, so this does not block.
            self._keeper.wait()

    def _read_control(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, _MOST_LISTENERS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        message: dict[str, Any] = json.loads(data) if data else {}
        if "listening" in message:
            listeners = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            self.listening.set_result(listeners)
            return
        self._loop.remove_reader(self._control)
        if not self.listening.done():
            self.listening.cancel()
        self._report.set_result(Report(**message) if message else None)

    def _read_output(self) -> None:
        try:
            data = os.read(self._output, _PACKET_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._output)
            self._output_ended.set()
            return
        self._kept += data
        if len(self._kept) > 4 * KEPT_OUTPUT_BYTES:
            del self._kept[:-KEPT_OUTPUT_BYTES]
