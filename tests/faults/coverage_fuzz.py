"""Fuzz the rpcs with libFuzzer, guided by the server lines that an input reaches.

    python -m tests.faults.coverage_fuzz CORPUS -max_total_time=3600 -seed=7

The first byte of an input chooses the rpc, and the rest is the message. If the rpc takes a stream,
each message follows two bytes with its length. Inputs are sent over real gRPC to a server around
the fake engine in this process, whose modules are instrumented.

The criteria are those of test_f12_fuzz. An answer must be in the table and in time, and the server
must not log an unexpected error. The first violation ends the run with a nonzero status. Its input
is kept as `crash-...` under -artifact_prefix. Pass that file as the only argument to send it again.
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
"""Version of the weights that the server has from the start, so that FetchWeights can return them."""


class Unforeseen(logging.Handler):
    """Keeps the records that were logged with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class ThisProcess:
    """The in-process server, with the interface that `Fuzzed` expects of a server process."""

    def __init__(self, port: int, log: Unforeseen) -> None:
        self.port, self.address = port, f"127.0.0.1:{port}"
        self._log = log

    def footprint(self) -> Footprint:
        return footprint()

    def check_alive(self) -> None:
        assert not self._log.found, self._log.found[0]


class Target:
    """The server in a separate thread. Inputs are sent to it one at a time."""

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
        """Send one input and check the answer."""
        if not data:
            return
        rpc = RPCS[data[0] % len(RPCS)]
        bodies = tuple(messages_of(data[1:])) if rpc[1].client_streaming else (data[1:],)
        self._run(self._fuzzed.example(rpc, Bodies(bodies or (b"",), 0)))
        self._server.check_alive()


def messages_of(data: bytes) -> Iterator[bytes]:
    """Split an input into the messages of a stream, each preceded by its length."""
    while data:
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        data = data[LENGTH_BYTES:]
        yield data[:length]
        data = data[length:]


def write_corpus(folder: Path) -> None:
    """Write valid requests of every rpc as the initial corpus."""
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
