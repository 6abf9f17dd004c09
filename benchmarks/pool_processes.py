"""The processes of `benchmarks/pool.py`, with their processor time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path

import grpc
import psutil
from benchmarks.pool_agents import Done, Work

from penstock.v1 import rollout_service_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options

ROOT = Path(__file__).resolve().parents[1]
GetServerInfoRequest = codec.twin(rollout_service_pb2.GetServerInfoRequest)


class Process:
    """A process that answers each line on standard input with a line on standard output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._counted = psutil.Process(process.pid)

    @property
    def cpu_seconds(self) -> float:
        """Processor time since the process started."""
        times = self._counted.cpu_times()
        return times.user + times.system

    @property
    def resident_bytes(self) -> int:
        return self._counted.memory_info().rss

    async def read(self) -> str:
        """Returns the next line of its output."""
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode().strip()
        assert line, "the process ended"
        return line

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def ask(self, line: str) -> str:
        """Writes a line and returns the answer."""
        self.write(line)
        return await self.read()

    def terminate(self) -> None:
        """Stops a process that does not stop when its standard input ends."""
        self._process.terminate()

    async def end(self) -> None:
        """Closes its standard input; kills it if it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(20.0):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def started(*arguments: str, log: Path | None = None) -> AsyncGenerator[Process]:
    """Starts a Python process in the root of the checkout, and ends it on exit."""
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("ab"))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            cwd=ROOT,
            limit=1 << 20,
        )
        own = Process(process)
        try:
            yield own
        finally:
            await own.end()


@contextlib.asynccontextmanager
async def agents() -> AsyncGenerator[Process]:
    """Starts the process of the agents."""
    async with started("-m", "benchmarks.pool_agents") as process:
        assert await process.read() == "ready"
        yield process


async def work(process: Process, wanted: Work) -> Done:
    """Runs the agents and returns their results."""
    return Done(**json.loads(await process.ask(json.dumps(asdict(wanted)))))


@contextlib.asynccontextmanager
async def engines(kind: str, *options: str) -> AsyncGenerator[tuple[Process, list[str]]]:
    """Starts a process with engine servers; yields it and their addresses."""
    async with started("-m", "benchmarks.pool_engines", kind, *options) as process:
        ports = (await process.read()).split()[1:]
        yield process, [f"127.0.0.1:{port}" for port in ports]


class Hub:
    """A hub: `penstock serve --engines`."""

    def __init__(self, process: Process, address: str) -> None:
        self.process = process
        self.address = address
        self.channel = grpc.aio.insecure_channel(
            address, options=client_options(own_connection=True)
        )

    async def serving_count(self) -> int:
        """Number of engines in rotation."""
        call = self.channel.unary_unary(
            "/penstock.v1.RolloutService/GetServerInfo",
            codec.encode,
            codec.decoder(rollout_service_pb2.GetServerInfoResponse),
        )
        info = await call(GetServerInfoRequest())
        serving = rollout_service_pb2.REPLICA_STATE_SERVING
        return sum(replica.state == serving for replica in info.replicas)

    async def in_rotation(self, count: int, seconds: float = 120.0) -> None:
        """Waits until `count` engines are in rotation."""
        async with asyncio.timeout(seconds):
            while await self.serving_count() < count:  # noqa: ASYNC110 - the hub sends no event.
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def hub(
    folder: Path, tokenizer: Path, addresses: Sequence[str], *settings: str
) -> AsyncGenerator[Hub]:
    """Starts a hub in front of these engine servers; yields it once all are in rotation."""
    listed = folder / "engines"
    listed.write_text("".join(f"{address}\n" for address in addresses))
    command = ["-m", "penstock.cli", "serve", "--engines", f"file:{listed}"]
    command += ["--model", str(tokenizer), "--listen", "127.0.0.1:0", "--http-listen", ""]
    for setting in ("pool.discover_seconds=3600", "drain_seconds=0", *settings):
        command += ["--set", setting]
    log = folder / "hub.log"
    async with started(*command, log=log) as process:
        try:
            while " on " not in (line := await process.read()):
                pass
            own = Hub(process, line.split(" on ")[1].split()[0])
            await own.in_rotation(len(addresses))
            yield own
            await own.channel.close()
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
