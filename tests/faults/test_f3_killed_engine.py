"""F3: an engine is killed with SIGKILL mid-turn. The continued turns equal those of an undisturbed
run.

The server ends with its engine and is restarted with its journal, as a supervisor would. The
callers use `penstock.client`, which continues turns without their help.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.client import Client, Patience, connect
from penstock.up.processes import Command, FirstMatch, Process
from penstock.up.supervisor import SERVING
from tests.faults.report import COUNT, Report
from tests.support.fakes import expected_tokens
from tests.support.ports import HeldPort
from tests.support.processes import ENVIRONMENT, Server, engines_of, server_process

TRAJECTORIES = 6
VLLM_COUNT = 3
PATIENCE = Patience(reconnect_seconds=300.0)
"""Starting vLLM takes a minute or more on a busy machine."""
TEST = "tests/faults/test_f3_killed_engine.py::"


@dataclass(frozen=True)
class Script:
    """The prompts and turn lengths of one caller."""

    trajectory_id: str
    prompt: list[int]
    observations: list[list[int]]
    lengths: list[int]
    streamed: bool

    @classmethod
    def draw(cls, trajectory_id: str, rng: random.Random) -> Script:
        def some() -> list[int]:
            return [rng.randrange(256) for _ in range(rng.randint(1, 8))]

        turns = rng.randint(1, 3)
        lengths = [rng.randint(1, 60) for _ in range(turns)]
        observations = [some() for _ in range(turns - 1)]
        return cls(trajectory_id, some(), observations, lengths, rng.random() < 0.5)

    def expected(self) -> list[list[int]]:
        """The turns of an undisturbed fake engine."""
        context, turns = list(self.prompt), []
        for index, length in enumerate(self.lengths):
            context += self.observations[index - 1] if index else []
            tokens, _ = expected_tokens(context, [0] * length)
            turns.append(tokens)
            context += tokens
        return turns

    async def run(self, client: Client) -> list[list[int]]:
        """Take the turns and close; return the tokens that the caller received."""
        trajectory = client.trajectory(self.trajectory_id, resume_aborted=True)
        turns: list[list[int]] = []
        for index, length in enumerate(self.lengths):
            written: list[int] = []
            async for segment in trajectory.stream(
                self.observations[index - 1] if index else self.prompt,
                max_tokens=length,
                temperature=0.0,
                ignore_eos=True,
                final_only=not self.streamed,
                flush_seconds=0.01,
            ):
                del written[segment.position :]
                written += segment.token_ids.tolist()
            assert written == trajectory.last_turn.token_ids.tolist()
            turns.append(written)
        record = await trajectory.get()
        held = [
            [int(t) for segment in record.policy_segments(i) for t in segment.token_ids]
            for i in range(len(turns))
        ]
        assert held == turns, f"{self.trajectory_id}: the server holds something else"
        await trajectory.complete(1.0)
        return turns


@contextlib.asynccontextmanager
async def kept_running(server: Server) -> AsyncGenerator[None]:
    """Restart a server whenever it has ended with its engine."""

    async def keep() -> None:
        while True:
            status = await server.process.wait()
            assert status == 1, f"the server {status}: {server.log[-4000:]}"
            await server.start()

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        if not keeping.cancelled():
            keeping.result()


async def test_a_killed_engine_costs_no_token(tmp_path: Path, report: Report) -> None:
    count = report.count or COUNT
    options = ("--step-seconds", "0.004", "--engine-process")
    async with (
        server_process(tmp_path, *options) as server,
        kept_running(server),
        connect(server.address) as client,
    ):
        cases = iter(range(count))

        async def kill(rng: random.Random) -> None:
            case = next(cases)
            scripts = [Script.draw(f"{case}-{i}", rng) for i in range(TRAJECTORIES)]
            callers = [asyncio.create_task(script.run(client)) for script in scripts]
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            server.serves.clear()
            os.kill(server.engine_pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                found = await asyncio.gather(*callers)
                await server.serves.wait()
            assert found == [script.expected() for script in scripts]
            assert (await client.server_info()).load.open_trajectory_count == 0

        name = "engine killed in mid-turn"
        await report.repeat(
            "F3 fake", name, f"{TEST}test_a_killed_engine_costs_no_token", count, kill
        )
        report.survived("F3 fake", name, count)


@contextlib.asynccontextmanager
async def vllm_process(
    folder: Path, model: Path, port: HeldPort
) -> AsyncGenerator[tuple[Process, str]]:
    """`penstock serve` with options that make its output comparable."""
    serves = FirstMatch(SERVING)
    command = Command(
        "server",
        (
            *(sys.executable, "-m", "penstock.cli", "serve", "--model", str(model)),
            *("--listen", f"127.0.0.1:{port.number}", "--http-listen", ""),
            *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "1"),
            *("--set", f"journal.folder={folder / 'journal'}"),
        ),
        folder / "server.log",
        ENVIRONMENT,
    )
    process = Process.start(command, serves)
    try:
        yield process, await serves.wait(process)
    finally:
        await process.stop(20)


def engine_of(server_pid: int) -> int:
    """The process id of vLLM's engine, found by its process name."""
    (engine,) = engines_of(server_pid)
    return engine.pid


@pytest.mark.timeout(600)
async def test_a_killed_vllm_engine_costs_no_token(tmp_path: Path, report: Report) -> None:
    if report.count is None:
        pytest.skip("vLLM has to start twice for each; `make faults` does it")
    pytest.importorskip("vllm")
    from tests.support.tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "model")
    count = min(report.count, VLLM_COUNT)

    async def take(client: Client, name: str, rng: random.Random) -> list[int]:
        prompt = [rng.randrange(256) for _ in range(8)]
        turn = await client.trajectory(name).turn(
            prompt, max_tokens=400, temperature=0.0, ignore_eos=True
        )
        return turn.token_ids.tolist()

    async def kill(rng: random.Random) -> None:
        seed = rng.random()
        name = f"{seed}"
        port = HeldPort()
        async with (
            vllm_process(tmp_path, model, port) as (server, address),
            connect(address, patience=PATIENCE) as client,
        ):
            whole = await take(client, f"whole {name}", random.Random(seed))
            taking = asyncio.create_task(take(client, f"cut {name}", random.Random(seed)))
            await asyncio.sleep(rng.uniform(0.2, 0.6))
            os.kill(engine_of(server.pid), signal.SIGKILL)
            async with asyncio.timeout(60):
                assert await server.wait() == 1
            assert not taking.done(), "it was killed too late"
            async with vllm_process(tmp_path, model, port):
                assert await taking == whole

    name = "engine killed in mid-turn"
    await report.repeat(
        "F3 vLLM", name, f"{TEST}test_a_killed_vllm_engine_costs_no_token", count, kill
    )
    report.survived("F3 vLLM", name, count)
