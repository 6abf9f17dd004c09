"""Bytes that libFuzzer makes for the rpcs, led by which lines of the server they reach.

    python -m tests.faults.coverage_fuzz CORPUS -max_total_time=3600 -seed=7

An input is one byte that chooses the rpc, and then the message; where the rpc takes a stream, each message
comes after two bytes with its length. It is sent over real gRPC to a server around the fake engine in this
process, whose modules report what they execute. Judged as by test_f12_fuzz: an answer from the table, in
time, and nothing logged that the server did not foresee. The first that is not ends the run with a status
other than zero, and its input is kept as `crash-...` where -artifact_prefix says; as the only argument it
is sent once more.
"""

# ruff: noqa: E402 - modules imported within the first block report what they execute, and others do not.

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import atheris

FUZZER: Any = atheris
with FUZZER.instrument_imports(include=["penstock.server", "penstock.wire"]):
    from tests.support.harness import serve, upload

from tests.faults.footprint import Footprint, footprint
from tests.faults.grammar import OWN_TRAJECTORY, SEEDS, Bodies
from tests.faults.test_f12_fuzz import Fuzzed
from tests.server.rpc.test_wire_errors import KNOWN_IDS, RPCS, valid

LENGTH_BYTES = 2
HELD_VERSION = 1
"""Of the weights that the server has from the start, to hand out."""


class Unforeseen(logging.Handler):
    """Keeps what was logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class ThisProcess:
    """The server as `Fuzzed` knows one that has a process of its own."""

    def __init__(self, port: int, log: Unforeseen) -> None:
        self.port, self.address = port, f"127.0.0.1:{port}"
        self._log = log

    def footprint(self) -> Footprint:
        return footprint()

    def check_alive(self) -> None:
        assert not self._log.found, self._log.found[0]


class Target:
    """The server in a thread of its own, and inputs sent to it one after another."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        log = Unforeseen()
        logging.getLogger().addHandler(log)
        self._serving = serve(folder, "leases.seconds=2")
        harness = self._run(self._serving.__aenter__())
        self._server: Any = ThisProcess(harness.port, log)
        self._fuzzed = self._run(self._begin())

    async def _begin(self) -> Fuzzed:
        fuzzed = Fuzzed(self._server)
        await upload(fuzzed.harness.wire, HELD_VERSION)
        return fuzzed

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def send(self, data: bytes) -> None:
        """Sends one input, and judges the answer."""
        if not data:
            return
        rpc = RPCS[data[0] % len(RPCS)]
        bodies = tuple(messages_of(data[1:])) if rpc[1].client_streaming else (data[1:],)
        self._run(self._fuzzed.example(rpc, Bodies(bodies or (b"",), 0)))
        self._server.check_alive()


def messages_of(data: bytes) -> Iterator[bytes]:
    """What a stream is sent: each message after its length."""
    while data:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        data = data[LENGTH_BYTES:]
        yield data[:length]
        data = data[length:]


def write_corpus(folder: Path) -> None:
    """Valid requests of every rpc, to begin with."""
    for index, (_, method) in enumerate(RPCS):
        for name in KNOWN_IDS if method.name in OWN_TRAJECTORY else ("",):
            seed = HELD_VERSION if method.name == "FetchWeights" else next(SEEDS)
            request: Any = valid(method, seed)
            if name:
                request.trajectory_id = name
            body = request.SerializeToString()
            if method.client_streaming:
                body = len(body).to_bytes(LENGTH_BYTES, "little") + body
            (folder / f"{method.name}-{name}").write_bytes(bytes([index]) + body)


def main() -> None:
    corpus = Path(sys.argv[1])
    if corpus.is_dir():
        write_corpus(corpus)
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        FUZZER.Setup(sys.argv, target.send)
        FUZZER.Fuzz()


if __name__ == "__main__":
    main()
