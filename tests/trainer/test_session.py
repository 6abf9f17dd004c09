"""A run by steps beside the same run by itself, against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from penstock.trainer.loop import TrainingLoop
from penstock.trainer.session import Session as Steps
from penstock.wire.messages import WeightReceipt
from tests.support.scripted_trainer_server import ScriptedServer, Session
from tests.support.trainer_walk import delivery, greet, running, stage

STEPS = 3
Drive = Callable[[TrainingLoop], Awaitable[None]]


class Delivering(ScriptedServer):
    """Delivers a group for each demand, and notes what else it is sent."""

    def __init__(self) -> None:
        super().__init__(self._serve)
        self.uploads += [stage] * STEPS
        self.heard: list[str] = []

    async def _serve(self, session: Session) -> None:
        await greet(session)
        delivered = 0
        async for request in session.requests:
            kind = request.WhichOneof("message")
            self.heard.append(kind)
            if kind == "demand":
                await session.send(delivery=delivery(delivered))
                delivered += 1
            elif kind == "switch_weights":
                version = request.switch_weights.weight_version
                receipt = WeightReceipt(weight_version=version, active_weight_version=version)
                await session.send(weight_receipt=receipt)


async def results(folder: Path, drive: Drive | None = None) -> tuple[Any, ...]:
    """What a run left, apart from times."""
    folder.mkdir()
    async with (
        Delivering() as server,
        running(folder, server.address, steps=STEPS, drive=drive) as run,
    ):
        await run.ends()
        timed = ("second", "time", "idle", "compute_ratio")
        records = [
            {name: value for name, value in record.items() if not any(t in name for t in timed)}
            for record in run.records
        ]
        lines = (folder / "ledger.jsonl").read_text().splitlines()
        return records, list(map(json.loads, lines)), run.saved, server.heard


def decode(token_ids: Any) -> str:
    return " ".join(map(str, token_ids))


async def test_a_run_by_steps_equals_the_run_by_itself(tmp_path: Path) -> None:
    texts: list[str] = []

    async def by_steps(loop: TrainingLoop) -> None:
        session = Steps(loop, decode)
        async with loop.running():
            async for batch in session.batches():
                (group,) = batch.groups
                texts.extend(f"{each.prompt}: {each.text}" for each in group.trajectories)
                figures = await session.train(batch)
                assert figures["reward_mean"] == batch.reward == 0.5

    alone = await results(tmp_path / "alone")
    assert len(alone[0]) == STEPS
    assert await results(tmp_path / "by steps", by_steps) == alone
    assert texts == ["1 2: 3", "1 2: 4"] * STEPS


async def test_a_caller_that_leaves_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    async def one_step(loop: TrainingLoop) -> None:
        session = Steps(loop, decode)
        async with loop.running():
            async for batch in session.batches():
                if batch.step == 2:
                    break
                await session.train(batch)

    records, ledger, saved, heard = await results(tmp_path / "run", one_step)
    assert [record["step"] for record in records] == [line["step"] for line in ledger] == [1]
    assert saved == [(1, 1, 1)]
    assert heard.count("receipt") == 1


async def test_what_a_caller_leaves_out_counts_as_trained(tmp_path: Path) -> None:
    async def first_ones(loop: TrainingLoop) -> None:
        session = Steps(loop, decode)
        async with loop.running():
            async for batch in session.batches():
                del batch.groups[0].trajectories[1:]
                batch.groups[0].trajectories[0].reward = 0.25
                await session.train(batch)

    alone = await results(tmp_path / "alone")
    records, ledger, *rest = await results(tmp_path / "less", first_ones)
    assert [record["reward_mean"] for record in records] == [0.25] * STEPS
    assert [record["trajectories"] for record in records] == [1] * STEPS
    assert [ledger, *rest] == list(alone[1:])
