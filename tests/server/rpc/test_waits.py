"""What the server says that a run waits for: the rules, and a real server in each of the states."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.server.core.errors import DomainError
from penstock.server.rpc import progress as progress_module
from penstock.server.rpc import waits
from penstock.server.rpc.waits import Facts, Silent, causes
from penstock.server.weights.header import Announced
from penstock.server.weights.staging.incoming import IncomingUpload
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.v1 import trajectory_pb2
from penstock.wire.reasons import Reason
from tests.server.groups.test_wire_tasks import lease, submit, take, task
from tests.support.harness import (
    GenerateRequest,
    GetServerInfoRequest,
    Harness,
    hello,
    sampling,
    serve,
    upload,
)
from tests.support.pools import serve_pool

WAITING = Facts(run="run", trainer_connected=True, demand=2, place_limit=4, attempt_seconds=3600.0)
SILENT = Silent("t-0", "agent", 60.0)
LEASED = replace(WAITING, under_way=2, agents=1, leased=2)


def names(facts: Facts) -> list[str]:
    return [cause.name for cause in causes(facts)]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(), []),
        (Facts(agents=2), []),
        (Facts(pending=3), ["NO_TRAINER", "NO_WORKER"]),
        (Facts(agents=1, idle_agents=1), ["NO_TRAINER"]),
        (Facts(run="run", buffered=4, trainer_seconds=60), ["NO_TRAINER"]),
        (WAITING, ["NO_TASKS"]),
        (replace(WAITING, demand=0, evaluation_demand=1), ["NO_TASKS"]),
        (replace(WAITING, pending=3), ["NO_WORKER"]),
        (replace(WAITING, waiting=3, under_way=1), ["NO_WORKER"]),
        (replace(WAITING, pending=3, agents=2, untaken=("a",)), ["WORKER_TOO_SMALL"]),
        (replace(LEASED, turns=2), ["SAMPLING"]),
        (replace(LEASED, silent=SILENT), ["ATTEMPT_SILENT"]),
        # The others still sample: a tool may take a while.
        (replace(LEASED, turns=1, silent=replace(SILENT, seconds=30.0)), ["SAMPLING"]),
        (replace(LEASED, turns=1, silent=SILENT), ["ATTEMPT_SILENT"]),
        # Nobody waits for it.
        (replace(LEASED, demand=0, silent=SILENT), []),
        (replace(WAITING, demand=0, buffered=3, trainer_seconds=9), ["TRAINER_BUSY"]),
        (replace(LEASED, turns=3, token_seconds=30), ["ENGINE_SILENT"]),
        (replace(LEASED, turns=3, token_seconds=30, switch="closed"), ["SAMPLING"]),
        (replace(LEASED, turns=3, switch="closed", switch_seconds=30), ["SWITCH_WAITS"]),
        (replace(LEASED, staged=(2,), active_version=1, evaluations=1), ["SWITCH_WAITS"]),
        (replace(LEASED, awaits_trainer=True, trainer_connected=False), ["WEIGHTS_AWAITED"]),
        (replace(LEASED, engines={"": "died"}, engines_serving=0), ["ENGINE_UNAVAILABLE"]),
        (replace(LEASED, engines={"h:1": "refused"}), ["ENGINE_OUT", "SAMPLING"]),
        (replace(LEASED, disk_problem="full"), ["DISK_FULL", "SAMPLING"]),
        (replace(WAITING, pending=3, agents=1, memory_full=True), ["MEMORY_FULL", "SAMPLING"]),
        (
            replace(WAITING, pending=3, agents=1, idle_agents=1, may_begin=False, places=4),
            ["NO_PLACE"],
        ),
        (replace(LEASED, turns=1, drops={"GROUP_DROPPED": 9}), ["GROUPS_DROPPED", "SAMPLING"]),
        (replace(LEASED, turns=1, drops={"GROUP_DROPPED": 7}), ["SAMPLING"]),
        (
            replace(LEASED, turns=1, drops={"GROUP_DROPPED": 9}, groups_per_step=5),
            ["SAMPLING"],
        ),
    ],
)
def test_the_most_likely_cause_comes_first(facts: Facts, expected: list[str]) -> None:
    assert names(facts) == expected
    for cause in causes(facts):
        assert cause.message and cause.advice


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is reported a hundred times sooner."""
    for name in ("REPORT_SECONDS", "SILENT_SECONDS", "LONG_SILENT_SECONDS"):
        monkeypatch.setattr(waits, name, getattr(waits, name) / 100)
    monkeypatch.setattr(progress_module, "REPORT_SECONDS", waits.REPORT_SECONDS)
    monkeypatch.setattr(progress_module, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(progress_module, "LOG_SECONDS", 0.3)


async def info(harness: Harness, **fields: Any) -> Any:
    return await harness.wire.GetServerInfo(GetServerInfoRequest(**fields))


async def until_first(harness: Harness, cause: str) -> Any:
    """Wait until this is the most likely cause; return it."""
    async with asyncio.timeout(20):
        while True:
            found = (await info(harness)).waits
            if found and found[0].cause == cause:
                return found[0]
            await asyncio.sleep(0.02)


async def asking(harness: Harness, epoch: int = 1, count: int = 2) -> Any:
    trainer = await hello(harness.wire, epoch)
    trainer.send(demand={"group_count": count})
    return trainer


async def no_worker(harness: Harness, keep: list[Any]) -> None:
    keep.append(await asking(harness))
    await submit(harness, task("a", 2))


async def worker_too_small(harness: Harness, keep: list[Any]) -> None:
    keep.append(await asking(harness))
    await submit(harness, task("a", 4))
    keep.append(lease(harness, 2, "small", whole_groups=True))


async def hung_attempt(harness: Harness, keep: list[Any]) -> None:
    keep.append(await asking(harness, count=1))
    await submit(harness, task("a", 2))
    call = lease(harness, 2, "hanging")
    keep.append(call)
    first, _ = await take(call), await take(call)
    await harness.generate(first.trajectory_id)
    await harness.complete(first.trajectory_id)


async def silent_engine(harness: Harness, keep: list[Any]) -> None:
    keep.append(await asking(harness, count=1))
    harness.engine.step_seconds = 1000.0
    await submit(harness, task("a", 1, sampling_params=sampling(100)))
    call = lease(harness, 1)
    taken = await take(call)
    turn = harness.wire.Generate(GenerateRequest(trajectory_id=taken.trajectory_id))
    keep.extend([call, turn])
    await turn.read()


async def full_disk(harness: Harness, keep: list[Any]) -> None:
    keep.append(await asking(harness, count=1))
    journal = harness.serving.journal

    def refuse(byte_count: int) -> None:
        raise DomainError(Reason.DISK_FULL, f"no room for {byte_count} bytes")

    journal.check_room = refuse  # type: ignore[method-assign]


async def gone_trainer(harness: Harness, keep: list[Any]) -> None:
    trainer = await asking(harness)
    trainer.half_close()
    trainer.call.cancel()


async def waiting_switch(harness: Harness, keep: list[Any]) -> None:
    trainer = await hello(harness.wire)
    trainer.send(demand={"group_count": 1, "purpose": "PURPOSE_EVAL"})
    keep.append(trainer)
    await submit(harness, task("a", 1, purpose=trajectory_pb2.PURPOSE_EVAL))
    call = lease(harness, 1)
    keep.append(call)
    await take(call)
    await upload(harness.wire, 1, staged=True, trainer_epoch=1)


STATES: dict[str, Callable[[Harness, list[Any]], Awaitable[None]]] = {
    "NO_WORKER": no_worker,
    "WORKER_TOO_SMALL": worker_too_small,
    "ATTEMPT_SILENT": hung_attempt,
    "ENGINE_SILENT": silent_engine,
    "DISK_FULL": full_disk,
    "NO_TRAINER": gone_trainer,
    "SWITCH_WAITS": waiting_switch,
}


@pytest.mark.parametrize("cause", STATES)
@pytest.mark.usefixtures("quick")
async def test_a_server_names_the_cause_in_each_state(
    tmp_path: Path, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path) as harness:
        keep: list[Any] = []
        await STATES[cause](harness, keep)
        found = await until_first(harness, cause)
        assert found.duration.ToNanoseconds() >= waits.REPORT_SECONDS * 1e9
        status, said = await doctor(harness.address)
        assert status == 1
        assert said.splitlines()[1].startswith(cause)
        async with asyncio.timeout(20):
            while f"{cause} for" not in caplog.text:
                await asyncio.sleep(0.02)
        for one in keep:
            getattr(one, "call", one).cancel()


@pytest.mark.usefixtures("quick")
async def test_a_hub_names_the_engine_that_refuses_a_version(tmp_path: Path) -> None:
    async with serve_pool(tmp_path, 2) as pool:

        async def refuse(announced: Announced) -> IncomingUpload:
            raise WeightRefused(Reason.WEIGHT_LOAD_FAILED, "its experts are not as sent")

        pool.engines[0].serving.uploads._begin = refuse  # type: ignore[method-assign]
        await pool.hub.upload(1)
        found = await until_first(pool.hub, "ENGINE_OUT")
        assert pool.engines[0].address in found.message
        assert "its experts are not as sent" in found.message
        assert pool.engines[1].address not in found.message


@pytest.mark.usefixtures("quick")
async def test_a_wait_that_is_over_is_no_longer_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serve(tmp_path) as harness:
        trainer = await asking(harness, count=1)
        await submit(harness, task("a", 1))
        await until_first(harness, "NO_WORKER")
        async with asyncio.timeout(20):
            while "NO_WORKER for" not in caplog.text:
                await asyncio.sleep(0.02)
        call = lease(harness, 1)
        taken = await take(call)
        await harness.generate(taken.trajectory_id)
        await harness.complete(taken.trajectory_id)
        await trainer.receive("delivery")
        async with asyncio.timeout(20):
            while "over after" not in caplog.text:
                await asyncio.sleep(0.02)
        assert "NO_WORKER" not in [wait.cause for wait in (await info(harness)).waits]
        call.cancel()


async def test_progress_lists_places_leases_and_workers(harness: Harness) -> None:
    trainer = await asking(harness, count=3)
    await submit(harness, task("a", 3), task("b", 1))
    call = lease(harness, 2, "one")
    first, _ = await take(call), await take(call)
    await harness.generate(first.trajectory_id)
    await harness.complete(first.trajectory_id)
    third = await take(call)
    progress = (await info(harness, with_progress=True)).progress
    assert progress.trainer_connected and progress.demanded_group_count == 3
    (place,) = progress.places
    counts = (place.waiting_count, place.leased_count, place.ended_count)
    assert (place.task_id, counts, progress.place_count) == ("a", (0, 2, 1), 1)
    assert [(a.agent_id, a.concurrency, a.leased_count) for a in progress.agents] == [("one", 2, 2)]
    assert progress.pending_task_count == 1
    assert progress.oldest_lease.trajectory_id != third.trajectory_id
    assert progress.HasField("since_token") and not progress.HasField("since_delivery")
    assert progress.switch_state == "idle"
    assert not (await info(harness)).HasField("progress")
    trainer.half_close()
    call.cancel()


async def test_doctor_asks_a_server(tmp_path: Path) -> None:
    async with serve(tmp_path) as harness:
        status, said = await doctor(harness.address)
        assert status == 0 and "nothing waits" in said and harness.address in said
        status, said = await doctor(harness.address, "--json")
        assert status == 0 and json.loads(said)["waits"] == []
    status, said = await doctor(harness.address)
    assert status == 1 and "connection refused" in said


async def doctor(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "doctor", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()
