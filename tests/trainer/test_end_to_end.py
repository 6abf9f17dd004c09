"""The trainer as a process, with the real server around the fake engine, and a worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from safetensors import safe_open

from penstock.client import Patience, Task, Trajectory, Worker, WorkerSettings
from penstock.client.calls import Calls
from penstock.client.scoring import Agent, single_turn
from penstock.client.tasks import Purpose
from penstock.server.assembly import Serving
from penstock.server.config import settings as server_config
from penstock.server.core.errors import DomainError
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.engine.protocol import (
    Adapter,
    AdapterLimits,
    EngineDescription,
    StagedWeights,
    TensorMeta,
)
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind
from penstock.trainer.batching.batching import TrainingGroup
from penstock.trainer.state.checkpoint import restore
from penstock.trainer.state.ledger import StepEntry, read_ledger
from penstock.wire.reasons import Reason
from tests.support.fakes import ByteRenderer, FakeEngine
from tests.support.scripted_trainer_server import unanswering
from tests.support.tiny_model import VOCAB_SIZE, make_tiny_model
from tests.support.trainer_processes import ASKED, TrainerProcess, start_trainer_process

Reward = Callable[[Task, Trajectory], Awaitable[float]]


class LoadingEngine(FakeEngine):
    """The fake engine with a real model's manifest. Keeps a sample of the payloads it received."""

    def __init__(
        self,
        tensors: dict[str, TensorMeta],
        step_seconds: float,
        adapters: AdapterLimits | None = None,
    ) -> None:
        super().__init__(step_seconds, adapters=adapters)
        self._tiny = replace(
            super().description, vocab_size=VOCAB_SIZE, weight_dtype="float32", tensors=tensors
        )
        self.versions: list[int] = []
        self._changed = asyncio.Condition()

    @property
    def description(self) -> EngineDescription:
        return self._tiny

    async def load(self, weights: StagedWeights) -> None:
        await super().load(weights)
        await self._note(weights.weight_version)

    async def add_adapter(self, adapter: Adapter) -> None:
        await super().add_adapter(adapter)
        await self._note(adapter.weight_version)

    async def _note(self, version: int) -> None:
        async with self._changed:
            self.versions.append(version)
            self._changed.notify_all()

    async def loads(self, count: int) -> None:
        """Wait until this many versions were loaded."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.versions) >= count)


def tensors_of(model: Path) -> dict[str, TensorMeta]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return {name: TensorMeta(tuple(file.get_slice(name).get_shape())) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@dataclass
class Server:
    life: Lifecycle
    engine: LoadingEngine
    address: str

    @property
    def serving(self) -> Serving:
        return self.life.serving


@contextlib.asynccontextmanager
async def serving(
    tiny: Path,
    listen: str = "127.0.0.1:0",
    step_seconds: float = 0.001,
    adapters: AdapterLimits | None = None,
    settings: Sequence[str] = (),
) -> AsyncGenerator[Server]:
    engine = LoadingEngine(tensors_of(tiny), step_seconds, adapters)
    loaded = server_config.load(None, [f"listen={listen}", *settings])
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    journal = await open_journal(loaded.journal)
    life = Lifecycle(Serving(engine, ByteRenderer(), loaded, journal), server)
    await life.start()
    try:
        yield Server(life, engine, f"127.0.0.1:{port}")
    finally:
        await life.stop(0.0)


@contextlib.asynccontextmanager
async def working(
    address: str, reward: Reward, generate: Agent = single_turn
) -> AsyncGenerator[Worker]:
    calls = Calls(address, Patience())
    worker = Worker(calls, generate, reward, WorkerSettings(concurrency=8, drain_seconds=0.1))
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        worker.stop()
        await task
        await calls.close()


async def letters(task: Task, trajectory: Trajectory) -> float:
    """A reward that usually differs between siblings."""
    return float(sum(trajectory.text.count(letter) for letter in "aeiou"))


def configure(folder: Path, tiny: Path, address: str, **sections: dict[str, object]) -> Path:
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Say {n}.", "answer": n}) + "\n" for n in range(7))
    )
    document: dict[str, dict[str, object]] = {
        "server": {"address": address, "give_up_after_seconds": 120.0},
        "run": {"out": str(folder / "out"), "steps": 3},
        "model": {"path": str(tiny), "dtype": "float32", "threads": 1},
        "data": {
            "group_size": 4,
            "jsonl": {"path": str(prompts)},
            "sampling": {"max_tokens": 12},
        },
        "train": {"groups_per_step": 2, "learning_rate": 1e-3},
        "staleness": {"max_lag": 2},
    }
    for name, section in sections.items():
        document[name] = {**document.get(name, {}), **section}
    path = folder / "trainer.toml"
    path.write_text(tomli_w.dumps(document))
    return path


@dataclass
class Trainer:
    process: TrainerProcess

    async def says(self, words: str) -> str:
        """Wait for these words on stderr; return the output up to that line."""
        text = ""
        async with asyncio.timeout(60):
            while words not in text:
                line = await self.process.stderr.readline()
                assert line, text
                text += line.decode()
        return text

    async def end(self, seconds: float = 120.0) -> tuple[int, str, str]:
        async with asyncio.timeout(seconds):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


async def start_trainer(config: Path, *, resume: bool = False) -> Trainer:
    return Trainer(await start_trainer_process(config, resume=resume))


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_goes_round_and_publishes_a_version_for_every_step(
    tiny: Path, tmp_path: Path
) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        trainer = await start_trainer(configure(tmp_path, tiny, server.address))
        code, out, err = await trainer.end()
        assert code == 0, err
        assert server.engine.versions == [1, 2, 3]
    steps = records(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["weight_version"] for step in steps] == [1, 2, 3]
    assert all(step["groups"] == 2 and step["failures"] == 0 for step in steps)
    assert all(step["lag_max"] <= 2 and step["upload_bytes"] > 0 for step in steps)
    assert len(re.findall(r"^step \d", out, re.MULTILINE)) == 3
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert list((tmp_path / "out" / "tensorboard").iterdir())


def sampled(engine: LoadingEngine) -> dict[str, bytes]:
    """The tensors that the engine loaded last."""
    data = engine.payloads[-1]
    return {
        tensor.name: data[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
        for tensor in engine.loaded[-1].tensors
    }


def trained(folder: Path) -> dict[str, bytes]:
    """The model that the trainer saved at the end."""
    with safe_open(folder / "out" / "model" / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("weights", "deltas"),
    [
        ({"transport": "shared_memory"}, [False] * 4),
        ({"transport": "shared_memory", "delta": "on"}, [False, True, True, True]),
        ({"transport": "stream", "anchor_every": 3}, [False, True, True, False]),
        ({"transport": "checkpoint", "keep": 1}, [False] * 4),
    ],
    ids=["shared memory", "shared memory, differences", "stream", "checkpoint"],
)
async def test_whatever_the_way_the_engine_gets_the_trainers_very_bits(
    tiny: Path, tmp_path: Path, weights: dict[str, object], deltas: list[bool]
) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        # A step so small that most bits stay the same.
        path = configure(
            tmp_path,
            tiny,
            server.address,
            run={"steps": 4},
            train={"learning_rate": 1e-9},
            weights=weights,
        )
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        assert server.engine.versions == [1, 2, 3, 4]
        assert sampled(server.engine) == trained(tmp_path)
    steps = records(tmp_path)
    assert [step["delta"] for step in steps] == deltas
    for step in steps:
        if step["delta"]:
            assert step["upload_bytes"] < step["upload_dense_bytes"]
            # A step whose groups have no gradient changes nothing.
            assert (step["changed_elements_ratio"] > 0) == step["applied"]
            assert step["changed_elements_ratio"] < 1
        else:
            assert step["upload_bytes"] == step["upload_dense_bytes"]
    if weights["transport"] == "checkpoint":
        (left,) = (tmp_path / "out" / "weights").iterdir()
        assert left.name == "4"


async def test_a_load_that_fails_costs_a_whole_version_and_no_step(
    tiny: Path, tmp_path: Path
) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path, tiny, server.address, run={"steps": 6}, weights={"transport": "stream"}
        )
        trainer = await start_trainer(path)
        await server.engine.loads(2)
        server.engine.fail_loads = 1
        code, _, err = await trainer.end()
        assert code == 0, err
        assert "WEIGHT_LOAD_FAILED" in err and "sending it once more, whole" in err
        assert server.engine.versions[-1] == 6
        assert sampled(server.engine) == trained(tmp_path)
    steps = records(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["delta"] for step in steps].count(False) == 2
    # Includes the bytes of the rejected delta that was sent before.
    assert all(s["upload_bytes"] >= s["upload_dense_bytes"] for s in steps if not s["delta"])


async def test_an_engine_that_computes_something_else_ends_the_run(
    tiny: Path, tmp_path: Path
) -> None:
    # The fake engine's scores are unrelated to the model.
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path,
            tiny,
            server.address,
            weights={"probe": {"tokens": 8, "tolerance": 0.05}},
        )
        code, _, err = await (await start_trainer(path)).end()
    assert code == 1
    assert "sending it once more, whole" in err
    last = err.strip().splitlines()[-1]
    assert last.startswith("penstock train: stopped: version 1 was sent whole and rejected again: ")
    assert "nats off" in last


async def test_the_probes_difference_is_recorded(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path,
            tiny,
            server.address,
            weights={"probe": {"tokens": 8, "tolerance": 1000.0}},
        )
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        assert server.engine.scores == 3
    assert all(step["probe_difference"] > 0 for step in records(tmp_path))


async def test_without_lag_is_the_synchronous_loop(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(tmp_path, tiny, server.address, staleness={"max_lag": 0})
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
    assert [step["lag_max"] for step in records(tmp_path)] == [0, 0, 0]


async def test_steps_without_gradient_still_advance(tiny: Path, tmp_path: Path) -> None:
    async def same(task: Task, trajectory: Trajectory) -> float:
        return 1.0

    async with serving(tiny) as server, working(server.address, same):
        path = configure(tmp_path, tiny, server.address, staleness={"max_lag": 0})
        code, _, err = await (await start_trainer(path)).end()
        assert code == 0, err
        assert server.engine.versions == [1, 2, 3]
    steps = records(tmp_path)
    assert [step["applied"] for step in steps] == [False, False, False]
    assert [step["unchanged"] for step in steps] == [True, True, True]
    assert "version 1 changes no tensor, because the step had no gradient" in err
    assert [step["groups_without_gradient"] for step in steps] == [2, 2, 2]
    assert all(step["loss"] == 0.0 and step["grad_norm"] == 0.0 for step in steps)


async def test_stops_when_everything_fails(tiny: Path, tmp_path: Path) -> None:
    async def broken(task: Task, trajectory: Trajectory) -> float:
        raise RuntimeError("no verifier here")

    async with serving(tiny) as server, working(server.address, broken):
        path = configure(tmp_path, tiny, server.address, failure={"max_failed_groups": 3})
        code, _, err = await (await start_trainer(path)).end()
    assert code == 1
    assert "every trajectory failed in 3 groups in a row" in err
    assert "no verifier here" in err


async def test_a_step_waits_for_as_many_as_make_its_groups(tiny: Path, tmp_path: Path) -> None:
    async def one_never_ends(task: Task, trajectory: Trajectory) -> None:
        await trajectory.turn()
        if trajectory.sample_index == 2:
            await asyncio.Event().wait()

    async with (
        serving(tiny) as server,
        working(server.address, letters, one_never_ends),
    ):
        path = configure(
            tmp_path,
            tiny,
            server.address,
            run={"steps": 2},
            data={"group_size": 3},
            groups={"attempts": 4},
            staleness={"max_lag": 0},
        )
        trainer = await start_trainer(path)
        code, _, err = await trainer.end()
        assert code == 0, err
        assert server.serving.closing.left_out >= 4
    assert [(step["groups"], step["failures"]) for step in records(tmp_path)] == [(2, 0)] * 2
    entries = [
        e for e in read_ledger(tmp_path / "out" / "ledger.jsonl") if isinstance(e, StepEntry)
    ]
    sizes = [len(group.trajectory_ids) for entry in entries for group in entry.groups]
    assert sizes == [3] * 4


async def test_some_failures_are_counted_and_survived(tiny: Path, tmp_path: Path) -> None:
    failed: set[str] = set()

    async def fragile(task: Task, trajectory: Trajectory) -> float:
        # Every attempt at one sample of each group fails, including retries.
        if trajectory.trajectory_id.rsplit("-", 2)[1] == "1":
            failed.add(trajectory.trajectory_id)
            raise RuntimeError("flaky")
        return await letters(task, trajectory)

    async with serving(tiny) as server, working(server.address, fragile):
        path = configure(tmp_path, tiny, server.address)
        code, _, err = await (await start_trainer(path)).end()
    assert code == 0, err
    assert [step["failures"] for step in records(tmp_path)] == [2, 2, 2]


@pytest.mark.parametrize("transport", ["auto", "stream"])
async def test_a_server_that_is_killed_is_given_its_weights_again(
    tiny: Path, tmp_path: Path, transport: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(serving(tiny))
        await stack.enter_async_context(working(first.address, letters))
        path = configure(
            tmp_path,
            tiny,
            first.address,
            run={"steps": 12},
            weights={"transport": transport},
        )
        trainer = await start_trainer(path)
        await first.engine.loads(3)
        before = first.engine.versions[-1]
        await first.life.stop(0.0)
        async with serving(tiny, listen=first.address) as second:
            code, _, err = await trainer.end()
            assert code == 0, err
            assert "lost the server" in err and "connected again" in err
            assert second.engine.versions[0] >= before
            assert second.engine.versions[-1] == 12
            assert sampled(second.engine) == trained(tmp_path)
    steps = records(tmp_path)
    assert [step["step"] for step in steps] == list(range(1, 13))
    if transport == "stream":
        # The restarted server gets one whole version, then deltas again. A version that is sent
        # again has no record.
        whole = [step["step"] for step in steps if not step["delta"]]
        assert whole[0] == 1 and len(whole) <= 3
        assert steps[-1]["delta"]


async def test_a_server_whose_memory_is_full_for_a_while_ends_no_run(
    tiny: Path, tmp_path: Path
) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        trainer = await start_trainer(configure(tmp_path, tiny, server.address, run={"steps": 8}))
        await server.engine.loads(2)

        class Full(MemoryBudget):
            """Refuses new tasks. Turns continue, so that the trainer needs more tasks."""

            def check(self, byte_count: int) -> None:
                raise DomainError(Reason.MEMORY_BUDGET, "full", retry_after_seconds=0.05)

        tasks: Any = server.serving.tasks
        full = Full(0, (), server.serving.buffer.kept, server.serving.own)
        budget, tasks.budget = tasks.budget, full
        await trainer.says("SubmitTasks: MEMORY_BUDGET: full; submitting again")
        tasks.budget = budget
        code, _, err = await trainer.end()
        assert code == 0, err
    assert len(records(tmp_path)) == 8


async def test_a_server_that_stays_away_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    path = configure(tmp_path, tiny, "127.0.0.1:9", server={"give_up_after_seconds": 0.5})
    code, _, err = await (await start_trainer(path)).end()
    assert code == 1
    assert (
        "no server at 127.0.0.1:9 for 0.5 s: connection refused; is a server running there?" in err
    )


async def test_sigterm_ends_after_the_step_under_way(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(tmp_path, tiny, server.address, run={"steps": 100_000})
        trainer = await start_trainer(path)
        await server.engine.loads(2)
        trainer.process.send_signal(signal.SIGTERM)
        code, _, err = await trainer.end(60)
        assert code == ASKED, err
        assert len(records(tmp_path)) == len(server.engine.versions)
        assert "while its server was away" not in err


def sleeps(group: TrainingGroup) -> None:
    """A filter that takes long, as a long step would."""
    sys.stderr.write("asleep\n")
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_second_signal_ends_it_at_once(tiny: Path, tmp_path: Path, number: int) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        groups = {"filter": {"function": f"{__name__}:sleeps"}}
        trainer = await start_trainer(configure(tmp_path, tiny, server.address, groups=groups))
        await trainer.says("asleep")
        trainer.process.send_signal(number)
        await trainer.says("stopping after the step under way")
        trainer.process.send_signal(number)
        code, _, err = await trainer.end(20)
    assert code == 128 + number
    assert "Traceback" not in err


async def test_sigterm_ends_a_trainer_that_never_reached_its_server(
    tiny: Path, tmp_path: Path
) -> None:
    async with unanswering() as (address, reached):
        path = configure(tmp_path, tiny, address, server={"give_up_after_seconds": 120.0})
        trainer = await start_trainer(path)
        await reached.wait()
        trainer.process.send_signal(signal.SIGTERM)
        code, _, err = await trainer.end(60)
    assert code == ASKED, err
    assert "penstock train: stopped at step 0 while its server was away\n" in err


async def test_sigterm_ends_a_trainer_whose_server_was_killed_and_it_resumes(
    tiny: Path, tmp_path: Path
) -> None:
    sections: dict[str, dict[str, object]] = {
        "server": {"give_up_after_seconds": 120.0},
        "checkpoint": {"every_steps": 100_000},
    }
    async with serving(tiny) as first, working(first.address, letters):
        path = configure(tmp_path, tiny, first.address, run={"steps": 100_000}, **sections)
        trainer = await start_trainer(path)
        await first.engine.loads(2)
        await first.life.stop(0.0)
        said = await trainer.says("lost the server")
        trainer.process.send_signal(signal.SIGTERM)
        code, _, err = await trainer.end(60)
        assert code == ASKED, said + err
    last = records(tmp_path)[-1]["step"]
    assert f"penstock train: stopped at step {last} while its server was away\n" in err
    assert [step["step"] for step in records(tmp_path)] == list(range(1, last + 1))
    saved = [folder.name for folder in (tmp_path / "out" / "checkpoints").iterdir()]
    assert saved == [f"step-{last:08d}"]

    async with serving(tiny) as second, working(second.address, letters):
        path = configure(tmp_path, tiny, second.address, run={"steps": last + 2}, **sections)
        code, _, err = await (await start_trainer(path, resume=True)).end()
        assert code == 0, err
        assert f"resuming after step {last} " in err
        assert second.engine.versions == [last, last + 1, last + 2]
    assert [step["step"] for step in records(tmp_path)] == list(range(1, last + 3))


async def test_a_server_lost_after_sigterm_is_not_waited_for(tiny: Path, tmp_path: Path) -> None:
    switching = asyncio.Event()

    async def load(weights: StagedWeights) -> None:
        switching.set()
        await asyncio.Event().wait()

    async with serving(tiny) as server, working(server.address, letters):
        # The first switch is never answered.
        server.engine.load = load  # type: ignore[method-assign]
        path = configure(
            tmp_path,
            tiny,
            server.address,
            server={"give_up_after_seconds": 120.0},
            checkpoint={"every_steps": 100_000},
        )
        trainer = await start_trainer(path)
        await switching.wait()
        trainer.process.send_signal(signal.SIGTERM)
        await trainer.says("SIGTERM: stopping")
        await server.life.stop(0.0)
        code, _, err = await trainer.end(60)
    assert code == ASKED, err
    (step,) = records(tmp_path)
    assert (step["step"], step["seconds_switch"]) == (1, 0.0)
    assert "penstock train: stopped at step 1 while its server was away\n" in err
    assert (tmp_path / "out" / "checkpoints" / "step-00000001").is_dir()


async def test_a_killed_trainer_resumes_from_its_checkpoint(tiny: Path, tmp_path: Path) -> None:
    async with serving(tiny) as server, working(server.address, letters):
        path = configure(
            tmp_path, tiny, server.address, run={"steps": 8}, checkpoint={"every_steps": 2}
        )
        trainer = await start_trainer(path)
        await server.engine.loads(5)
        trainer.process.kill()
        await trainer.end()
        before = server.engine.versions[-1]
        code, _, err = await (await start_trainer(path, resume=True)).end()
        assert code == 0, err
        assert "resuming after step 4" in err or "resuming after step 6" in err
        versions = server.engine.versions
        # Versions only grow, and repeated steps were not published again.
        assert versions == sorted(set(versions))
        assert versions[-1] > before
    assert [step["step"] for step in records(tmp_path)] == list(range(1, 9))


@pytest.mark.parametrize(
    ("target", "groups", "last"),
    [
        # Eight attempts a step: the second step has enough of them, and then it must hold.
        ({"reward": 0.0, "attempts": 9, "patience": 2}, {}, 3),
        ({"reward": 0.0}, {}, 6),
        ({"reward": 1e6, "attempts": 1}, {}, 6),
        # Groups that are dropped because every answer is right count for the target.
        ({"reward": 0.5, "attempts": 9}, {"drop_without_spread": True}, 1),
    ],
    ids=["held", "too few attempts", "out of reach", "groups that are not trained"],
)
async def test_a_run_ends_once_its_reward_has_been_at_the_target_for_long_enough(
    tiny: Path, tmp_path: Path, target: dict[str, Any], groups: dict[str, Any], last: int
) -> None:
    async def mostly_right(task: Task, trajectory: Trajectory) -> float:
        return float(task.index not in (2, 5) or trajectory.sample_index > 0)

    sections = {"run": {"steps": 6, "target": target}, "checkpoint": {"every_steps": 4}}
    async with serving(tiny) as server, working(server.address, mostly_right):
        path = configure(tmp_path, tiny, server.address, groups=groups, **sections)
        code, out, err = await (await start_trainer(path)).end()
        assert code == 0, err
        assert server.engine.versions == list(range(1, last + 1))
        assert sampled(server.engine) == trained(tmp_path)
    reached = f"reached run.target.reward = {target['reward']:g}; ending after step {last} of"
    assert (reached in err) == (last < 6)
    assert f"step {last}/{last}" in out
    # The estimate is only an upper bound.
    assert "at most" in out or last < 3
    saved = restore(tmp_path / "out" / "checkpoints")
    assert saved is not None and saved.state.step == last
    assert saved.state.ending.mean == records(tmp_path)[-1]["reward_target_mean"]


async def test_dry_run_prints_what_load_config_reads_back(tiny: Path, tmp_path: Path) -> None:
    path = configure(tmp_path, tiny, "127.0.0.1:1")
    code = (
        "import sys; from pathlib import Path; from penstock.trainer.__main__ import train; "
        f"code = train(Path({str(path)!r}), ['train.groups_per_step=5'], False, True); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert "groups_per_step = 5" in out.decode()


async def test_evaluations_are_measured_and_one_that_was_broken_off_is_begun_anew(
    tiny: Path, tmp_path: Path
) -> None:
    begun = asyncio.Event()
    slow = True

    async def scored(task: Task, trajectory: Trajectory) -> float:
        if slow and task.purpose is Purpose.EVAL and trajectory.last_turn.weight_versions[0]:
            begun.set()
            await asyncio.Event().wait()
        return await letters(task, trajectory)

    prompts = tmp_path / "held-out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(4)))
    held_out = {"name": "held-out", "jsonl": {"path": str(prompts)}, "every_versions": 1}
    async with serving(tiny) as server, working(server.address, scored) as worker:
        path = configure(
            tmp_path, tiny, server.address, run={"steps": 2}, checkpoint={"every_steps": 1}
        )
        document = path.read_text()
        path.write_text(document + tomli_w.dumps({"evaluation": [held_out]}))
        first = await start_trainer(path)
        async with asyncio.timeout(180):
            await begun.wait()
            while not (tmp_path / "out" / "checkpoints" / "step-00000001").exists():
                await asyncio.sleep(0.01)
        first.process.kill()
        await first.end()
        slow = False
        for task in list(worker._running.values()):
            task.cancel()
        code, out, err = await (await start_trainer(path, resume=True)).end(180)
        assert code == 0, err
    lines = records(tmp_path)
    measured = [line for line in lines if line.get("kind") == "evaluation"]
    assert [line["step"] for line in lines if "kind" not in line] == [1, 2]
    assert [line["step"] for line in measured] == [0, 1, 2]
    assert all(line["prompts"] == 4 and line["mixed_share"] == 0.0 for line in measured)
    assert out.count("eval held-out") == 2
