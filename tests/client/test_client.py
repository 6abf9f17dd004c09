"""The client against a scripted server that misbehaves on demand."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc
import numpy as np
import pytest

from penstock.client import (
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    Message,
    NotFound,
    Overloaded,
    Patience,
    PenstockError,
    SamplingParams,
    ServerUnavailable,
    Task,
    Tool,
    connect,
)
from penstock.client.tasks import read_task, write_task
from penstock.v1 import rollout_service_pb2, task_service_pb2, trajectory_pb2
from penstock.wire import codec
from tests.support.scripted_server import (
    UNAVAILABLE,
    VERSION,
    Record,
    Script,
    ScriptedServer,
    assert_turn,
    expected_tokens,
    status,
)

TOKENS = np.array([1, 2, 3], np.int32)
FINISHED = rollout_service_pb2.TurnFinished(
    finish_reason=trajectory_pb2.FINISH_REASON_STOP, policy_token_count=11
)


@pytest.fixture
async def server():
    async with ScriptedServer(Script()) as scripted:
        yield scripted


@pytest.fixture
async def penstock(server):
    async with connect(server.address) as client:
        yield client


async def test_a_turn_carries_tokens_logprobs_versions_and_text(penstock):
    trajectory = penstock.trajectory()
    turn = await trajectory.turn("hello", max_tokens=10)
    assert_turn(turn, 0)
    assert turn.token_ids.dtype == np.int32 and turn.logprobs.dtype == np.float32
    assert turn.text == " ".join(map(str, expected_tokens(0)))
    assert turn.finish_reason is FinishReason.STOP
    assert turn.weight_versions == (VERSION,)
    assert len(turn.segments) == 1
    assert (turn.context_token_count, turn.cached_token_count) == (5, 4)


async def test_later_turns_continue_and_keep_sampling(penstock, server):
    trajectory = penstock.trajectory()
    await trajectory.turn("hello", max_tokens=10, temperature=0.5)
    assert_turn(await trajectory.turn("more"), 1)
    assert_turn(await trajectory.turn(TOKENS, temperature=0), 2)
    requests = [r for r in server.requests if r.DESCRIPTOR.name.startswith(("Gen", "Cont"))]
    assert [r.DESCRIPTOR.name for r in requests] == ["GenerateRequest"] + ["ContinueRequest"] * 2
    assert requests[0].sampling_params.temperature == 0.5
    assert not requests[1].HasField("sampling_params")
    # The wire replaces the parameters as a whole, so the client repeats those it sent before.
    assert requests[2].sampling_params == rollout_service_pb2.SamplingParams(
        temperature=0, max_tokens=10
    )
    assert list(requests[2].tokens.token_ids) == [1, 2, 3]
    await trajectory.complete(1.0)
    assert server.outcomes[-1][1].reward == 1.0


async def test_stream_yields_tokens_as_they_come(penstock):
    trajectory = penstock.trajectory()
    seen = [s.token_ids.tolist() async for s in trajectory.stream("hello")]
    assert seen == [[token] for token in expected_tokens(0)]
    assert_turn(trajectory.last_turn, 0)


async def test_a_stream_lost_in_mid_turn_goes_on_at_the_exact_token(penstock, server):
    server.script.break_after += [3, 2]
    server.script.unsent = 2
    turn = await penstock.trajectory().turn("hello")
    assert_turn(turn, 0)
    assert server.calls.count("Continue") == 2 and server.calls.count("Generate") == 1


@pytest.mark.parametrize("then", ["ends", "is aborted", "is lost again"])
async def test_a_server_that_goes_on_from_fewer_tokens_than_it_told_is_asked_anew(
    penstock, server, then
):
    server.script.break_after += [4, 6] if then == "is lost again" else [4]
    server.script.abort_after += [99, 1] if then == "is aborted" else []
    server.script.forgets += [2]
    trajectory = penstock.trajectory()
    text: list[int] = []
    async for segment in trajectory.stream("hello"):
        del text[segment.position :]
        text += segment.token_ids.tolist()
    assert_turn(trajectory.last_turn, 0)
    # Segments that were yielded at a wrong position are replaced.
    assert text == expected_tokens(0)
    assert server.calls.count("Generate") == 1


async def test_tokens_that_are_missing_for_good_are_an_error(penstock, server, monkeypatch):
    monkeypatch.setattr(Record, "finished", lambda self: FINISHED)
    with pytest.raises(PenstockError, match="10 of 11 tokens of a turn arrived"):
        await penstock.trajectory().turn("hello")
    assert server.calls.count("GetTrajectory") == 1


async def test_a_first_turn_that_never_arrived_is_sent_again(penstock, server):
    server.script.refuse["Generate"] = deque([UNAVAILABLE])
    assert_turn(await penstock.trajectory().turn("hello"), 0)
    assert server.calls.count("Generate") == 2


async def test_an_observation_that_never_arrived_is_sent_again(penstock, server):
    trajectory = penstock.trajectory()
    await trajectory.turn("hello")
    server.script.refuse["Continue"] = deque([UNAVAILABLE])
    assert_turn(await trajectory.turn("more"), 1)
    assert server.records[trajectory.trajectory_id].turns[1] == expected_tokens(1)


@pytest.mark.parametrize("prompt", ["hello", TOKENS])
async def test_a_turn_that_ended_unheard_is_complete(penstock, server, prompt):
    server.script.break_after += [3]
    server.script.unsent = 7
    turn = await penstock.trajectory().turn(prompt)
    assert_turn(turn, 0)
    assert turn.finish_reason is FinishReason.STOP
    assert turn.text == " ".join(map(str, expected_tokens(0)))
    assert (turn.context_token_count, turn.cached_token_count) == (5, 4)
    assert server.calls.count("Continue") == 0


async def test_a_turn_that_began_after_its_abort_is_aborted_again(penstock, server):
    server.script.break_after += [3]
    server.script.in_flight_answers = 1
    assert_turn(await penstock.trajectory().turn("hello"), 0)
    assert server.calls.count("Abort") == 2


async def test_a_server_that_forgot_the_trajectory_is_not_waited_for(penstock, server):
    server.script.break_after += [3]
    server.script.refuse["GetTrajectory"] = deque(
        [status(grpc.StatusCode.NOT_FOUND, "TRAJECTORY_UNKNOWN")]
    )
    with pytest.raises(NotFound):
        await penstock.trajectory().turn("hello")


async def test_a_server_that_stays_away_fails_the_turn_within_the_bound():
    patience = Patience(reconnect_seconds=0.5)
    async with connect("127.0.0.1:1", patience=patience) as client:
        with pytest.raises(ServerUnavailable):
            await asyncio.wait_for(client.trajectory().turn("hello"), 20)


async def test_an_aborted_turn_is_resumed_whole(penstock, server):
    server.script.abort_after += [4]
    trajectory = penstock.trajectory()
    turn = await trajectory.turn("hello")
    assert turn.aborted and len(turn.token_ids) == 4
    assert_turn(await trajectory.resume(), 0)
    assert len(trajectory.turns) == 1
    with pytest.raises(RuntimeError):
        await trajectory.resume()


async def test_aborted_turns_resume_by_themselves_where_asked_to(penstock, server):
    server.script.abort_after += [4, 0, 3]
    assert_turn(await penstock.trajectory(resume_aborted=True).turn("hello"), 0)
    assert server.calls.count("Continue") == 3


async def test_a_turn_that_is_only_ever_aborted_is_given_to_the_caller(penstock, server):
    server.script.abort_after += [0] * 50
    turn = await penstock.trajectory(resume_aborted=True).turn("hello")
    assert turn.aborted and not len(turn.token_ids)


async def test_a_deadline_leaves_the_turn_to_be_resumed(penstock, server):
    server.script.hold_turns = asyncio.Event()
    trajectory = penstock.trajectory()
    with pytest.raises(DeadlineExceeded):
        await trajectory.turn("hello", timeout=0.3)
    server.script.hold_turns.set()
    assert_turn(await trajectory.resume(), 0)


async def test_a_stream_left_early_is_resumed_without_loss(penstock, server):
    server.script.hold_turns = asyncio.Event()
    trajectory = penstock.trajectory()
    stream = trajectory.stream("hello")
    await anext(stream)
    await stream.aclose()
    with pytest.raises(RuntimeError, match="not finished"):
        await trajectory.turn("more")
    server.script.hold_turns.set()
    assert_turn(await trajectory.resume(), 0)


async def test_a_full_server_is_asked_again_when_it_says_so(penstock, server):
    full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.05)
    server.script.refuse["SubmitTasks"] = deque([full, full])
    server.script.refuse["Generate"] = deque([full])
    submission = await penstock.submit_tasks([Task("a"), Task("b")])
    assert submission.accepted_count == 2 and server.calls.count("SubmitTasks") == 3
    assert_turn(await penstock.trajectory().turn("hello"), 0)


async def test_a_call_that_grpc_itself_has_no_room_for_is_made_again(penstock, server):
    full = grpc.Status()
    full.code, full.details = grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"
    full.trailing_metadata = ()
    for method in ("SubmitTasks", "Generate", "CompleteTrajectory"):
        server.script.refuse[method] = deque([full, full])
    assert (await penstock.submit_tasks([Task("a")])).accepted_count == 1
    trajectory = penstock.trajectory()
    assert_turn(await trajectory.turn("hello"), 0)
    await trajectory.complete(1.0)
    assert server.calls.count("CompleteTrajectory") == 3


async def test_a_message_that_grpc_itself_finds_too_large_is_an_error(penstock, server):
    large = grpc.Status()
    large.code = grpc.StatusCode.RESOURCE_EXHAUSTED
    large.details = "CLIENT: Sent message larger than max (5 vs. 4)"
    large.trailing_metadata = ()
    server.script.refuse["SubmitTasks"] = deque([large])
    with pytest.raises(Overloaded, match="larger than max"):
        await penstock.submit_tasks([Task("a")])
    assert server.calls.count("SubmitTasks") == 1


async def test_a_full_server_that_names_no_delay_is_an_error(penstock, server):
    full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
    server.script.refuse["SubmitTasks"] = deque([full])
    with pytest.raises(Overloaded) as caught:
        await penstock.submit_tasks([Task("a")])
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


async def test_an_error_carries_code_reason_and_metadata(penstock, server):
    server.script.refuse["Generate"] = deque(
        [status(grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")]
    )
    trajectory = penstock.trajectory()
    with pytest.raises(InvalidRequest) as caught:
        await trajectory.turn("hello")
    error = caught.value
    assert isinstance(error, PenstockError)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG")
    assert error.metadata == {"key": "value"}
    # A refused turn never began, so the caller can try another.
    assert_turn(await trajectory.turn("shorter"), 0)


async def test_idempotent_calls_survive_a_short_outage(penstock, server):
    server.script.refuse["GetServerInfo"] = deque([UNAVAILABLE, UNAVAILABLE])
    assert (await penstock.server_info()).model == "scripted"


async def test_trace_context_travels_with_a_turn(penstock, server):
    from opentelemetry import trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

    parent = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(parent)):
        await penstock.trajectory().turn("hello")
    assert server.metadata["traceparent"].split("-")[1] == f"{0xABC:032x}"


async def test_a_lost_lease_stream_is_opened_again_and_leases_are_renewed(penstock, server):
    server.add_task(Task("a"))
    async with penstock.lease_tasks(concurrency=2) as leases:
        first = await anext(leases)
        server.script.break_lease_stream.set()
        await server.wait_until(lambda: server.calls.count("LeaseTasks") >= 2)
        server.script.break_lease_stream.clear()
        assert first.trajectory.trajectory_id in server.renewed
        await server.lease_later(Task("b"))
        assert (await anext(leases)).task.task_id == "b"


async def test_held_leases_are_renewed_and_closed_ones_are_not(penstock, server):
    server.add_task(Task("a"))
    async with penstock.lease_tasks() as leases:
        attempt = await anext(leases)
        await server.wait_until(lambda: len(server.renewed) >= 2)
        await attempt.trajectory.complete(0.5)
        server.renewed.clear()
        await asyncio.sleep(0.3)
        assert server.renewed == []


async def test_a_refusal_to_lease_is_raised(penstock, server):
    server.script.refuse["LeaseTasks"] = deque(
        [status(grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")]
    )
    with pytest.raises(PenstockError, match="ROLE_NOT_ALLOWED"):
        async for _ in penstock.lease_tasks():
            pass


@pytest.mark.parametrize(
    "task",
    [
        Task("text", "What is 2 + 3?", {"answer": "5", "n": 5, "x": 1.5, "deep": [{"a": None}]}),
        Task(
            "chat",
            (Message("system", "Be brief."), Message("user", "Hi")),
            tools=(Tool("look", "looks", {"type": "object"}),),
            sampling=SamplingParams(temperature=0, stop=("END",), seed=7),
            group_size=4,
            index=9,
        ),
        Task("nothing"),
    ],
)
def test_a_task_survives_the_wire(task):
    raw = write_task(task).SerializeToString()
    assert read_task(codec.decode(task_service_pb2.Task, raw)) == task


def test_metadata_that_json_does_not_have_is_refused():
    with pytest.raises(TypeError, match="'when' holds a set"):
        write_task(Task("a", metadata={"when": {1}}))


def test_a_client_can_be_made_without_a_loop():
    client = connect("127.0.0.1:1")

    async def use() -> None:
        with pytest.raises(ServerUnavailable):
            await client.server_info()
        await client.close()

    asyncio.run(use())
