"""slime's whole-rollout functions behind a gate that admits a limited number of groups at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.client import WorkerSettings, connect
from penstock.client.calls import Calls, Patience
from penstock.client.plugins import modules
from penstock.client.plugins.slime_functions import SingletonMeta, get_async_loop
from penstock.client.plugins.whole_rollout import WholeRollout
from penstock.client.plugins.worker import load_worker
from penstock.wire.agent_marks import read_unwanted
from tests.client.plugins.test_plugins import arguments, check_sampled, tasks, tokenizer
from tests.support.harness import Exchange, hello, serve

__all__ = ["tokenizer"]

FUNCTIONS = "tests.support.slime_rollouts"


@pytest.fixture(autouse=True)
def forget_state() -> None:
    SingletonMeta.clear_all_instances()


@dataclass
class Trainer:
    """Takes groups for one step and rejects unwanted ones, as a trainer does."""

    exchange: Exchange
    worker: WholeRollout
    kept: list[str] = field(default_factory=list[str])
    group_ids: set[str] = field(default_factory=set[str])
    """Ids of the kept groups."""
    dropped: dict[str, str] = field(default_factory=dict[str, str])

    async def gather(self, count: int) -> None:
        self.exchange.send(demand={"group_count": count})
        while len(self.kept) < count:
            delivery = await self.exchange.receive("delivery", 30)
            group = delivery.group
            why = read_unwanted(group.trajectories[0].outcome.metadata)
            if not why:
                for trajectory in group.trajectories:
                    check_sampled(trajectory)
                self.kept.append(group.task_id)
                self.group_ids.add(group.group_id)
                continue
            self.dropped[group.task_id] = why
            rejection = {"delivery_ids": [delivery.delivery_id], "rejection": {"reason": why}}
            self.exchange.send(receipt=rejection)
            self.exchange.send(demand={"group_count": 1})


@contextlib.asynccontextmanager
async def at_work(
    folder: Path,
    tokenizer: Path,
    function: str,
    *,
    max_lag: int,
    generate: str = "",
    **args: object,
) -> AsyncGenerator[Trainer]:
    """A worker with the function, twenty tasks, and two groups in a step."""
    async with serve(folder, step_seconds=0.001) as server:
        exchange = await hello(server.wire, groups_per_step=2, max_lag=max_lag)
        path = arguments(
            folder,
            tokenizer,
            rollout_max_response_len=8,
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            **args,
        )
        lines = ["", f"custom_rm_path = '{FUNCTIONS}.length_reward'"]
        if generate:
            lines.append(f"custom_generate_function_path = '{generate}'")
        path.write_text(path.read_text().replace("reward_key = 'score'", "") + "\n".join(lines))
        settings = WorkerSettings(64)
        reward, whole = f"{FUNCTIONS}:length_reward", f"{FUNCTIONS}:{function}"
        calls = Calls(server.address, Patience())
        worker = load_worker("slime", None, reward, whole, path, settings)(calls)
        async with connect(server.address) as client:
            await client.submit_tasks(tasks(20, 2))
        running = asyncio.ensure_future(worker.run())
        try:
            assert isinstance(worker, WholeRollout)
            yield Trainer(exchange, worker)
            assert not running.done()
        finally:
            worker.stop()
            await asyncio.wait_for(running, 20)
            await calls.close()


@pytest.mark.parametrize("function", ["one_by_one", "over_sampling"])
@pytest.mark.parametrize(("max_lag", "first_kept"), [(0, 1), (0, 5), (1, 4), (4, 12)])
async def test_what_is_dropped_makes_room_for_what_is_asked_for_next(
    tmp_path: Path, tokenizer: Path, function: str, max_lag: int, first_kept: int
) -> None:
    work = at_work(
        *(tmp_path, tokenizer, function),
        max_lag=max_lag,
        first_kept=first_kept,
        over_sampling_batch_size=2,
    )
    async with work as trainer:
        await asyncio.wait_for(trainer.gather(2), 30)
    assert trainer.dropped == {f"t{index}": "zero_std" for index in range(first_kept)}


async def test_more_is_asked_for_than_is_admitted(tmp_path: Path, tokenizer: Path) -> None:
    """A function that asks for more groups than a step has gets those that are admitted."""
    work = at_work(
        *(tmp_path, tokenizer, "over_sampling"),
        max_lag=0,
        first_kept=0,
        over_sampling_batch_size=3,
    )
    async with work as trainer:
        await asyncio.wait_for(trainer.gather(2), 30)
    assert sorted(trainer.kept) == ["t0", "t1"]


made: Counter[int] = Counter()


async def first_fails(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Every attempt at a prompt's first sample fails."""
    from slime.rollout.sglang_rollout import generate  # type: ignore[import-not-found]

    made[sample.index] += 1
    done = await generate(args, sample, sampling_params)
    if sample.index % args.n_samples_per_prompt == 0:
        done.status = type(done).Status.FAILED
    return done


