"""The client across a server that is killed and restarted, with its journal or without."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import grpc
import pytest

from penstock.client import Client, Task, Trajectory, connect
from penstock.client.errors import NotAllowedNow, NotFound
from penstock.wire.channel import client_options
from tests.support.fakes import expected_tokens
from tests.support.harness import Wire, hello
from tests.support.processes import Server, server_process

PROMPT = [1, 2, 3]
SLOW = ("--step-seconds", "0.01")
FROZEN = ("--freeze-at", "20")
"""The engine samples this many tokens for a turn and then stops, so the turn stays in flight."""
THAWED = ("--freeze-at", "-1")
MEMORY = ("--set", 'journal.durability="none"')


def uninterrupted(*lengths: int, prompt: list[int] = PROMPT, say: list[int] | None = None):
    """The tokens of each turn, as if there had been no restart."""
    context, turns = list(prompt), []
    for index, length in enumerate(lengths):
        if index:
            context += say or [7, 8]
        tokens, _ = expected_tokens(context, [0] * length)
        turns.append(tokens)
        context += tokens
    return turns


async def in_mid_turn(client: Client, trajectory_id: str, index: int) -> None:
    """Return when the turn has sampled its first token."""
    while True:
        with contextlib.suppress(NotFound):
            record = await client.get_trajectory(trajectory_id)
            if record.policy_segments(index):
                break
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("final_only", [True, False])
async def test_a_turn_goes_on_at_the_exact_token_when_the_server_was_killed(
    tmp_path: Path, final_only: bool
) -> None:
    async with (
        server_process(tmp_path, *SLOW, *FROZEN) as server,
        connect(server.address) as client,
    ):
        trajectory = client.trajectory("t")
        first, second = uninterrupted(20, 60)
        turn = await trajectory.turn(PROMPT, max_tokens=20, ignore_eos=True)
        assert turn.token_ids.tolist() == first
        text: list[int] = []
        restarting = None
        stream = trajectory.stream([7, 8], max_tokens=60, final_only=final_only, flush_seconds=0.05)
        if final_only:
            restarting = asyncio.create_task(_restart_in_mid_turn(server, client))
        async for segment in stream:
            del text[segment.position :]
            text += segment.token_ids.tolist()
            if restarting is None and len(text) > 15:
                restarting = asyncio.create_task(server.restart(*THAWED))
        assert restarting is not None
        await restarting
        # Tokens that were streamed and lost have been replaced: the stream matches the record.
        assert text == trajectory.last_turn.token_ids.tolist() == second
        record = await trajectory.get()
        assert [s.token_ids.tolist() for s in record.policy_segments(1)] == [second]
        assert (await trajectory.complete(1.0)).retried is False


async def _restart_in_mid_turn(server: Server, client: Client) -> None:
    await in_mid_turn(client, "t", 1)
    await server.restart(*THAWED)


async def test_a_turn_that_was_finished_is_there_after_a_restart(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, connect(server.address) as client:
        first, second, third = uninterrupted(10, 10, 10)
        trajectory = client.trajectory("t")
        await trajectory.turn(PROMPT, max_tokens=10, ignore_eos=True)
        await server.restart()
        assert (await trajectory.turn([7, 8])).token_ids.tolist() == second
        await server.restart()
        assert (await trajectory.turn([7, 8])).token_ids.tolist() == third
        record = await trajectory.get()
        assert [record.policy_segments(i)[0].token_ids.tolist() for i in range(3)] == [
            first,
            second,
            third,
        ]


async def test_a_close_is_repeated_until_it_is_answered_and_counts_once(tmp_path: Path) -> None:
    async with server_process(tmp_path) as server, connect(server.address) as client:
        trajectory = client.trajectory("t", group_id="g", group_size=1)
        await trajectory.turn(PROMPT, max_tokens=4, ignore_eos=True)
        await server.kill()
        closing = asyncio.create_task(trajectory.complete(1.0))
        await asyncio.sleep(0.3)
        await server.start()
        await asyncio.wait_for(closing, 20)
        # Close again, as if the first answer had been lost.
        await server.restart()
        await trajectory.close(trajectory.outcome)
        info = await client.server_info()
        assert (info.load.buffered_group_count, info.load.open_trajectory_count) == (1, 0)


async def test_a_server_without_a_journal_comes_back_empty_and_the_error_says_so(
    tmp_path: Path,
) -> None:
    async with (
        server_process(tmp_path, *SLOW, *FROZEN, *MEMORY) as server,
        connect(server.address) as client,
    ):
        begun = client.trajectory("begun")
        await begun.turn(PROMPT, max_tokens=4, ignore_eos=True)
        taking = asyncio.create_task(begun.turn([7], max_tokens=50, ignore_eos=True))
        await in_mid_turn(client, "begun", 1)
        await server.restart()
        with pytest.raises(NotFound) as caught:
            await asyncio.wait_for(taking, 20)
        assert caught.value.reason == "TRAJECTORY_UNKNOWN"
        # The caller received nothing of a first turn yet, so the client starts it again.
        first = client.trajectory("first")
        taking = asyncio.create_task(first.turn(PROMPT, max_tokens=50, ignore_eos=True))
        await in_mid_turn(client, "first", 0)
        await server.restart(*THAWED)
        assert (await taking).token_ids.tolist() == uninterrupted(50)[0]


async def test_a_first_turn_on_a_lease_that_is_gone_is_not_opened_anew(tmp_path: Path) -> None:
    async with (
        server_process(tmp_path, *SLOW, *FROZEN, *MEMORY) as server,
        connect(server.address) as client,
    ):
        await client.submit_tasks([Task("task", prompt="hello")])
        leases = client.lease_tasks()
        attempt = await anext(leases)
        # Stop renewing, because a renewal would discover the lost lease before the turn does.
        await leases.aclose()
        taking = asyncio.create_task(
            attempt.trajectory.turn("mine", max_tokens=90, ignore_eos=True)
        )
        await in_mid_turn(client, attempt.trajectory.trajectory_id, 0)
        await server.restart()
        with pytest.raises(NotAllowedNow) as caught:
            await asyncio.wait_for(taking, 20)
        assert caught.value.reason == "LEASE_EXPIRED"
        assert (await client.server_info()).load.open_trajectory_count == 0


async def test_a_worker_loses_and_doubles_no_attempt_though_the_server_is_killed(
    tmp_path: Path,
) -> None:
    groups, size = 8, 2
    begun: list[str] = []

    async def agent(task: Task, trajectory: Trajectory) -> float:
        begun.append(trajectory.trajectory_id)
        await trajectory.turn(max_tokens=25, ignore_eos=True)
        await trajectory.turn("and then?", max_tokens=25, ignore_eos=True)
        return 1.0

    async with server_process(tmp_path, *SLOW) as server, connect(server.address) as client:
        working = asyncio.create_task(client.work(agent, concurrency=6))
        names = [f"task-{index}" for index in range(groups)]
        await client.submit_tasks([Task(name, "hello", group_size=size) for name in names])
        for _ in range(2):
            await asyncio.sleep(0.4)
            await server.restart()
        options = client_options(own_connection=True)
        async with grpc.aio.insecure_channel(server.address, options=options) as channel:
            trainer = await hello(Wire(channel), 1, max_lag=1_000, groups_per_step=1_000)
            trainer.send(demand={"group_count": groups + 1})
            found = [(await trainer.receive("delivery", 30)).group for _ in range(groups)]
            await trainer.nothing()
        working.cancel()
        await asyncio.wait([working])
    assert sorted(group.task_id for group in found) == sorted(names)
    for group in found:
        assert sorted(t.sample_index for t in group.trajectories) == list(range(size))
        assert all(t.outcome.reward == 1.0 and t.turn_count == 2 for t in group.trajectories)
    # Attempts that an agent had begun continued across the restarts and were delivered. Only a
    # lease that had not reached its agent when the server was killed is granted again, under
    # another id.
    assert sorted(begun) == sorted(t.trajectory_id for group in found for t in group.trajectories)
