"""Branches of branches: their depth, what is left of a refused one, and what a turn reads of a context."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from penstock.server.rollouts.start import MAX_DEPTH
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord
from penstock.server.turns.turn import TurnSampling
from penstock.wire.failure import read_failure
from tests.support.harness import GetTrajectoryRequest, Harness, sampling, serve


def record(
    name: str, tokens: list[int], parent: TrajectoryRecord | None = None
) -> TrajectoryRecord:
    made = TrajectoryRecord(name, PromptKind.TOKENS, TurnSampling())
    if parent is not None:
        made.branch_from(parent, parent.token_count)
    for one in tokens:
        made.append_context(np.array([one], np.int32), 0)
    return made


def nested(depth: int) -> list[TrajectoryRecord]:
    records = [record("0", [0, 1])]
    for level in range(1, depth):
        records.append(record(str(level), [2 * level, 2 * level + 1], records[-1]))
    return records


@pytest.mark.parametrize("depth", [1, 2, 7, 5_000])
def test_any_range_of_a_nested_context_is_read(depth: int) -> None:
    last = nested(depth)[-1]
    everything = list(range(2 * depth))
    assert last.token_array().tolist() == everything
    for start, stop in ((0, 1), (1, 4), (2 * depth - 3, 2 * depth), (-1, None), (3, 3), (1, 9**9)):
        wanted = everything[max(start, 0) : stop]
        assert last.token_array(start, stop).tolist() == wanted
    assert last.depth == depth - 1


def test_a_branch_in_the_middle_reads_only_its_part_of_its_parent() -> None:
    root = record("root", list(range(10)))
    child = TrajectoryRecord("child", PromptKind.TOKENS, TurnSampling())
    prompt = np.array([0, 1, 2, 3, 99, 98], np.int32)
    shared = root.shared_with(prompt)
    child.branch_from(root, shared)
    child.append_context(prompt[shared:], 0)
    assert shared == 4 and child.token_array().tolist() == prompt.tolist()
    grandchild = TrajectoryRecord("grandchild", PromptKind.TOKENS, TurnSampling())
    grandchild.branch_from(child, child.shared_with(np.array([0, 1, 7], np.int32)))
    assert grandchild.token_array().tolist() == [0, 1]


def test_reading_the_end_touches_no_ancestor() -> None:
    """A stream reads each token once, not the whole context with each event."""
    records = nested(50)
    last = records[-1]
    last.parent = None
    assert last.token_array(last.token_count - 2).tolist() == [98, 99]


def test_branches_come_before_their_own_branches_at_any_depth() -> None:
    root = record("root", [1])
    a, b = record("a", [2], root), record("b", [3], root)
    c = record("c", [4], a)
    assert [member.trajectory_id for member in root.with_branches()] == ["root", "a", "c", "b"]
    deep = nested(5_000)
    assert deep[0].with_branches() == deep
    assert [*b.with_branches(), *c.with_branches()] == [b, c]


async def branch(harness: Harness, parent: int, name: str, prompt: list[int]) -> list[int]:
    turn = await harness.generate(
        name, prompt, parent_trajectory_id=f"t-{parent}", sampling_params=sampling(1)
    )
    return [*prompt, *turn.tokens]


async def test_a_branch_that_is_too_deep_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path, max_context=2 * MAX_DEPTH + 100) as harness:
        context = [1, 2, 3]
        turn = await harness.generate("t-0", context, sampling_params=sampling(1))
        context += turn.tokens
        for level in range(1, MAX_DEPTH + 1):
            context = await branch(harness, level - 1, f"t-{level}", context)
        # The deepest one is whole, and goes on.
        found = await harness.wire.GetTrajectory(
            GetTrajectoryRequest(trajectory_id=f"t-{MAX_DEPTH}")
        )
        assert found.trajectory.parent_token_count == len(context) - 1
        for _ in range(2):
            try:
                await branch(harness, MAX_DEPTH, "too-deep", context)
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error)
                assert (failure.code, failure.reason) == (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "FIELD_INVALID",
                )
                assert failure.metadata["field"] == "parent_trajectory_id"
                assert f"{MAX_DEPTH} deep" in failure.message
            else:
                raise AssertionError("it was opened")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await harness.resume("too-deep")
        assert read_failure(refused.value).reason == "TRAJECTORY_UNKNOWN"
        deepest = harness.serving.store.get(f"t-{MAX_DEPTH}")
        assert not deepest.children
        # It can be closed as a whole.
        await harness.complete("t-0")
        assert harness.serving.store.open_count == 0
