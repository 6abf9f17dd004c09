"""Several ranks compute the same numbers as one process, and all of them end if one fails.

Ranks are processes forked from a nursery that has already imported the slow modules. Server and
worker run in the test's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.process_group import LOCAL, Place, join_group
from penstock.trainer.policy.ranks import PORT_BYTES, Leader, lead
from tests.faults.trainers import Stand, check_lineage, check_weights, standing
from tests.support.rank_work import groups_of, plan_for
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_processes import ASKED
from tests.trainer.test_end_to_end import records

# All tests here share one nursery.
one_loop = pytest.mark.asyncio(loop_scope="module")

STEPS = 10
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 2e-5, 1e-6


@dataclass
class Ranks:
    """The running ranks of one order."""

    nursery: RankNursery
    pids: list[int]

    async def end(self) -> list[int]:
        """The exit codes of the ranks, negative if a signal ended one."""
        codes: list[int] = (await self.nursery.hear())["codes"]
        self.nursery.running = []
        return codes


@dataclass
class RankNursery:
    """Forks ranks, for one order at a time."""

    process: asyncio.subprocess.Process
    running: list[int] = field(default_factory=list[int])

    async def begin(self, function: str, count: int, log: Path, **arguments: Any) -> Ranks:
        assert self.process.stdin is not None
        name = f"tests.support.rank_work:{function}"
        order = {"function": name, "arguments": arguments, "ranks": count, "log": str(log)}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.running = (await self.hear())["pids"]
        return Ranks(self, self.running)

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(200):
            line = await self.process.stdout.readline()
        assert line, "the nursery is gone"
        return json.loads(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=2, tied=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nursery(model: Path) -> AsyncGenerator[RankNursery]:
    command = (sys.executable, "-m", "tests.support.rank_nursery", str(model))
    process = await asyncio.create_subprocess_exec(
        *command, stdin=-1, stdout=-1, cwd=Path(__file__).parents[3]
    )
    running = RankNursery(process)
    try:
        assert (await running.hear())["ready"]
        yield running
    finally:
        for pid in running.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def synchronous(folder: Path, model: Path) -> AsyncGenerator[Stand]:
    """A run whose every step is deterministic."""
    async with (
        asyncio.timeout(250),
        standing(
            folder,
            model,
            steps=STEPS,
            max_lag=0,
            every_steps=4,
            # At this rate, Adam scales up gradients that consist only of rounding errors.
            train={"learning_rate": 3e-4},
        ) as stand,
    ):
        yield stand


async def go(nursery: RankNursery, stand: Stand, count: int, *, resume: bool = False) -> Ranks:
    config = str(stand.config)
    return await nursery.begin("train", count, stand.log, config=config, resume=resume)


def left(stand: Stand) -> dict[str, torch.Tensor]:
    return load_file(stand.folder / "out" / "model" / "model.safetensors")


# The same numbers


KL = {"kind": "reward", "coefficient": 0.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    # The policy's own samples, which change as it learns. One process makes them for both runs.
    "rollouts": {"rolled_out": True, "train": {"learning_rate": 2e-4}},
    "updates": {
        "train": {"updates_per_step": 2, "reduce_each_micro_batch": True},
        "algorithm": {"correction": {"level": "token", "mode": "clip", "threshold": 2.0}},
    },
    "reference": {"algorithm": {"advantage": {"kind": "reinforce_plus_plus"}, "kl": KL}},
    "left out": {"algorithm": {"kl": KL}},
    "critic": {"algorithm": {"advantage": {"kind": "gae"}}},
    "adapter": {"lora": {"rank": 4, "alpha": 8.0}},
}
# These are compared with the first steps of "plain" and must not change a number.
NO_DIFFERENCE: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "offload": {"cpu_offload": True},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def computed(
    model: Path, nursery: RankNursery, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """Each variant's figures and final weights, by its name and the number of ranks."""
    folder = tmp_path_factory.mktemp("computed")
    variants = {**VARIANTS, **NO_DIFFERENCE}
    for count in (1, 2):
        log = folder / "log"
        ranks = await nursery.begin(
            "steps",
            count,
            log,
            model=str(model),
            out=str(folder),
            variants=variants,
            long=["plain", "rollouts"],
        )
        assert await ranks.end() == [0] * count, log.read_text()
    return {
        (name, count): load_file(folder / f"{name}-{count}.safetensors")
        for name in variants
        for count in (1, 2)
    }


@pytest.mark.parametrize("variant", VARIANTS)
@one_loop
async def test_two_ranks_compute_what_one_process_does(
    computed: dict[tuple[str, int], dict[str, torch.Tensor]], model: Path, variant: str
) -> None:
    one, two = computed[variant, 1], computed[variant, 2]
    compare(one, two)
    if variant != "adapter":
        torch.testing.assert_close(two["score"], one["score"], atol=LOSS_TOLERANCE, rtol=0)
    if variant == "rollouts":
        # Both have moved far from the initial weights.
        before = load_file(model / "model.safetensors")
        moved = max(float((two[name] - t).abs().max()) for name, t in before.items())
        assert len(two["figures"]) == STEPS and moved > 1000 * WEIGHT_TOLERANCE
    several_updates = variant == "updates"
    compare_weights(one, two, 1e-4 if several_updates else WEIGHT_TOLERANCE)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("variant", NO_DIFFERENCE)
