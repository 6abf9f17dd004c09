"""Turns over the wire: tokens, versions, abort, resume, budgets, lost callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import grpc
import pytest

from penstock.server.engine.protocol import Delta, EngineRequest
from penstock.server.turns.runner import Subscription
from penstock.v1 import conversation_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.failure import read_failure
from tests.support.fakes import EOS, START_OF_TURN, expected_tokens
from tests.support.harness import (
    AbortRequest,
    ChatMessage,
    ContinueRequest,
    Conversation,
    GenerateRequest,
    GetTrajectoryRequest,
    Harness,
    StreamOptions,
    collect,
    sampling,
    sequence,
    until,
)

STOP = trajectory_pb2.FINISH_REASON_STOP
LENGTH = trajectory_pb2.FINISH_REASON_LENGTH
ABORTED = trajectory_pb2.FINISH_REASON_ABORTED


async def stored(harness: Harness, trajectory_id: str) -> trajectory_pb2.Trajectory:
    answer = await harness.wire.GetTrajectory(GetTrajectoryRequest(trajectory_id=trajectory_id))
    return answer.trajectory


def all_tokens(trajectory: trajectory_pb2.Trajectory) -> list[int]:
    return [int(t) for segment in trajectory.segments for t in codec.token_ids(segment)]


async def test_a_turn_streams_exactly_what_the_engine_sampled(harness: Harness) -> None:
    turn = await harness.generate("t", [5, 6, 7], sampling_params=sampling(40))
    tokens, logprobs = expected_tokens([5, 6, 7], [0] * 40)
    assert turn.tokens == tokens
    assert turn.logprobs == pytest.approx(logprobs)
    assert turn.versions == [0] * 40
    assert turn.started.turn_index == 0
    assert turn.started.context_token_count == 3
    assert turn.finished.finish_reason == LENGTH
    assert turn.finished.policy_token_count == 40
    trajectory = await stored(harness, "t")
    assert all_tokens(trajectory) == [5, 6, 7, *tokens]
    assert [segment.author for segment in trajectory.segments] == [
        trajectory_pb2.AUTHOR_CONTEXT,
        trajectory_pb2.AUTHOR_POLICY,
    ]
    assert trajectory.segments[1].temperature == 1.0


async def test_a_resume_at_another_temperature_begins_a_segment_of_its_own(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    await slow.sampled("t")
    await abort(slow, "t")
    first = await call
    assert {segment.temperature for segment in first.segments} == {1.0}
    both = sampling(len(first.tokens) + 20, temperature=0.5)
    second = await slow.resume("t", sampling_params=both)
    assert {segment.temperature for segment in second.segments} == {0.5}
    _, before, after = (await stored(slow, "t")).segments
    assert (before.temperature, after.temperature) == (1.0, 0.5)
    assert [int(t) for t in codec.token_ids(before)] == first.tokens
    assert [int(t) for t in codec.token_ids(after)] == second.tokens


async def test_the_lowest_temperature_is_taken_as_it_is_written(harness: Harness) -> None:
    taken: list[float] = []
    generate = harness.engine.generate

    async def recording(request: EngineRequest) -> AsyncGenerator[Delta]:
        taken.append(request.sampling.temperature)
        return await generate(request)

    harness.engine.generate = recording  # type: ignore[method-assign]
    turn = await harness.generate("t", sampling_params=sampling(temperature=0.01))
    assert taken == [0.01]  # Not the next lower float32, which an engine would refuse.
    assert turn.segments[0].temperature == pytest.approx(0.01)


async def test_final_only_sends_one_segment(harness: Harness) -> None:
    turn = await harness.generate("t", stream_options=StreamOptions(final_only=True))
    assert len(turn.segments) == 1
    assert turn.tokens == expected_tokens([1, 2, 3], [0] * 16)[0]


async def test_a_turn_ends_at_the_end_of_sequence_token(harness: Harness) -> None:
    tokens = expected_tokens([1, 2, 3], [0] * 400)[0]
    end = tokens.index(EOS)
    turn = await harness.generate("t", sampling_params=sampling(400, ignore_eos=False))
    assert turn.tokens == tokens[: end + 1]
    assert turn.finished.finish_reason == STOP


async def test_text_in_text_out(harness: Harness) -> None:
    turn = await harness.generate("t", text="hello", sampling_params=sampling(10))
    tokens = expected_tokens(list(b"hello"), [0] * 10)[0]
    assert turn.tokens == tokens
    assert turn.finished.text == bytes(t for t in tokens if t < 256).decode()


async def test_a_conversation_is_rendered_once_and_then_only_extended(harness: Harness) -> None:
    user = ChatMessage(role=conversation_pb2.ROLE_USER, content="hi")
    first = await harness.generate(
        "t", conversation=Conversation(messages=[user]), sampling_params=sampling(5)
    )
    opening = [START_OF_TURN, *b"user\nhi", EOS, START_OF_TURN, *b"assistant\n"]
    assert first.tokens == expected_tokens(opening, [0] * 5)[0]
    assert first.finished.message.role == conversation_pb2.ROLE_ASSISTANT
    again = ChatMessage(role=conversation_pb2.ROLE_USER, content="more")
    second = await harness.resume("t", conversation=Conversation(messages=[again]))
    # The policy did not end its turn, so the template's end of turn follows its tokens.
    extended = [
        *opening,
        *first.tokens,
        EOS,
        START_OF_TURN,
        *b"user\nmore",
        EOS,
        START_OF_TURN,
        *b"assistant\n",
    ]
    assert second.tokens == expected_tokens(extended, [0] * 5)[0]
    trajectory = await stored(harness, "t")
    assert all_tokens(trajectory) == [*extended, *second.tokens]
    assert trajectory.turn_count == 2
    assert [segment.turn_index for segment in trajectory.segments] == [0, 0, 1, 1]


async def abort(harness: Harness, trajectory_id: str) -> list[tuple[str, int]]:
    request = AbortRequest(reason="test")
    request.trajectories.trajectory_ids.append(trajectory_id)
    answer = await harness.wire.Abort(request)
    return [(turn.trajectory_id, turn.policy_token_count) for turn in answer.aborted_turns]


async def test_abort_and_continue_many_times_gives_the_uninterrupted_tokens(slow: Harness) -> None:
    total = 120
    turns = []
    calls = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(total)))
    aborts = 0
    while True:
        sampled = sum(len(turn.tokens) for turn in turns)
        await slow.sampled("t", least=min(total, sampled + 6))
        found = await abort(slow, "t")
        aborts += len(found)
        turn = await calls
        turns.append(turn)
        if turn.finished.finish_reason != ABORTED:
            break
        assert found[0][1] == sum(len(t.tokens) for t in turns)
        calls = asyncio.ensure_future(slow.resume("t"))
    assert aborts >= 3
    assert [token for t in turns for token in t.tokens] == expected_tokens([1, 2, 3], [0] * total)[
        0
    ]
    assert turns[-1].finished.finish_reason == LENGTH
    assert turns[-1].finished.policy_token_count == total
    assert {t.finished.policy_token_count for t in turns if t.finished} <= set(range(total + 1))
    assert (await stored(slow, "t")).turn_count == 1


async def test_the_budget_is_cumulative_and_a_spent_one_asks_the_engine_for_nothing(
    slow: Harness,
) -> None:
    calls = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    await abort(slow, "t")
    first = await calls
    assert 0 < len(first.tokens) < 60
    # A budget smaller than the tokens already written is spent.
    before = len(slow.engine.salts)
    turn = await slow.resume("t", sampling_params=sampling(len(first.tokens)))
    assert turn.tokens == []
    assert turn.finished.finish_reason == LENGTH
    assert len(slow.engine.salts) == before


async def test_a_lost_caller_aborts_the_turn_and_the_trajectory_can_be_continued(
    slow: Harness,
) -> None:
    call = slow.wire.Generate(
        GenerateRequest(
            trajectory_id="t", tokens=sequence([1, 2, 3]), sampling_params=sampling(200)
        )
    )
    await call.read()
    await slow.sampled("t", least=5)
    call.cancel()
    async with asyncio.timeout(20):
        await slow.serving.turns.wait_idle()
    kept = all_tokens(await stored(slow, "t"))[3:]
    assert 0 < len(kept) < 200
    rest = await slow.resume("t", sampling_params=sampling(len(kept) + 20))
    assert kept + rest.tokens == expected_tokens([1, 2, 3], [0] * (len(kept) + 20))[0]


async def test_a_detached_turn_goes_on_without_its_caller(slow: Harness) -> None:
    call = slow.wire.Generate(
        GenerateRequest(
            trajectory_id="t",
            tokens=sequence([1, 2, 3]),
            sampling_params=sampling(60),
            stream_options=StreamOptions(detach=True),
        )
    )
    await call.read()
    call.cancel()
    (turn,) = slow.serving.turns.in_flight
    async with asyncio.timeout(20):
        await turn.attempt.ended.wait()
    trajectory = await stored(slow, "t")
    assert all_tokens(trajectory)[3:] == expected_tokens([1, 2, 3], [0] * 60)[0]
    assert trajectory.finish_reason == LENGTH


async def test_a_context_that_is_full_finishes_with_length(harness: Harness) -> None:
    limit = harness.engine.description.max_context_length
    turn = await harness.generate("t", [1] * (limit - 10), sampling_params=sampling(1000))
    assert len(turn.tokens) == 10
    assert turn.finished.finish_reason == LENGTH
    before = all_tokens(await stored(harness, "t"))
    more = await harness.resume("t", tokens=sequence([1, 2]))
    assert more.tokens == []
    assert more.finished.finish_reason == LENGTH
    assert all_tokens(await stored(harness, "t")) == before


async def test_a_full_turn_that_was_aborted_stays_full_whatever_it_is_resumed_with(
    harness: Harness,
) -> None:
    limit = harness.engine.description.max_context_length
    await harness.generate("t", [1] * (limit - 10), sampling_params=sampling(4))
    before = all_tokens(await stored(harness, "t"))
    harness.serving.switch.await_trainer(True)
    call = asyncio.ensure_future(harness.resume("t", tokens=sequence([2] * 20)))
    record = harness.serving.store.find("t")
    assert record is not None
    await until(lambda: record.turn is not None and record.turn.index == 1)
    await abort(harness, "t")
    assert (await call).finished.finish_reason == ABORTED
    harness.serving.switch.await_trainer(False)
    # There would be room for some tokens, but the context before them was never added.
    again = await harness.resume("t", sampling_params=sampling(4))
    assert (again.tokens, again.finished.finish_reason) == ([], LENGTH)
    trajectory = await stored(harness, "t")
    assert (all_tokens(trajectory), trajectory.turn_count) == (before, 1)


async def test_a_stop_string_that_spans_an_abort_is_found(slow: Harness) -> None:
    tokens = expected_tokens([1, 2, 3], [0] * 100)[0]
    calls = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(100)))
    await slow.sampled("t", 3)
    await abort(slow, "t")
    cut = len((await calls).tokens)
    assert 2 < cut < 90
    spanning = bytes(tokens[cut - 2 : cut + 2]).decode()
    rest = await slow.resume("t", sampling_params=sampling(100, stop=[spanning]))
    assert rest.tokens == tokens[cut : cut + 2]
    assert rest.finished.finish_reason == STOP


async def failure(awaitable: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable  # type: ignore[misc]
    found = read_failure(caught.value)
    return found.code, found.reason


async def test_refusals_of_generate_and_continue_say_why_and_change_nothing(slow: Harness) -> None:
    invalid, precondition = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
    assert await failure(slow.generate("")) == (invalid, "FIELD_INVALID")
    assert await failure(slow.generate("t", [])) == (invalid, "FIELD_INVALID")
    assert await failure(slow.generate("t", [1] * 512)) == (invalid, "PROMPT_TOO_LONG")
    assert await failure(slow.generate("t", [300])) == (invalid, "TOKEN_OUT_OF_RANGE")
    assert await failure(slow.generate("t", [-1])) == (invalid, "TOKEN_OUT_OF_RANGE")
    assert await failure(slow.generate("t", required_weight_version=7)) == (
        precondition,
        "WEIGHT_VERSION_NOT_ACTIVE",
    )
    for bad in (
        sampling(temperature=float("nan")),
        sampling(temperature=-1.0),
        sampling(temperature=0.001),
        sampling(top_p=0.0),
        sampling(top_p=float("inf")),
        sampling(top_k=-1),
        sampling(-5),
        sampling(stop=[""]),
        sampling(stop_token_ids=[-1]),
    ):
        code, _ = await failure(slow.generate("t", sampling_params=bad))
        assert code == invalid, bad
    assert await failure(slow.resume("t")) == (grpc.StatusCode.NOT_FOUND, "TRAJECTORY_UNKNOWN")
    # None of the refused calls took the id.
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(40)))
    await slow.sampled("t")
    assert await failure(slow.generate("t")) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "TRAJECTORY_EXISTS",
    )
    assert await failure(slow.resume("t", tokens=sequence([1]))) == (precondition, "TURN_IN_FLIGHT")
    assert await failure(slow.complete("t")) == (precondition, "TURN_IN_FLIGHT")
    assert (await call).tokens == expected_tokens([1, 2, 3], [0] * 40)[0]
    assert await failure(slow.resume("t")) == (precondition, "NOTHING_TO_RESUME")
    assert await failure(slow.complete("t", float("nan"))) == (invalid, "FIELD_INVALID")
    await slow.complete("t", 1.0)
    await slow.complete("t", 1.0)
    assert await failure(slow.complete("t", 2.0)) == (precondition, "OUTCOME_DIFFERS")
    assert await failure(slow.resume("t", tokens=sequence([1]))) == (
        precondition,
        "TRAJECTORY_CLOSED",
    )


async def test_abort_selects_by_trajectory_by_group_or_everything(slow: Harness) -> None:
    assert await abort(slow, "nobody") == []
    calls = [
        asyncio.ensure_future(
            slow.generate(
                f"t{i}",
                group_id=f"g{i % 2}",
                group_size=2,
                sample_index=i // 2,
                sampling_params=sampling(400),
            )
        )
        for i in range(4)
    ]
    for i in range(4):
        await slow.sampled(f"t{i}")
    request = AbortRequest()
    request.groups.group_ids.append("g1")
    answer = await slow.wire.Abort(request)
    assert sorted(turn.trajectory_id for turn in answer.aborted_turns) == ["t1", "t3"]
    request = AbortRequest()
    request.all.SetInParent()
    answer = await slow.wire.Abort(request)
    assert sorted(turn.trajectory_id for turn in answer.aborted_turns) == ["t0", "t2"]
    for call in calls:
        assert (await call).finished.finish_reason == ABORTED


async def test_a_lost_engine_ends_turns_with_a_reason(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(400)))
    await slow.sampled("t")
    slow.engine.die()
    assert await failure(call) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert all_tokens(await stored(slow, "t"))[3:]


async def test_a_resume_stream_begins_where_the_one_before_ended(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(50)))
    await slow.sampled("t")
    await abort(slow, "t")
    first = await call
    second = await collect(slow.wire.Continue(ContinueRequest(trajectory_id="t")))
    assert second.started.turn_index == 0
    assert first.tokens + second.tokens == expected_tokens([1, 2, 3], [0] * 50)[0]
    assert second.finished.policy_token_count == 50


async def test_an_abort_names_a_turn_that_its_caller_went_on_with_at_once(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(200)))
    await slow.sampled("t")
    (turn,) = slow.serving.turns.in_flight

    async def go_on(ended: asyncio.Event) -> None:
        await ended.wait()
        slow.serving.turns.start(turn)

    goes_on = asyncio.ensure_future(go_on(turn.attempt.ended))
    await asyncio.sleep(0)
    named = await abort(slow, "t")
    await goes_on
    assert turn.in_flight
    first = await call
    assert first.finished.finish_reason == ABORTED
    assert named == [("t", len(first.tokens))] == [("t", first.finished.policy_token_count)]
    await abort(slow, "t")


async def test_a_slow_reader_gets_its_own_attempt_and_nothing_of_the_next(slow: Harness) -> None:
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(40)))
    await slow.sampled("t")
    (turn,) = slow.serving.turns.in_flight
    late = Subscription(turn, flush_seconds=0, final_only=False)
    missed = turn.policy_token_count
    await abort(slow, "t")
    first = await call
    assert not late.overtaken
    second = await slow.resume("t")
    third = await slow.resume("t", tokens=sequence([7, 8]))
    assert late.overtaken  # Its loss would therefore end nothing.
    read = [
        int(t) for segment in [s async for s in late.segments()] for t in codec.token_ids(segment)
    ]
    assert read == first.tokens[missed:]
    assert late.attempt.finish_reason == ABORTED
    assert all_tokens(await stored(slow, "t")) == [
        *[1, 2, 3, *first.tokens, *second.tokens],
        *[7, 8, *third.tokens],
    ]
