"""Which delivered groups form a step, and how it treats long answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from pydantic import ValidationError

from penstock.client.plugins.group_filter import Delivered
from penstock.trainer.batching.batching import TrainingGroup, read_group
from penstock.trainer.config.groups import GroupsConfig, OverlongConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.core.errors import ConfigInvalid, EverythingDropped
from penstock.trainer.data.feeder import ALL_FAILED, ServerTasks, TaskFeeder
from penstock.trainer.data.indices import DataIndices
from penstock.trainer.data.shards import Division
from penstock.trainer.gather.batch import TASK_SETTLED, Gatherer, settle_refused
from penstock.trainer.gather.group_policies import (
    ASKED_AGAIN,
    FAILED_ASKED_AGAIN,
    MEAN_TOO_HIGH,
    MEAN_TOO_LOW,
    NO_SPREAD,
    SIBLING_FAILED,
    length_penalty,
    load_filter,
    mask_truncated,
    penalize_length,
    reason_to_drop,
)
from penstock.trainer.metrics.step_record import StepRecord
from penstock.trainer.state.ledger import Ledger, RefusedEntry, StepEntry, TrainedGroup
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.channel import client_options
from penstock.wire.messages import (
    Notice,
    Outcome,
    Segment,
    Trajectory,
    TrajectoryGroup,
    WeightReceipt,
)
from tests.support.harness import until
from tests.support.scripted_trainer_server import ScriptedServer, Session, refuse
from tests.support.trainer_walk import delivery, greet, running, stage
from tests.trainer.data.test_feeder import DATA, Numbers

HERE = "tests.trainer.gather.test_group_policies"
FAILED = Outcome(failure={"reason": "TOOL", "message": "away"})


def outcomes(number: int, *rewards: float | None, task_id: str = "") -> Any:
    """A delivery of two trajectories with these rewards. None is a failure."""
    sent = delivery(number)
    for trajectory, reward in zip(sent.group.trajectories, rewards, strict=True):
        trajectory.outcome.CopyFrom(FAILED if reward is None else Outcome(reward=reward))
    sent.group.task_id = task_id or sent.group.task_id
    return sent


def group_of(*rewards: float | None) -> TrainingGroup:
    return read_group(outcomes(0, *rewards).group, trainer_version=0, max_lag=0)


def config_of(**groups: object) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"reasoning_gym": {"name": "chain_sum"}},
            "groups": groups,
        }
    )


def of_no_task(group: trajectory_pb2.TrajectoryGroup) -> Delivered:
    return Delivered(group, None)


NOTHING = of_no_task(TrajectoryGroup())


def segment(count: int, turn: int | None = None) -> Any:
    """A segment of policy tokens from this turn, or of context without a turn."""
    ids = codec.array_bytes(np.arange(count, dtype=np.int32))
    if turn is None:
        return Segment(author=trajectory_pb2.AUTHOR_CONTEXT, token_ids=ids)
    return Segment(
        author=trajectory_pb2.AUTHOR_POLICY,
        token_ids=ids,
        logprobs=codec.array_bytes(np.full(count, -1.0, np.float32), codec.LOGPROB),
        turn_index=turn,
        temperature=1.0,
    )


def trajectory(name: str, *segments: Any, length: bool = False, reward: float = 1.0) -> Any:
    finish = trajectory_pb2.FINISH_REASON_LENGTH if length else trajectory_pb2.FINISH_REASON_STOP
    return Trajectory(
        trajectory_id=name,
        segments=segments,
        outcome=Outcome(reward=reward),
        finish_reason=finish,
    )


# Reasons


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ((1.0, 1.0), {}, None),
        ((1.0, None), {}, None),
        ((1.0, None), {"failed_siblings": "drop"}, SIBLING_FAILED),
        ((1.0, None), {"failed_siblings": "replace"}, SIBLING_FAILED),
        ((1.0, 0.0), {"failed_siblings": "drop"}, None),
        ((1.0, 1.0), {"drop_without_spread": True}, NO_SPREAD),
        ((0.1 + 0.2, 0.3), {"drop_without_spread": True}, NO_SPREAD),
        # The one attempt that is left has no other to be compared with.
        ((1.0, None), {"drop_without_spread": True}, NO_SPREAD),
        ((1.0, 0.0), {"drop_without_spread": True}, None),
        ((0.0, 0.5), {"min_mean_reward": 0.25}, None),
        ((0.0, 0.5), {"min_mean_reward": 0.3}, MEAN_TOO_LOW),
        ((0.0, 0.5), {"max_mean_reward": 0.2}, MEAN_TOO_HIGH),
        ((0.7, 0.1), {"min_mean_reward": 0.4}, None),
        ((0.1, 0.2), {"max_mean_reward": 0.15}, None),
    ],
)
def test_a_group_is_dropped_for_a_reason(
    rewards: tuple[float | None, ...], settings: dict[str, object], reason: str | None
) -> None:
    assert reason_to_drop(group_of(*rewards), config_of(**settings).groups) == reason


@pytest.mark.parametrize(
    ("rewards", "branch", "reason"),
    [((1.0, 1.0), 0.0, NO_SPREAD), ((1.0, 0.0), 0.5, None), ((1.0, None), 0.0, NO_SPREAD)],
)
def test_a_branch_is_no_spread_of_the_attempts(
    rewards: tuple[float | None, ...], branch: float, reason: str | None
) -> None:
    message = outcomes(0, *rewards).group
    more = message.trajectories.add()
    more.CopyFrom(message.trajectories[0])
    more.trajectory_id, more.parent_trajectory_id = "b", message.trajectories[0].trajectory_id
    more.outcome.CopyFrom(Outcome(reward=branch))
    group = read_group(message, trainer_version=0, max_lag=0)
    assert branch in group.rewards
    assert reason_to_drop(group, GroupsConfig(drop_without_spread=True)) == reason
    # If the attempts failed, there is nothing to compare the branch with.
    message.trajectories[0].outcome.CopyFrom(FAILED)
    message.trajectories[1].outcome.CopyFrom(FAILED)
    group = read_group(message, trainer_version=0, max_lag=0)
    assert reason_to_drop(group, GroupsConfig(drop_without_spread=True)) == NO_SPREAD


def test_branches_have_no_part_in_a_groups_mean() -> None:
    message = outcomes(0, 0.0, 0.0).group
    for name in "bcde":
        more = message.trajectories.add()
        more.CopyFrom(message.trajectories[0])
        more.trajectory_id, more.parent_trajectory_id = name, message.trajectories[0].trajectory_id
        more.outcome.CopyFrom(Outcome(reward=1.0))
    group = read_group(message, trainer_version=0, max_lag=0)
    assert reason_to_drop(group, GroupsConfig(max_mean_reward=0.5)) is None
    assert reason_to_drop(group, GroupsConfig(min_mean_reward=0.5)) == MEAN_TOO_LOW
    # Without an attempt there is no mean that could be too low.
    for trajectory in message.trajectories[:2]:
        trajectory.outcome.CopyFrom(FAILED)
    group = read_group(message, trainer_version=0, max_lag=0)
    assert len(group.rewards) == 4
    assert reason_to_drop(group, GroupsConfig(min_mean_reward=2.0)) is None


def too_easy(group: TrainingGroup, above: float = 0.6) -> str | None:
    return "EASY" if sum(group.rewards) / len(group.rewards) > above else None


@pytest.mark.parametrize(("rewards", "reason"), [((0.0, 0.5), None), ((0.9, 0.5), "FILTER:EASY")])
def test_a_filter_of_ones_own_says_why(rewards: tuple[float, float], reason: str | None) -> None:
    own = load_filter(config_of(filter={"function": f"{HERE}:too_easy"}))
    assert own is not None
    assert own(group_of(*rewards), NOTHING) == reason


def fails(group: TrainingGroup) -> str | None:
    raise KeyError("answer")


def returns_a_number(group: TrainingGroup) -> Any:
    return 3


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        ("missing", {}, "has no missing"),
        ("too_easy", {"below": 1}, "below"),
        ("fails", {}, "KeyError: 'answer'"),
        ("returns_a_number", {}, "a reason or None, got 3"),
    ],
)
def test_a_filter_that_is_of_no_use_is_named(
    function: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        found = load_filter(
            config_of(filter={"function": f"{HERE}:{function}", "options": options})
        )
        assert found is not None
        found(group_of(1.0, 0.0), NOTHING)


def test_bounds_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_mean_reward = 0.9 is above"):
        GroupsConfig(min_mean_reward=0.9, max_mean_reward=0.1)
    with pytest.raises(ValidationError, match="at most max_tokens = 8, got 9"):
        OverlongConfig(max_tokens=8, buffer_tokens=9)


# Long answers


def test_the_penalty_grows_over_the_buffer() -> None:
    config = OverlongConfig(max_tokens=100, buffer_tokens=20, penalty=0.5)
    lengths = (1, 80, 81, 90, 99, 100, 500)
    expected = (0, 0, 0.025, 0.25, 0.475, 0.5, 0.5)
    assert [length_penalty(n, config) for n in lengths] == pytest.approx(expected)


def test_what_the_policy_wrote_counts_and_what_it_read_does_not() -> None:
    sent = TrajectoryGroup(
        trajectories=[
            trajectory("a", segment(50), segment(3, 0), segment(50), segment(2, 1)),
            trajectory("b", segment(50), segment(2, 0)),
        ]
    )
    group = read_group(sent, trainer_version=0, max_lag=0)
    config = OverlongConfig(max_tokens=6, buffer_tokens=4)
    penalized = penalize_length(group, sent, config)
    assert [sample.reward for sample in penalized.samples] == [0.25, 1.0]
    # Reports and filters see the agents' rewards, without the penalty.
    assert penalized.rewards == group.rewards == (1.0, 1.0)


def test_what_a_branch_shares_with_its_parent_counts_for_its_length() -> None:
    sent = TrajectoryGroup(
        trajectories=[
            trajectory("a", segment(50), segment(6, 0)),
            trajectory("b", segment(1, 0)),
            trajectory("c", segment(2, 0)),
        ]
    )
    for child, parent, shared in ((1, "a", 54), (2, "b", 55)):
        sent.trajectories[child].parent_trajectory_id = parent
        sent.trajectories[child].parent_token_count = shared
    group = read_group(sent, trainer_version=0, max_lag=0)
    penalized = penalize_length(group, sent, OverlongConfig(max_tokens=8, buffer_tokens=4))
    # Policy tokens: six; four shared and one; five shared and two.
    assert [sample.reward for sample in penalized.samples] == [0.5, 0.75, 0.25]


def test_a_turn_that_the_budget_ended_carries_no_gradient() -> None:
    sent = TrajectoryGroup(
        trajectories=[
            # The turn at the budget has two segments, because its weights changed mid-turn.
            trajectory(
                "a", segment(2), segment(3, 0), segment(1), segment(2, 1), segment(2, 1),
                length=True,
            ),
            trajectory("b", segment(2), segment(3, 0)),
            trajectory("c", segment(2), length=True),
            trajectory("d", segment(3, 0), length=True),
        ]
    )  # fmt: skip
    sent.trajectories[-1].parent_trajectory_id, sent.trajectories[-1].parent_token_count = "a", 4
    group = read_group(sent, trainer_version=0, max_lag=0)
    masked, count = mask_truncated(group, sent)
    assert count == 7
    trained = [sample.trained.tolist() for sample in masked.samples]
    assert trained[0] == [False] * 2 + [True] * 3 + [False] * 5
    assert trained[1] == group.samples[1].trained.tolist()
    # Of a branch, its own tokens, after those it shares.
    assert trained[3] == [False] * 7
    assert len(masked.samples) == 4 and masked.rewards == group.rewards


# Whole steps


class Delivering(ScriptedServer):
    """Delivers one group for each demand, and completes one step."""

    def __init__(self, *deliveries: Any) -> None:
        super().__init__(self._serve)
        self._deliveries = list(deliveries)
        self.receipts: list[tuple[int, str]] = []
        """(step, reason of the rejection), of each receipt."""
        self.uploads.append(stage)
        self.pending = lambda _: 4

    async def _serve(self, session: Session) -> None:
        await greet(session)
        version = 0
        async for request in session.requests:
            kind = request.WhichOneof("message")
            if kind == "demand":
                while isinstance(self._deliveries[0], type(Notice())):
                    await until(lambda: len(self.tasks) == 4)
                    await session.send(notice=self._deliveries.pop(0))
                await session.send(delivery=self._deliveries.pop(0))
            elif kind == "switch_weights":
                version = request.switch_weights.weight_version
            elif kind == "receipt":
                receipt = request.receipt
                self.receipts.append((receipt.step, receipt.rejection.reason))
                if receipt.step:
                    switched = WeightReceipt(weight_version=version, active_weight_version=version)
                    await session.send(weight_receipt=switched)


def refusals(folder: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    return [(line["refused"]["task_id"], line["reason"]) for line in lines if "refused" in line]


async def test_a_group_without_spread_is_refused_counted_and_replaced(tmp_path: Path) -> None:
    server = Delivering(outcomes(0, 1, 1), outcomes(1, 0, 0), outcomes(2, 0, 1))
    dynamic = {"drop_without_spread": True}
    async with server, running(tmp_path, server.address, steps=1, groups=dynamic) as run:
        await run.ends()
        assert server.receipts == [(0, NO_SPREAD), (0, NO_SPREAD), (1, "")]
        assert refusals(tmp_path) == [("r/0", NO_SPREAD), ("r/1", NO_SPREAD)]
        (record,) = run.records
        assert record["groups_dropped"] == {NO_SPREAD: 2}
        assert (record["groups"], record["groups_kept_in_need"]) == (1, 0)
        # They are settled, so no checkpoint asks for them again.
        assert not {0, 1, 2} & set(run.tasks.indices.outstanding)


async def test_what_the_server_dropped_is_counted_and_no_fault_of_the_groups(
    tmp_path: Path,
) -> None:
    dropped = [
        Notice(reason=reason, group_id=f"g{index}", task_id=f"r/{index}")
        for index, reason in ((2, "GROUP_DROPPED"), (3, "GROUP_TOO_LARGE"))
    ]
    server = Delivering(*dropped, outcomes(0, 1, 1), outcomes(1, 0, 1))
    strict = {"drop_without_spread": True, "max_dropped_per_step": 1, "then": "stop"}
    async with server, running(tmp_path, server.address, steps=1, groups=strict) as run:
        await run.ends()
        assert server.receipts == [(0, NO_SPREAD), (1, "")]
        (record,) = run.records
        assert record["groups_dropped"] == {
            "GROUP_DROPPED": 1,
            "GROUP_TOO_LARGE": 1,
            NO_SPREAD: 1,
        }


async def test_after_too_many_the_step_is_made_of_what_comes(tmp_path: Path) -> None:
    server = Delivering(outcomes(0, 1, 1), outcomes(1, 0, 0), outcomes(2, 1, 1))
    dynamic = {"drop_without_spread": True, "max_dropped_per_step": 2}
    async with server, running(tmp_path, server.address, steps=1, groups=dynamic) as run:
        await run.ends()
        assert [step for step, _ in server.receipts] == [0, 0, 1]
        assert run.records[0]["groups_kept_in_need"] == 1


async def test_after_too_many_the_run_stops_where_that_is_asked_for(tmp_path: Path) -> None:
    server = Delivering(outcomes(0, 1, 1), outcomes(1, 1, 1))
    strict = {"drop_without_spread": True, "max_dropped_per_step": 1, "then": "stop"}
    async with server, running(tmp_path, server.address, steps=1, groups=strict) as run:
        with pytest.raises(BaseExceptionGroup) as caught:
            await run.ends()
        assert caught.group_contains(
            EverythingDropped, match="step 1 has dropped the maximum number of groups: NO_SPREAD 1"
        )


async def test_the_prompt_of_a_failed_sibling_is_asked_again_under_another_id(
    tmp_path: Path,
) -> None:
    server = Delivering(
        outcomes(0, 1, None),
        outcomes(1, 1, None, task_id="r/0~+1"),
        outcomes(2, 1, None, task_id="r/1~7"),
        outcomes(3, 0, 1, task_id="r/2"),
    )
    replacing = {"failed_siblings": "replace", "max_replacements": 1}
    async with server, running(tmp_path, server.address, steps=1, groups=replacing) as run:
        await run.ends()
        reasons = [ASKED_AGAIN, SIBLING_FAILED, ASKED_AGAIN]
        assert server.receipts == [*((0, reason) for reason in reasons), (1, "")]
        asked = [task for task in server.tasks if "~" in task.task_id]
        assert [(task.task_id, task.index) for task in asked] == [("r/0~+1", 0), ("r/1~7+1", 1)]
        assert run.records[0]["groups_dropped"] == {ASKED_AGAIN: 2, SIBLING_FAILED: 1}
        assert run.records[0]["failures"] == 3
        # The first was given up, the second is still to be answered, the third was trained.
        assert set(run.tasks.indices.outstanding) & {0, 1, 2} == {1}


async def test_a_prompt_of_which_everything_failed_is_asked_again_where_the_failed_are_replaced(
    tmp_path: Path,
) -> None:
    server = Delivering(
        outcomes(0, None, None),
        outcomes(1, None, None, task_id="r/0~+1"),
        outcomes(2, 0, 1, task_id="r/2"),
    )
    replacing = {"failed_siblings": "replace", "max_replacements": 1}
    async with server, running(tmp_path, server.address, steps=1, groups=replacing) as run:
        await run.ends()
        assert server.receipts == [(0, FAILED_ASKED_AGAIN), (0, ALL_FAILED), (1, "")]
        assert refusals(tmp_path) == [("r/0", FAILED_ASKED_AGAIN), ("r/0~+1", ALL_FAILED)]
        asked = [task for task in server.tasks if "~" in task.task_id]
        assert [(task.task_id, task.index) for task in asked] == [("r/0~+1", 0)]
        assert (run.records[0]["groups_failed"], run.records[0]["failures"]) == (2, 4)


# Resuming


class Reachable:
    async def ask(self, call: Any) -> Any:
        return await call()


class HandedOut(Reachable):
    """An exchange with one server that has these groups. It records which of them are refused."""

    held_version = on_their_way = 0
    division = Division(1)

    def __init__(self, *groups: Any) -> None:
        self._groups = list(groups)
        self.refused: list[str] = []

    def __iter__(self) -> Iterator[HandedOut]:
        return iter((self,))

    def __getitem__(self, server: int) -> HandedOut:
        return self

    @property
    def all_seen(self) -> bool:
        return not self._groups

    def server_of(self, group: Any) -> int:
        return 0

    async def next_group(self) -> Any:
        return self._groups.pop(0)

    def demand(self, group_count: int) -> None: ...

    def refuse(self, group: Any, reason: str, message: str) -> None:
        self.refused.append(reason)


class Settling:
    """A feeder of tasks that are all new."""

    def __init__(self) -> None:
        self.given_up: list[str] = []

    def arrived(self, server: int) -> None: ...
    def take(self, task_id: str) -> bool:
        return True

    def settled(self, task_id: str) -> None:
        self.given_up.append(task_id)

    def place(self, task_id: str) -> int:
        return 0

    def task(self, task_id: str) -> None:
        """No submitted task is known."""

    async def fill(self, server: int) -> None: ...


async def test_a_step_is_made_again_of_what_it_was_made_of(tmp_path: Path) -> None:
    """The previous trainer had used up its two drops, so it kept g2. It then dropped g3 for the
    next step.
    """
    config = TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"reasoning_gym": {"name": "chain_sum"}},
            "groups": {"drop_without_spread": True, "max_dropped_per_step": 2},
            "train": {"groups_per_step": 1},
        }
    )
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        ledger.begin()
        for name in ("g0", "g1"):
            ledger.refuse(RefusedEntry(name, f"r/{name}", NO_SPREAD))
        ledger.write(StepEntry(1, 1, "w", (TrainedGroup("g2", "r/2", ("2-0", "2-1")),)))
        ledger.refuse(RefusedEntry("g3", "r/3", NO_SPREAD))
        ledger.refuse(RefusedEntry("g9", "r/9", TASK_SETTLED))
        # Neither counts against the limit of drops.
        ledger.refuse(RefusedEntry("g10", "r/10", ALL_FAILED))
        ledger.refuse(RefusedEntry("g11", "r/11", FAILED_ASKED_AGAIN))
        # Two that the server dropped. They do not use up the trainer's own drops.
        ledger.refuse(RefusedEntry("g7", "r/7", "GROUP_DROPPED"))
        ledger.refuse(RefusedEntry("g8", "r/8", "GROUP_DROPPED"))
    deliveries = [outcomes(number, 1, 1).group for number in (2, 4, 5)]
    exchange, tasks, compute = HandedOut(*deliveries), Settling(), ComputeThread(1)
    with contextlib.closing(Ledger(tmp_path)) as ledger, contextlib.closing(compute):
        ledger.resume(0)
        gatherer = Gatherer(
            config,
            exchanges=exchange,  # type: ignore[arg-type]
            tasks=tasks,  # type: ignore[arg-type]
            ledger=ledger,
            compute=compute,
            stopping=asyncio.Event(),
        )
        gatherer.follow()
        first, second = StepRecord(1), StepRecord(2)
        batch = await gatherer.gather(first)
        assert batch is not None and [d.group_id for d in batch.deliveries] == ["g2"]
        assert (first.groups_dropped, exchange.refused) == ({}, [])
        ledger.write(ledger.ahead[1])
        batch = await gatherer.gather(second)
        # The limit allows one more drop, but not two.
        assert batch is not None and [d.group_id for d in batch.deliveries] == ["g5"]
        assert second.groups_dropped == {NO_SPREAD: 2, "GROUP_DROPPED": 2}
        assert (second.groups_kept_in_need, second.groups_failed) == (1, 2)
        assert (exchange.refused, tasks.given_up) == ([NO_SPREAD], ["r/4"])


@contextlib.asynccontextmanager
async def feeder(server: ScriptedServer, **rest: Any) -> AsyncGenerator[TaskFeeder]:
    async with grpc.aio.insecure_channel(server.address, options=client_options()) as channel:
        yield TaskFeeder(
            [ServerTasks(channel, 3)],
            Numbers(),
            DATA,
            DataIndices(Division(1), **rest),
            run_id="r",
        )


async def test_a_trainer_that_resumes_knows_what_refusals_meant(tmp_path: Path) -> None:
    refused = [
        RefusedEntry("a", "r/2", NO_SPREAD),
        RefusedEntry("b", "r/3", ASKED_AGAIN),
        RefusedEntry("c", "r/4", ASKED_AGAIN),
        RefusedEntry("d", "r/4~+1", SIBLING_FAILED),
        RefusedEntry("e", "r/5", TASK_SETTLED),
        RefusedEntry("f", "r/6", ALL_FAILED),
        RefusedEntry("g", "r/7", "FILTER:EASY"),
        # Trained in the meantime, according to the checkpoint.
        RefusedEntry("h", "r/1", ASKED_AGAIN),
        # Submitted after the checkpoint.
        RefusedEntry("i", "r/9", FAILED_ASKED_AGAIN),
    ]
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        ledger.begin()
        for entry in refused:
            ledger.refuse(entry)
    with contextlib.closing(Ledger(tmp_path)) as ledger:
        ledger.resume(0)
        read = ledger.refused
    async with (
        ScriptedServer() as server,
        feeder(server, next_index=8, outstanding=(2, 3, 4, 5, 6, 7)) as tasks,
    ):
        server.pending = lambda _: 3
        settle_refused(tasks, read)
        assert (tasks.indices.outstanding, tasks.indices.next_index) == ((3, 5, 8, 9), 10)
        await tasks.submit_again(0)
        expected = ["r/3~+1", "r/5", "r/8", "r/9~+1"]
        assert [task.task_id for task in server.tasks][:4] == expected
        # A server that loses the task again gets it under the same id.
        server.tasks.clear()
        await tasks.submit_again(0)
        assert [task.task_id for task in server.tasks][:4] == expected
        assert tasks.take("r/3~+1") and not tasks.take("r/3")


async def test_a_prompt_that_a_full_queue_does_not_take_is_asked_again_later() -> None:
    full = True

    class Filling(ScriptedServer):
        async def _submit(self, request: Any, context: Any) -> Any:
            if full:
                await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
            return await super()._submit(request, context)

    async with Filling() as server, feeder(server, next_index=4, outstanding=(3,)) as tasks:
        server.pending = lambda _: 3
        tasks.ask_again("r/3")
        await tasks.fill(0)
        assert server.tasks == []
        full = False
        await tasks.fill(0)
        await tasks.fill(0)
        assert [task.task_id for task in server.tasks] == ["r/3~+1"]
