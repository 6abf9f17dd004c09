"""A trainer's session: which state follows which, and which session is current."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from penstock.server.core.errors import DomainError
from penstock.server.rpc.trainer.session import (
    TRANSITIONS,
    CurrentSession,
    Session,
    SessionState,
)
from penstock.v1 import trainer_service_pb2
from penstock.wire.messages import Hello
from penstock.wire.reasons import Reason

BY_STATE = {
    SessionState.WELCOMING: (),
    SessionState.OPEN: (SessionState.OPEN,),
    SessionState.HALF_CLOSED: (SessionState.OPEN, SessionState.HALF_CLOSED),
    SessionState.ENDED: (SessionState.ENDED,),
}
"""How a new session gets into each state."""


async def write(response: Any) -> None:
    """Sends nothing."""


def hello(epoch: int, run_id: str = "run", start_id: str = "") -> trainer_service_pb2.Hello:
    return Hello(run_id=run_id, trainer_epoch=epoch, start_id=start_id)


@pytest.mark.parametrize(("before", "after"), product(SessionState, SessionState))
async def test_only_the_transitions_of_the_table_are_made(
    before: SessionState, after: SessionState
) -> None:
    session = Session(0, write)
    for state in BY_STATE[before]:
        session.move(state)
    assert session.state is before
    if after in TRANSITIONS[before]:
        session.move(after)
        assert session.state is after
    elif before is SessionState.ENDED:
        session.move(after)
        assert session.state is SessionState.ENDED
    else:
        with pytest.raises(RuntimeError):
            session.move(after)
        assert session.state is before


async def test_a_session_fails_with_the_first_reason_that_ends_it() -> None:
    session = Session(0, write)
    first = DomainError(Reason.SESSION_REPLACED, "first")
    session.end(first)
    session.end(DomainError(Reason.DRAINING, "second"))
    session.leave()
    assert session.ended and session.failure.exception() is first


async def test_a_stream_that_is_gone_leaves_no_failure() -> None:
    session = Session(0, write)
    session.leave()
    session.end(DomainError(Reason.DRAINING, "too late"))
    assert session.ended and session.failure.cancelled()


async def test_a_newer_epoch_replaces_the_session_and_fences_uploads() -> None:
    fenced: list[int] = []
    current = CurrentSession(fenced.append)
    old = current.begin(hello(3), write)
    new = current.begin(hello(4), write)
    assert old.ended and not new.ended
    error = old.failure.exception()
    assert isinstance(error, DomainError) and error.reason is Reason.SESSION_REPLACED
    assert not current.leave(old) and current.connected
    assert current.leave(new) and not current.connected
    assert fenced == [3, 4]


@pytest.mark.parametrize("epoch", [2, 3])
async def test_an_epoch_that_is_not_greater_is_refused(epoch: int) -> None:
    current = CurrentSession(lambda _: None)
    session = current.begin(hello(3), write)
    with pytest.raises(DomainError) as caught:
        current.begin(hello(epoch), write)
    assert caught.value.reason is Reason.STALE_EPOCH
    assert not session.ended


@pytest.mark.parametrize(
    ("run_id", "start_id", "dropped", "kept"),
    [
        ("other", "", ("run", "was replaced"), ""),
        ("run", "b", ("run", "was restarted from scratch"), "b"),
        ("run", "a", None, "a"),
        ("run", "", None, "a"),
    ],
)
async def test_what_another_run_or_start_replaces(
    run_id: str, start_id: str, dropped: tuple[str, str] | None, kept: str
) -> None:
    current = CurrentSession(lambda _: None)
    current.restore("run", 3, "a")
    assert current.begin_run(hello(4, run_id, start_id)) == dropped
    assert current.run == (run_id, 3, kept)


async def test_the_first_run_replaces_nothing() -> None:
    current = CurrentSession(lambda _: None)
    assert current.begin_run(hello(1, start_id="a")) is None
    assert current.run == ("run", 0, "a")
