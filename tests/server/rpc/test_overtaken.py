"""Calls that another one overtakes while they wait, in orders of events that the test chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.server.core.errors import DomainError
from penstock.server.groups.buffer import BufferedGroup
from penstock.server.journal.protocol import Appended
from penstock.wire.failure import read_failure
from penstock.wire.reasons import Reason
from tests.support.harness import (
    GenerateRequest,
    Harness,
    hello,
    sampling,
    sequence,
    serve,
    until,
)


class Held:
    """Appends with a record of one kind become durable only when `go` is set."""

    def __init__(self, harness: Harness, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.go = asyncio.Event()
        self.waiting = 0
        journal = harness.serving.journal
        append = journal.append

        def held(records: Any, *, hold_last: bool = False) -> Any:
            done = append(records, hold_last=hold_last)
            return self._hold(done) if any(_is(one, kind) for one in records) else done

        monkeypatch.setattr(journal, "append", held)

    def _hold(self, done: asyncio.Future[Any]) -> asyncio.Future[Any]:
        async def later() -> Any:
            self.waiting += 1
            await self.go.wait()
            return await done

        return asyncio.ensure_future(later())


def _is(record: Appended, kind: str) -> bool:
    which = getattr(record, "WhichOneof", None)
    return which is not None and which("record") == kind


async def made(harness: Harness, name: str) -> None:
    await harness.generate(name, group_id=name, group_size=1)
    await harness.complete(name)


@pytest.mark.parametrize("record", ["run_replaced", "session_began"])
async def test_an_overtaken_hello_delivers_nothing(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    first = await hello(harness.wire, 1, run_id="first")
    held = Held(harness, monkeypatch, record)
    overtaken = asyncio.ensure_future(hello(harness.wire, 2, run_id="second"))
    await until(lambda: held.waiting == 1)
    if record == "session_began":
        # The newer one is not held up.
        monkeypatch.undo()
    newer = await hello(harness.wire, 3, run_id="second")
    newer.send(demand={"group_count": 1})
    await made(harness, "one")
    await newer.receive("notice")
    delivery = await newer.receive("delivery")
    credit = harness.serving.session.current
    held.go.set()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await overtaken
    assert read_failure(refused.value).reason == "SESSION_REPLACED"
    # The group is the newer trainer's, once.
    newer.send(demand={"group_count": 1})
    await newer.nothing()
    assert harness.serving.session.current is credit
    newer.send(receipt={"delivery_ids": [delivery.delivery_id], "step": 1})
    await until(lambda: [group.step for group in harness.serving.buffer.groups] == [1])
    first.call.cancel()


async def test_a_caller_that_leaves_takes_the_journals_answer_from_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = f"journal.folder={tmp_path / 'journal'}"
    async with serve(tmp_path, journal, step_seconds=0.05) as harness:
        held = Held(harness, monkeypatch, "trajectory_opened")
        request = GenerateRequest(
            trajectory_id="t",
            tokens=sequence([1, 2, 3]),
            sampling_params=sampling(3),
            stream_options={"detach": True},
        )
        leaving = harness.wire.Generate(request)
        reading = asyncio.ensure_future(leaving.read())
        await until(lambda: held.waiting == 1)
        turn = harness.serving.turns.in_flight[0]
        # A second reader of the same turn, as an HTTP request that is sent again.
        follower = harness.serving.events.stream(
            turn, harness.serving.opening.how(request.stream_options), None
        )
        following = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(0.05)
        held.go.set()
        assert "started" in await asyncio.wait_for(following, 20)
        await follower.aclose()


@pytest.mark.parametrize("later", ["waits again", "was trained"])
async def test_a_group_that_a_newer_trainer_has_is_not_dropped_by_an_older_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    """The read fails at the moment at which a newer Hello has made the group wait again."""
    async with serve(tmp_path, f"journal.folder={tmp_path / 'journal'}") as harness:
        buffer = harness.serving.buffer

        async def overtaken(group: BufferedGroup) -> bytes:
            buffer.resume(0)
            if later == "was trained":
                (again,) = buffer.deliver([group.group_id])
                buffer.receipt([again.delivery_id], 1)
            raise DomainError(Reason.JOURNAL_CORRUPT, "the disk had a moment")

        monkeypatch.setattr(buffer, "read", overtaken)
        trainer = await hello(harness.wire, 1)
        await made(harness, "one")
        await until(lambda: buffer.buffered_count == 1)
        session = harness.serving.session.current
        assert session is not None
        (group,) = buffer.deliver(["one"])
        await harness.serving.trainer.deliverer._send_whole(session, group)
        assert not buffer.drops and [one.group_id for one in buffer.groups] == ["one"]
        assert session.credit == 0
        trainer.call.cancel()
