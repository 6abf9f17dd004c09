"""Which trajectory a request's messages continue, and how many of its tokens are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry import trace

from penstock.server.engine.protocol import Finish
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.turns.history import History
from penstock.server.turns.matching import Match, MatchKind, kept_prefix, match
from penstock.server.turns.trajectory import PromptKind, TrajectoryRecord, Turn
from penstock.server.turns.turn import TurnAttempt, TurnSampling, TurnState

SYSTEM = Message("system", "Be brief.")
ASK = Message("user", "What is 2 + 2?")
CALL = ToolCall("c1", "add", '{"a": 2, "b": 2}')
CALLS = Message("assistant", "Let me see.", (CALL,), reasoning="They want a sum.")
RESULT = Message("tool", "4", tool_call_id="c1")
ANSWER = Message("assistant", "It is 4.")
TOOL = Tool("add", "adds", {"type": "object", "properties": {"a": {}, "b": {}}})
HELD = [SYSTEM, ASK, CALLS, RESULT, ANSWER]


def trajectory(
    *held: Message, name: str = "t", finish: Finish | None = Finish.STOP, **fields: object
) -> TrajectoryRecord:
    """A trajectory whose assistant messages are all the policy's. Each message takes ten tokens."""
    record = TrajectoryRecord(name, PromptKind.CONVERSATION, TurnSampling(), **fields)  # type: ignore[arg-type]
    record.history = History((TOOL,))
    for index, message in enumerate(held):
        if message.role == "assistant":
            record.history.set_written(message, 10 * index + 10)
        else:
            record.history.add_context([message], 10 * index + 10)
    record.token_count = 10 * len(held)
    record.turn = Turn(record, 0, TurnSampling(), 9, 0, trace.INVALID_SPAN, {}, 1)
    record.turn.attempt = TurnAttempt(finish=finish)
    return record


def matched(
    records: list[TrajectoryRecord], *messages: Message, tools: tuple[Tool, ...] = (TOOL,)
) -> Match:
    return match(records, messages, tools)


def seen(found: Match) -> tuple[MatchKind, int, int, tuple[Message, ...]]:
    return found.kind, found.token_count, found.message_count, found.new_messages


NEXT = Message("user", "And 3 + 3?")


def test_nothing_is_held_at_first():
    found = matched([], SYSTEM, ASK)
    assert (found.record, *seen(found)) == (None, MatchKind.NEW, 0, 0, (SYSTEM, ASK))


def test_what_continues_the_held_messages_is_appended():
    record = trajectory(*HELD)
    found = matched([record], *HELD, NEXT)
    assert found.record is record
    assert seen(found) == (MatchKind.CONTINUED, 50, 5, (NEXT,))


def test_several_results_are_new_at_once():
    record = trajectory(*HELD[:3])
    other = replace(RESULT, tool_call_id="c2")
    assert matched([record], *HELD[:3], RESULT, other).new_messages == (RESULT, other)


