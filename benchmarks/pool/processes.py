"""The processes of `benchmarks/pool/hub.py`: a hub, its engine servers, and the agents."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path

import grpc
from benchmarks.pool.agents import Done, Work
from benchmarks.support.processes import Process, serving_address, started

from penstock.v1 import rollout_service_pb2
from penstock.wire import methods
from penstock.wire.channel import client_options
from penstock.wire.messages import GetServerInfoRequest


@contextlib.asynccontextmanager
async def agents() -> AsyncGenerator[Process]:
    """Starts the process of the agents."""
    async with started("-m", "benchmarks.pool.agents") as process:
        await process.ready()
        yield process


async def work(process: Process, wanted: Work) -> Done:
    """Runs the agents and returns their results."""
    return Done(**json.loads(await process.ask(json.dumps(asdict(wanted)))))


@contextlib.asynccontextmanager
async def engines(kind: str, *options: str) -> AsyncGenerator[tuple[Process, list[str]]]:
    """Starts a process with engine servers; yields it and their addresses."""
    async with started("-m", "benchmarks.pool.engines", kind, *options) as process:
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
        call = methods.unary(self.channel, rollout_service_pb2.GetServerInfoResponse)
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
            own = Hub(process, await serving_address(process))
            await own.in_rotation(len(addresses))
            yield own
            await own.channel.close()
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