@one_loop
async def test_what_saves_memory_changes_no_number(
    computed: dict[tuple[str, int], dict[str, torch.Tensor]], variant: str, count: int
) -> None:
    # Each step's figures depend on the weights after the previous steps.
    compare(computed["plain", count], computed[variant, count])


def compare(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one["figures"].abs().sum() > 0
    count = len(two["figures"])
    torch.testing.assert_close(two["figures"], one["figures"][:count], atol=LOSS_TOLERANCE, rtol=0)


def compare_weights(
    one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float
) -> None:
    # The same names in the same order, with tied tensors once.
    assert list(one) == list(two)
    for name in one.keys() - {"figures", "score"}:
        torch.testing.assert_close(two[name], one[name], atol=tolerance, rtol=0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def undisturbed(
    model: Path, nursery: RankNursery, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The model and records of an uninterrupted run of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    async with synchronous(folder, model) as stand:
        assert await (await go(nursery, stand, 1)).end() == [0], stand.said
        return left(stand), records(folder)


@one_loop
async def test_a_run_that_loses_a_rank_says_so_and_resumed_equals_one_process(
    model: Path,
    nursery: RankNursery,
    undisturbed: tuple[dict[str, torch.Tensor], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    async with synchronous(tmp_path, model) as stand:
        ranks = await go(nursery, stand, 2)
        # The first checkpoint exists, and the fifth step is done or in progress.
        await stand.server.engine.loads(5)
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert await ranks.end() == [1, -signal.SIGKILL]
        assert "stopped: rank 1 is gone" in stand.said
        assert await (await go(nursery, stand, 2, resume=True)).end() == [0, 0], stand.said
        check_lineage(stand)
        check_weights(stand)
        compare_runs(stand, *undisturbed)


@one_loop
async def test_ranks_that_are_asked_to_stop_do_and_one_process_goes_on(
    model: Path,
    nursery: RankNursery,
    undisturbed: tuple[dict[str, torch.Tensor], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    async with synchronous(tmp_path, model) as stand:
        ranks = await go(nursery, stand, 2)
        await stand.server.engine.loads(5)
        for pid in ranks.pids:
            os.kill(pid, signal.SIGTERM)  # As torchrun does.
        assert await ranks.end() == [ASKED, 0]
        assert await (await go(nursery, stand, 1, resume=True)).end() == [0], stand.said
        assert "computed with 2 ranks, this run continues with 1" in stand.said
        check_lineage(stand)
        compare_runs(stand, *undisturbed)


@one_loop
async def test_torchrun_starts_ranks_and_stops_them_and_ranks_go_on(
    model: Path,
    nursery: RankNursery,
    undisturbed: tuple[dict[str, torch.Tensor], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    async with synchronous(tmp_path, model) as stand:
        running = await torchrun(stand)
        await stand.server.engine.loads(5)
        running.terminate()
        # torchrun exits with 1, whatever rank 0's own exit code was.
        assert await running.wait() == 1
        assert "SIGTERM: stopping after the step under way" in stand.said
        assert 5 <= len(records(tmp_path)) < STEPS
        # Ranks of the nursery have torchrun's variables, and need not load the libraries again.
        assert await (await go(nursery, stand, 2, resume=True)).end() == [0, 0], stand.said
        check_lineage(stand)
        compare_runs(stand, *undisturbed)


async def torchrun(stand: Stand) -> asyncio.subprocess.Process:
    """Start two ranks with the command of docs/guides/several-gpus.md."""
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with stand.log.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command, "-m", "penstock.cli", "train", str(stand.config)),
            stdout=log,
            stderr=log,
        )


def compare_runs(
    stand: Stand, weights: dict[str, torch.Tensor], expected: list[dict[str, Any]]
) -> None:
    compare_weights(weights, left(stand), WEIGHT_TOLERANCE)
    steps = records(stand.folder)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all((step["updates_skipped"] == 0) == step["applied"] for step in steps)
    for name, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", 1e-4), ("entropy", 1e-4)):
        found = [step[name] for step in steps]
        assert found == pytest.approx([step[name] for step in expected], abs=tolerance)


# The end of a rank


@one_loop
async def test_a_rank_that_is_killed_while_nobody_computes_ends_the_others(
    nursery: RankNursery, tmp_path: Path
) -> None:
    ranks = await idle(nursery, tmp_path)
    os.kill(ranks.pids[2], signal.SIGKILL)
    assert await ranks.end() == [1, 1, -signal.SIGKILL]
    assert "stopped: rank 2 is gone" in (tmp_path / "log").read_text()


@one_loop
async def test_the_others_end_with_rank_zero(nursery: RankNursery, tmp_path: Path) -> None:
    ranks = await idle(nursery, tmp_path)
    # Other ranks ignore the signals that ask rank 0 to stop.
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(ranks.pids[1], number)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert await ranks.end() == [-signal.SIGKILL, 1, 1]
    assert "rank 1: rank 0 is gone" in (tmp_path / "log").read_text()


@one_loop
async def test_the_error_of_a_rank_is_what_the_run_ends_with(
    nursery: RankNursery, tmp_path: Path
) -> None:
    ranks = await idle(nursery, tmp_path, fails="out of memory")
    assert (await ranks.end())[0] == 1
    log = (tmp_path / "log").read_text()
    assert "penstock train: stopped: rank 1: RuntimeError('out of memory')" in log


def test_a_rank_without_a_gpu_of_its_own_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigInvalid, match="local rank 1 on a host with 1 GPUs"):
        join_group(Place(1, 2, 1), None)


async def idle(nursery: RankNursery, folder: Path, **arguments: str) -> Ranks:
    """Three ranks that have joined the group and wait."""
    log = folder / "log"
    ranks = await nursery.begin("stand_still", 3, log, folder=str(folder), **arguments)
    async with asyncio.timeout(60):
        while len(list(folder.glob("joined-*"))) < 3:
            await asyncio.sleep(0.05)
    return ranks


@one_loop
async def test_ranks_wait_for_one_that_writes_for_longer_than_a_collective_may(
    nursery: RankNursery, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    ranks = await nursery.begin("write_for_long", 2, log, folder=str(tmp_path))
    assert set(await ranks.end()) == {0}, log.read_text()
    assert len(list(tmp_path.glob("met-*"))) == 2


def test_a_rank_that_ends_before_it_joined_ends_the_run() -> None:
    code = (
        "import time; from penstock.trainer.policy.process_group import LocalRanks; import sys;"
        "LocalRanks(2, (sys.executable, '-c', 'import sys; sys.exit(3)')); time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert "rank 1 exited with status 3 before it joined" in ended.stderr


def test_a_rank_that_begins_when_rank_zero_has_gone_ends_at_once() -> None:
    code = "from penstock.trainer.policy.process_group import end_with_parent; end_with_parent()"
    for leader, status in ((os.getpid(), 0), (1, 1)):
        environment = {**os.environ, "PENSTOCK_LOCAL_RANKS": str(leader)}
        assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == status


@pytest.mark.parametrize("local", [False, True])
def test_rank_zero_listens_where_other_hosts_reach_it(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    """Here the host's name resolves to a loopback address other than 127.0.0.1, as on Debian."""
    handed: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    led: queue.SimpleQueue[Leader] = queue.SimpleQueue()
    monkeypatch.setattr("penstock.trainer.policy.ranks._hand_round", handed.put)
    monkeypatch.setattr("penstock.trainer.policy.ranks.PARTING_SECONDS", 0.0)
    monkeypatch.setattr("penstock.trainer.policy.ranks.LET_IN_SECONDS", 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    if local:
        monkeypatch.setenv(LOCAL, str(os.getpid()))
    threading.Thread(target=lambda: led.put(lead(2)), daemon=True).start()
    said = handed.get(timeout=20)
    port, key = int.from_bytes(said[:PORT_BYTES], "big"), said[PORT_BYTES:]
    if local:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
    address = ("127.0.1.1" if local else "127.0.0.1", port)
    # Strangers on the port: one that sends nothing, one that disconnects, one with another key.
    silent = socket.create_connection(address)
    socket.create_connection(address).close()
    with pytest.raises(AuthenticationError):
        Client(address, authkey=bytes(len(key)))
    with silent, Client(address, authkey=key) as connection:
        connection.send_bytes(b"1")
        leader = led.get(timeout=20)
        # Longer than a connection has to authenticate.
        time.sleep(1.5)
        leader.end(0)
        assert (connection.recv_bytes(), connection.recv_bytes()) == (b"end", b"0")


@pytest.mark.parametrize("algorithm", [{}, {"advantage": {"kind": "gae"}}])
def test_a_plan_is_the_same_after_a_journey_as_bytes(algorithm: dict[str, Any]) -> None:
    from penstock.trainer.batching.plan_bytes import decode_plan, encode_plan

    plan = plan_for(groups_of(0), 2, algorithm, 2).share(1, 2)
    content = encode_plan(plan)
    again = decode_plan(content)
    assert encode_plan(again) == content
    assert again.trained_tokens == plan.trained_tokens > 0
    assert [len(u.batches) for u in again.updates] == [len(u.batches) for u in plan.updates]
    assert again.rewards.returns_S.tolist() == plan.rewards.returns_S.tolist()