async def test_an_attempt_that_comes_again_alone_fails_and_nothing_of_it_is_remembered(
    tmp_path: Path, tokenizer: Path
) -> None:
    made.clear()
    work = at_work(
        *(tmp_path, tokenizer, "one_by_one"),
        max_lag=4,
        generate="tests.client.plugins.test_whole_rollouts.first_fails",
        first_kept=0,
    )
    async with work as trainer:
        await asyncio.wait_for(trainer.gather(4), 30)
        assert set(made.values()) == {1}
        assert not {group_id for group_id, _ in trainer.worker._alone} & trainer.group_ids


async def first_scores_nothing(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Every attempt at a prompt's first sample has NaN as its reward."""
    from slime.rollout.sglang_rollout import generate  # type: ignore[import-not-found]

    done = await generate(args, sample, sampling_params)
    if sample.index % args.n_samples_per_prompt == 0:
        done.reward = float("nan")
    return done


async def test_a_reward_that_is_not_finite_fails_its_attempt_only(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work = at_work(
        *(tmp_path, tokenizer, "one_by_one"),
        max_lag=4,
        generate="tests.client.plugins.test_whole_rollouts.first_scores_nothing",
        first_kept=0,
    )
    async with work as trainer:
        await asyncio.wait_for(trainer.gather(2), 30)
    assert "failed with VALUE_ERROR: the outcome cannot be sent: a reward must be" in caplog.text


@pytest.mark.parametrize("takes_nothing", [True, False])
@pytest.mark.parametrize("shares_loop", [False, True])
async def test_groups_in_flight_are_made_while_none_is_admitted(
    tmp_path: Path, tokenizer: Path, takes_nothing: bool, shares_loop: bool
) -> None:
    modules.install()
    from tests.support.slime_rollouts import Background

    Background.one = None
    work = at_work(
        *(tmp_path, tokenizer, "fully_async"),
        max_lag=0,
        generate=f"{FUNCTIONS}.slow_second",
        takes_nothing=takes_nothing,
        shares_loop=shares_loop,
    )
    async with work as trainer:
        try:
            await asyncio.wait_for(trainer.gather(2), 30)
        finally:
            background: Any = Background.one
            background.running = False
        told = {type(error).__name__: str(error) for error in background.errors}
    # It may just ask this loop for groups.
    assert await asyncio.to_thread(background.ended.wait, 20)
    assert sorted(trainer.kept) == ["t0", "t1"]
    # A function that blocks its event loop gets an error that explains why it receives nothing.
    assert set(told) == (set() if takes_nothing else {"RolloutMisused"})
    assert all("await something" in message for message in told.values())


async def test_a_worker_that_stops_leaves_slimes_loop_free(tmp_path: Path, tokenizer: Path) -> None:
    async with at_work(tmp_path, tokenizer, "one_by_one", max_lag=0, first_kept=0) as trainer:
        await asyncio.wait_for(trainer.gather(2), 30)
        # Called again, the function waits on that loop for a group that the gate does not admit.
        loop = get_async_loop().loop
        await asyncio.sleep(0.5)
    again = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, "free"), loop)
    assert await asyncio.wait_for(asyncio.wrap_future(again), 10) == "free"