FORMS = {
    "whitespace": replace(CALLS, content="\nLet me see. "),
    "order of keys": replace(CALLS, tool_calls=(replace(CALL, arguments_json='{"b":2,"a":2}'),)),
    "numbers": replace(CALLS, tool_calls=(replace(CALL, arguments_json='{"a": 2.0, "b": 2e0}'),)),
    "no reasoning": replace(CALLS, reasoning=""),
    "id of the call": replace(CALLS, tool_calls=(replace(CALL, tool_call_id="other"),)),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_differs_only_in_form_stands_as_it_is_held(form):
    record = trajectory(*HELD)
    result = replace(RESULT, tool_call_id="other") if form == "id of the call" else RESULT
    found = matched([record], SYSTEM, ASK, FORMS[form], result, ANSWER, NEXT)
    assert seen(found) == (MatchKind.REALIGNED, 50, 5, (NEXT,))


REWRITTEN = {
    "content": replace(CALLS, content="Let me think."),
    "argument": replace(CALLS, tool_calls=(replace(CALL, arguments_json='{"a": 2, "b": 3}'),)),
    "arguments that are no JSON": replace(CALLS, tool_calls=(replace(CALL, arguments_json="a"),)),
    "name": replace(CALLS, tool_calls=(replace(CALL, name="sum"),)),
    "no call": replace(CALLS, tool_calls=()),
    "other reasoning": replace(CALLS, reasoning="They want a product."),
    "role": replace(CALLS, role="user"),
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_what_means_something_else_is_a_branch(what):
    rewritten = (SYSTEM, ASK, REWRITTEN[what], RESULT, ANSWER, NEXT)
    assert seen(matched([trajectory(*HELD)], *rewritten)) == (MatchKind.BRANCHED, 0, 0, rewritten)


def test_reasoning_that_nobody_wrote_is_not_only_form():
    record = trajectory(*HELD)
    found = matched([record], *HELD[:4], replace(ANSWER, reasoning="I thought so."), NEXT)
    assert found.kind is MatchKind.BRANCHED


def test_a_branch_keeps_up_to_the_last_message_the_policy_wrote():
    record = trajectory(*HELD)
    other = replace(RESULT, content="5")
    found = matched([record], *HELD[:3], other)
    assert found.record is record
    assert seen(found) == (MatchKind.BRANCHED, 30, 3, (other,))
    # The policy's answer was rewritten. The prompt before it is encoded again,
    # and the earlier call is kept.
    tail = (RESULT, replace(ANSWER, content="It is five."), NEXT)
    assert seen(matched([record], *HELD[:3], *tail)) == (MatchKind.BRANCHED, 30, 3, tail)


def test_the_same_request_again_is_another_sample():
    record = trajectory(*HELD)
    assert seen(matched([record], *HELD[:4])) == (MatchKind.BRANCHED, 30, 3, (RESULT,))
    assert seen(matched([record], *HELD[:2])) == (MatchKind.BRANCHED, 0, 0, (SYSTEM, ASK))


@pytest.mark.parametrize("message", [True, False], ids=["its part held", "no part of it held"])
def test_the_same_request_again_goes_on_with_a_turn_that_was_cut_off(message):
    record = trajectory(*(HELD if message else HELD[:4]), finish=Finish.ABORTED)
    found = matched([record], *HELD[:4])
    assert seen(found) == (MatchKind.CONTINUED, record.token_count, 4, ())
    # The request may also contain the partial answer, and continue after it.
    if message:
        assert seen(matched([record], *HELD, NEXT)) == (MatchKind.CONTINUED, 50, 5, (NEXT,))


def test_a_request_that_ends_with_the_policys_own_message_is_a_branch():
    found = matched([trajectory(*HELD)], *HELD)
    assert seen(found) == (MatchKind.BRANCHED, 30, 3, (RESULT, ANSWER))


def test_a_turn_in_flight_is_branched_from_and_never_continued():
    record = trajectory(*HELD)
    assert record.turn is not None
    record.turn.to(TurnState.STARTING)
    found = matched([record], *HELD, NEXT)
    assert seen(found) == (MatchKind.BRANCHED, 50, 5, (NEXT,))


def test_other_tools_are_another_context():
    record = trajectory(*HELD)
    reordered = Tool("add", "adds", {"properties": {"b": {}, "a": {}}, "type": "object"})
    assert matched([record], *HELD, NEXT, tools=(reordered,)).kind is MatchKind.CONTINUED
    for tools in ((), (replace(TOOL, description="subtracts"),)):
        found = matched([record], *HELD, NEXT, tools=tools)
        assert seen(found) == (MatchKind.BRANCHED, 0, 0, (*HELD, NEXT))


def test_tokens_that_are_no_message_match_nothing():
    record = trajectory(*HELD[:3])
    assert record.history is not None
    record.history.add_observation([], 40)
    record.history.set_written(ANSWER, 50)
    empty = Message("user", "")
    found = matched([record], *HELD[:3], empty, ANSWER, NEXT)
    assert seen(found) == (MatchKind.BRANCHED, 30, 3, (empty, ANSWER, NEXT))


def test_of_several_trajectories_the_one_that_fits_best_is_taken():
    root = trajectory(*HELD, name="root")
    other = replace(RESULT, content="5")
    branch = trajectory(*HELD[:3], other, ANSWER, name="branch")
    loose = trajectory(SYSTEM, ASK, FORMS["whitespace"], RESULT, ANSWER, name="loose")
    records = [root, branch, loose]
    assert matched(records, *HELD, NEXT).record is root
    assert matched(records, *HELD[:3], other, ANSWER, NEXT).record is branch
    # An exact match is preferred to a match of another form; among equal matches
    # the first trajectory is taken.
    assert matched(list(reversed(records)), *HELD, NEXT).record is root
    # Branches from the trajectory that shares the most tokens.
    found = matched(records, *HELD[:3], other, ANSWER, other, ANSWER, NEXT)
    assert (found.record, found.token_count) == (branch, 50)


def test_what_the_policy_wrote_is_not_encoded_where_one_that_goes_on_holds_it():
    # Two samples with the same text; the first was answered and continued.
    first = trajectory(*HELD[:3], RESULT, ANSWER, ASK, ANSWER, name="first")
    second = trajectory(*HELD[:3], name="second")
    found = matched([first, second], *HELD, NEXT)
    assert found.record is first
    assert seen(found) == (MatchKind.BRANCHED, 50, 5, (NEXT,))
    # If both share the same number of tokens, the one that can be continued is taken.
    other = replace(RESULT, content="5")
    found = matched([first, second], *HELD[:3], other)
    assert found.record is second
    assert seen(found) == (MatchKind.CONTINUED, 30, 3, (other,))


def test_another_sample_of_a_rewritten_context_branches_from_the_first_one():
    root = trajectory(*HELD, name="root")
    summary = Message("user", "So far: 4.")
    compacted = trajectory(SYSTEM, summary, ANSWER, name="compacted")
    agent = trajectory(Message("system", "Search."), ASK, ANSWER, name="agent")
    records = [root, compacted, agent]
    found = matched(records, SYSTEM, summary)
    # No policy message is shared, so the whole prompt is encoded; the shared part is stored once.
    assert (found.record, *seen(found)) == (
        compacted,
        *(MatchKind.BRANCHED, 0, 0, (SYSTEM, summary)),
    )
    assert matched(records, Message("system", "Search."), NEXT).record is agent
    # If no trajectory shares anything, or all share the same, the attempt's root is taken.
    assert matched(records, NEXT).record is root
    assert matched(records, SYSTEM, NEXT).record is root


def test_a_turn_that_goes_on_replaces_its_message():
    record = trajectory(*HELD, finish=Finish.ABORTED)
    assert record.history is not None
    record.history.recorded = 5
    whole = replace(ANSWER, content="It is 4, or so.")
    record.history.set_written(whole, 60)
    assert (len(record.history.messages), record.history.recorded) == (5, 4)
    assert record.turn is not None
    record.turn.attempt.finish = Finish.STOP
    record.token_count = 60
    assert seen(matched([record], *HELD[:4], whole, NEXT)) == (
        MatchKind.CONTINUED,
        60,
        5,
        (NEXT,),
    )


def test_a_branch_that_is_asked_for_keeps_the_same():
    record = trajectory(*HELD, finish=Finish.ABORTED)
    assert kept_prefix(record, HELD[:4], [TOOL]) == (30, 3)
    assert kept_prefix(record, [*HELD, NEXT], [TOOL]) == (50, 5)
    assert kept_prefix(record, [*HELD, NEXT], []) == (0, 0)
    assert record.history is not None
    branch = record.history.branch(3)
    assert (branch.messages, branch.tools) == (record.history.messages[:3], (TOOL,))


def test_half_a_character_can_be_held():
    half = Message("user", "\ud800")
    assert matched([trajectory(half, ANSWER)], half, ANSWER, NEXT).kind is MatchKind.CONTINUED
