"""One run over several hubs: real trainer processes, and real servers around the fake engine.

At `max_lag` 0 every step is deterministic, so runs with faults are compared bit for bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.client import Patience, Task, Trajectory, Worker, WorkerSettings, connect
from penstock.client.calls import Calls
from penstock.trainer.data.shards import Division
from penstock.trainer.state.ledger import RefusedEntry, StepEntry, read_ledger
from tests.faults.trainers import KILLED, Nursery, ask, judge, nursing
from tests.support.nats_server import nats_server
from tests.support.processes import Server, server_process
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_processes import ASKED
from tests.trainer.test_end_to_end import (
    configure,
    letters,
    records,
    sampled,
    serving,
    start_trainer,
    trained,
    working,
)

# All tests here share the nursery's trainers, the servers and the uninterrupted run.
pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = 5
DIVISION = Division(3, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with nursing() as running:
        yield running


def index_of(task_id: str) -> int:
    return int(task_id.rpartition("/")[2].partition("~")[0])


def check_ledger(folder: Path, steps: int, division: Division = DIVISION) -> None:
    """Each step has each hub's part, no prompt was trained twice, and none was skipped."""
    entries = read_ledger(folder / "out" / "ledger.jsonl")
    done = [entry for entry in entries if isinstance(entry, StepEntry)]
    assert [entry.step for entry in done] == list(range(1, steps + 1))
    versions = [entry.weight_version for entry in done]
    assert versions == sorted(set(versions))
    used: list[int] = []
    for entry in done:
        indices = [index_of(group.task_id) for group in entry.groups]
        owners = Counter(map(division.server_of, indices))
        assert [owners[server] for server in range(division.server_count)] == list(division.parts)
        used += indices
    assert len(set(used)) == len(used)
    refused = {index_of(e.task_id) for e in entries if isinstance(e, RefusedEntry)}
    for server in range(division.server_count):
        own = [index for index in used if division.server_of(index) == server]
        before = {i for i in range(max(own)) if division.server_of(i) == server}
        # A group that a hub finished before an earlier one may be in a later step.
        assert len(before - set(own) - refused) <= len(own)


# In one process


@pytest.mark.parametrize("late_policy", ["mask", "wait"])
async def test_each_step_has_each_hubs_part_and_no_token_is_too_old(
    model: Path, tmp_path: Path, late_policy: str
) -> None:
    measured: list[set[int]] = [set(), set()]

    def judging(server: int) -> Any:
        async def reward(task: Task, trajectory: Trajectory) -> float:
            if task.purpose.value == "eval":
                measured[server].add(task.index)
            else:
                assert DIVISION.server_of(task.index) == server
            return await letters(task, trajectory)

        return reward

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(model)) for _ in range(2)]
        for place, server in enumerate(servers):
            await stack.enter_async_context(working(server.address, judging(place)))
        path = configure(
            tmp_path,
            model,
            "",
            server={"address": [server.address for server in servers]},
            run={"steps": 6},
            train={"groups_per_step": 3},
            staleness={"max_lag": 1, "late_policy": late_policy},
        )
        with path.open("a") as file:
            file.write(
                f'\n[[evaluation]]\nname = "few"\nprompts = 3\nevery_versions = 3\n'
                f'jsonl.path = "{tmp_path / "prompts.jsonl"}"\n'
            )
        code, out, err = await (await start_trainer(path)).end()
        assert code == 0, err
        for server in servers:
            assert server.engine.versions == [1, 2, 3, 4, 5, 6]
            assert sampled(server.engine) == trained(tmp_path)
    assert measured == [{0, 2}, {1}]
    steps = [line for line in records(tmp_path) if "groups" in line]
    assert [step["weight_version"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step["lag_max"] <= 1 and step["groups"] == 3 for step in steps)
    assert "step 6/6" in out
    check_ledger(tmp_path, 6)


async def test_a_version_goes_to_each_hub_as_a_difference_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serving(model)) for _ in range(2)]
        for server in servers:
            await stack.enter_async_context(working(server.address, letters))
        path = configure(
            tmp_path,
            model,
            "",
            server={"address": [server.address for server in servers]},
            run={"steps": 6},
            train={"learning_rate": 1e-9},
            weights={"transport": "stream"},
        )
        trainer = await start_trainer(path)
        await servers[1].engine.loads(2)
        servers[1].engine.fail_loads = 1
        code, _, err = await trainer.end()
        assert code == 0, err
        assert "WEIGHT_LOAD_FAILED" in err and err.count("sending it once more, whole") == 1
        for server in servers:
            assert server.engine.versions[-1] == 6
            assert sampled(server.engine) == trained(tmp_path)
        # Only the one that had rejected it was sent it again.
        assert servers[0].engine.versions == [1, 2, 3, 4, 5, 6]
    deltas = [step["delta"] for step in records(tmp_path)]
    assert deltas[0] is False and deltas.count(False) == 2


# Killed hubs, and killed trainers


@dataclass
class Hubs:
    """Two hubs with workers, and the folder of one run."""

    servers: list[Server]
    folder: Path
    config: Path
    nursery: Nursery
    leased: dict[int, asyncio.Event]
    """Task index -> event that is set when an agent begins the task."""

    @property
    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    async def begin(self, *, resume: bool = False, failpoints: str = "") -> None:
        log = self.folder / "trainer.log"
        await self.nursery.begin(self.config, log, resume=resume, failpoints=failpoints)

    async def go(self, *, resume: bool = False, failpoints: str = "") -> int:
        await self.begin(resume=resume, failpoints=failpoints)
        return await self.nursery.end()

    @property
    def model(self) -> dict[str, bytes]:
        return trained(self.folder)

    async def versions(self) -> list[int]:
        found: list[int] = []
        for server in self.servers:
            async with connect(server.address) as client:
                found.append((await client.server_info()).active_weight_version)
        return found


@contextlib.asynccontextmanager
async def hubs(
    folder: Path,
    model: Path,
    nursery: Nursery,
    *,
    max_lag: int = 0,
    every_steps: int = 2,
    journals: tuple[tuple[str, ...] | None, ...] = (None, None),
) -> AsyncGenerator[Hubs]:
    """`journals` are journal settings for hubs whose journal is not in a folder."""
    leased = {index: asyncio.Event() for index in range(100)}

    async def asking(task: Task, trajectory: Trajectory) -> None:
        leased[task.index].set()
        await ask(task, trajectory)

    async with asyncio.timeout(120), contextlib.AsyncExitStack() as stack:
        servers: list[Server] = []
        for name, journal in zip(("hub-0", "hub-1"), journals, strict=True):
            (folder / name).mkdir(parents=True)
            options = ("--model", str(model), "--set", "leases.grace_seconds=1")
            server = await stack.enter_async_context(
                server_process(folder / name, *options, journal=journal)
            )
            servers.append(server)
            calls = Calls(server.address, Patience())
            stack.push_async_callback(calls.close)
            worker = Worker(calls, asking, judge, WorkerSettings(concurrency=8, drain_seconds=0.1))
            working = asyncio.create_task(worker.run())
            stack.push_async_callback(asyncio.wait, [working])
            stack.callback(worker.stop)
        config = configure(
            folder,
            model,
            "",
            server={"address": [server.address for server in servers]},
            run={"steps": STEPS},
            data={"group_size": 2, "sampling": {"max_tokens": 6}},
            train={"groups_per_step": 3},
            staleness={"max_lag": max_lag},
            checkpoint={"every_steps": every_steps},
        )
        yield Hubs(servers, folder, config, nursery, leased)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(
    model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The model of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    async with hubs(folder, model, nursery) as run:
        assert await run.go() == 0, run.log
        assert await run.versions() == [STEPS, STEPS]
        check_ledger(folder, STEPS)
        return run.model


@pytest.mark.parametrize("max_lag", [0, 2])
async def test_a_hub_that_is_killed_is_waited_for_and_nothing_is_lost_or_trained_twice(
    model: Path, nursery: Nursery, undisturbed: dict[str, bytes], tmp_path: Path, max_lag: int
) -> None:
    async with hubs(tmp_path, model, nursery, max_lag=max_lag) as run:
        await run.begin()
        # Roughly the hub's second step: index 4 belongs to the second hub.
        await run.leased[4].wait()
        await run.servers[1].restart()
        assert await nursery.end() == 0, run.log
        assert f"lost the server at {run.servers[1].address}" in run.log
        assert f"lost the server at {run.servers[0].address}" not in run.log
        assert await run.versions() == [STEPS, STEPS]
        assert max_lag or run.model == undisturbed
    check_ledger(tmp_path, STEPS)
    assert all(step["lag_max"] <= max_lag for step in records(tmp_path))


async def test_a_hub_goes_on_from_its_stream_where_it_is_started_again(
    model: Path, nursery: Nursery, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    with nats_server(tmp_path / "nats") as nats:
        journals = tuple(nats.settings(f"PENSTOCK_{place}") for place in range(2))
        async with hubs(tmp_path / "run", model, nursery, journals=journals) as run:
            await run.begin()
            await run.leased[4].wait()
            await run.servers[1].restart()
            assert await nursery.end() == 0, run.log
            assert await run.versions() == [STEPS, STEPS]
            assert run.model == undisturbed
    check_ledger(tmp_path / "run", STEPS)


@pytest.mark.parametrize(
    ("point", "restarted", "exact"),
    [
        # Only one hub was asked to switch.
        ("exchange.after_switch_weights=kill@5", False, True),
        # Staged at both hubs, but neither was asked to switch.
        ("train.published=kill@4", True, True),
        # One hub received its receipt. Its next group was in flight, and continues under older weights.
        ("exchange.after_receipt=kill@4", False, True),
        ("exchange.after_receipt=kill@4", True, False),
    ],
)
async def test_hubs_that_disagree_are_caught_up_with_each_by_itself(
    model: Path,
    nursery: Nursery,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    point: str,
    restarted: bool,
    exact: bool,
) -> None:
    async with hubs(tmp_path, model, nursery, every_steps=100) as run:
        assert await run.go(failpoints=point) == KILLED, run.log
        if restarted:
            # It still has its groups, but only the base model's weights.
            await run.servers[1].restart()
        assert await run.go(resume=True) == 0, run.log
        assert run.model == undisturbed or not exact
        versions = await run.versions()
        assert versions == [STEPS, STEPS] or (not exact and versions[0] == versions[1] > STEPS)
    check_ledger(tmp_path, STEPS)
    assert all(step["lag_max"] == 0 for step in records(tmp_path))


async def test_a_hub_that_lost_everything_is_asked_again_while_the_other_is_ahead(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with hubs(tmp_path, model, nursery, max_lag=1) as run:
        assert await run.go(failpoints="train.published=kill@4") == KILLED, run.log
        second = run.servers[1]
        await second.kill()
        shutil.rmtree(second.folder / "journal")
        await second.start()
        assert await run.go(resume=True) == 0, run.log
        versions = await run.versions()
        assert versions[0] == versions[1] >= STEPS
    check_ledger(tmp_path, STEPS)
    assert all(step["lag_max"] <= 1 for step in records(tmp_path))


async def test_a_stop_while_one_hub_is_away_leaves_all_and_the_run_goes_on_later(
    model: Path, nursery: Nursery, tmp_path: Path
) -> None:
    async with hubs(tmp_path, model, nursery) as run:
        await run.begin()
        await run.leased[4].wait()
        await run.servers[1].kill()
        nursery.terminate()
        assert await nursery.end() == ASKED, run.log
        assert "while its server was away" in run.log
        await run.servers[1].start()
        assert await run.go(resume=True) == 0, run.log
        assert len(set(await run.versions())) == 1
    check_ledger(tmp_path, STEPS)
