"""Requests that an SDK repeats: which turn each gets if several are possible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.server.core.errors import DomainError
from penstock.wire.reasons import Reason
from tests.support.fakes import FakeEngine, decode_bytes
from tests.support.harness import Harness, serve, until

RETRY = {"x-stainless-retry-count": "1"}
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 40,
    "ignore_eos": True,
}


def follower_counts(server: Harness) -> list[int]:
    """The number of followers of each of the attempt's trajectories."""
    root = server.serving.store.find("a")
    records = [] if root is None else [root, *root.open_branches()]
    return [record.answered.followers for record in records if record.answered is not None]


async def test_the_retry_of_a_vote_gets_its_own_answer_and_not_anothers(tmp_path: Path):
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0", step_seconds=0.002) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = f"{server.http}/attempts/a/chat/completions"
        first = (await http.post(url, json=BODY)).json()
        server.engine.freeze_at = 20
        lost = asyncio.create_task(http.post(url, json=BODY))
        await until(lambda: follower_counts(server) == [0, 1])
        lost.cancel()
        await until(lambda: follower_counts(server) == [0, 0])
        server.engine.freeze_at = None
        second = (await http.post(url, json=BODY, headers=RETRY)).json()
        root = server.serving.store.find("a")
        assert root is not None
        (branch,) = root.children
        # The answer was sent, but may not have arrived.
        again = (await http.post(url, json=BODY, headers=RETRY)).json()
    assert first["id"] == "chatcmpl-a-0"
    assert second["id"] == again["id"] == f"chatcmpl-{branch.trajectory_id}-0"


async def test_the_retry_of_a_vote_that_was_refused_gets_a_sample_of_its_own(tmp_path: Path):
    settings = ("http.listen=127.0.0.1:0", "limits.caller.turns_in_flight=1")
    async with (
        serve(tmp_path, *settings, step_seconds=0.002) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = f"{server.http}/attempts/a/chat/completions"

        async def vote() -> str:
            answer, tries = await http.post(url, json=BODY), 0
            while answer.status_code == 429:
                tries += 1
                await asyncio.sleep(0.02)
                headers = {"x-stainless-retry-count": str(tries)}
                answer = await http.post(url, json=BODY, headers=headers)
            return answer.json()["id"]

        votes = await asyncio.gather(*(vote() for _ in range(4)))
        # Now a retry may be answered with any of the votes.
        again = (await http.post(url, json=BODY, headers=RETRY)).json()["id"]
    assert len(set(votes)) == 4
    assert again in votes


async def test_the_retry_of_a_vote_that_failed_before_its_first_token_is_a_vote_again(
    tmp_path: Path,
):
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0") as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = f"{server.http}/attempts/a/chat/completions"
        votes = [(await http.post(url, json=BODY)).json()["id"] for _ in range(2)]
        generate = server.engine.generate

        async def fail(_: object) -> Any:
            raise DomainError(Reason.WEIGHTS_INCONSISTENT, "of several versions")

        server.engine.generate = fail  # type: ignore[method-assign]
        assert (await http.post(url, json=BODY)).status_code == 503
        server.engine.generate = generate  # type: ignore[method-assign]
        votes.append((await http.post(url, json=BODY, headers=RETRY)).json()["id"])
    assert len(set(votes)) == 3


class Late(FakeEngine):
    """Every request ends before it can be aborted."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass


async def test_a_retry_gets_the_answer_that_ended_while_its_connection_was_lost(tmp_path: Path):
    parts = {"step_seconds": 0.002, "make_engine": Late}
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0", **parts) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = f"{server.http}/attempts/a/chat/completions"
        server.engine.freeze_at = 20
        lost = asyncio.create_task(http.post(url, json=BODY))
        await until(lambda: follower_counts(server) == [1])
        lost.cancel()
        await until(lambda: follower_counts(server) == [0])
        record = server.serving.store.find("a")
        assert record is not None and record.turn is not None
        turn = record.turn
        server.engine.freeze_at = None
        await until(lambda: not turn.in_flight)
        answer = await http.post(url, json=BODY, headers=RETRY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert (record.turn_count, record.children, len(server.engine.salts)) == (1, [], 1)


async def cut_off(server: Harness, http: httpx.AsyncClient, asked: dict[str, Any]) -> list[int]:
    """Return the tokens written when the connection of the attempt's answer is lost."""
    server.engine.freeze_at = 40
    url = f"{server.http}/attempts/a/responses"
    lost = asyncio.create_task(http.post(url, json={**asked, "stream": True}))
    await server.sampled("a", 16)
    lost.cancel()
    record = server.serving.store.find("a")
    assert record is not None and record.turn is not None
    turn = record.turn
    await until(lambda: not turn.in_flight)
    server.engine.freeze_at = None
    assert 16 <= turn.policy_token_count < 100
    return [int(token) for token in turn.policy_tokens(turn.policy_token_count)]


ASKED = {"model": "m", "input": "hello", "max_output_tokens": 100, "ignore_eos": True}


async def test_the_rest_of_a_turn_that_was_cut_off_is_sampled_as_the_next_request_says(
    tmp_path: Path,
):
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0", step_seconds=0.005) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        before = await cut_off(server, http, ASKED)
        count = len(before) + 5
        other = {**ASKED, "max_output_tokens": count, "temperature": 0.5, "top_p": 0.9}
        answer = (await http.post(f"{server.http}/attempts/a/responses", json=other)).json()
        record = server.serving.store.find("a")
    assert record is not None and record.turn is not None
    assert (record.turn_count, record.children) == (1, [])
    assert [int(token) for token in record.turn.policy_tokens(count)][: len(before)] == before
    assert answer["usage"]["output_tokens"] == count
    assert [segment.temperature for segment in record.segments][1:] == [1.0, 0.5]
    told = (answer["max_output_tokens"], answer["temperature"], answer["top_p"])
    assert told == (count, pytest.approx(0.5), pytest.approx(0.9))


@pytest.mark.parametrize("wanted", ["fewer tokens", "a stop string", "a stop token"])
async def test_a_turn_that_was_cut_off_and_holds_what_ends_the_next_request_is_branched_from(
    tmp_path: Path, wanted: str
):
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0", step_seconds=0.005) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        before = await cut_off(server, http, ASKED)
        text = decode_bytes(before)
        fields: dict[str, dict[str, Any]] = {
            "fewer tokens": {"max_output_tokens": len(before) - 1},
            "a stop string": {"stop": text[10:12]},
            "a stop token": {"stop_token_ids": [before[0]]},
        }
        other = {**ASKED, **fields[wanted]}
        answer = (await http.post(f"{server.http}/attempts/a/responses", json=other)).json()
        record = server.serving.store.find("a")
    assert record is not None
    (branch,) = record.children
    assert answer["id"] == f"resp_{branch.trajectory_id}-0"
    assert answer["usage"]["output_tokens"] < len(before)
    assert record.turn is not None and record.turn.policy_token_count == len(before)
    assert server.serving.metrics.conversations == {"new": 1, "branched": 1}


async def test_a_turn_that_is_being_given_is_not_sampled_as_another_request_says(tmp_path: Path):
    async with (
        serve(tmp_path, "http.listen=127.0.0.1:0", step_seconds=0.005) as server,
        httpx.AsyncClient(timeout=20) as http,
    ):
        url = f"{server.http}/attempts/a/responses"
        server.engine.freeze_at = 40
        first = asyncio.create_task(http.post(url, json=ASKED))
        await server.sampled("a")
        # The turn waits until the journal has room before it continues.
        journal: Any = server.serving.journal
        check_room, refused = journal.check_room, 0

        def full(_: int) -> None:
            nonlocal refused
            refused += 1
            raise DomainError(Reason.DISK_FULL, "full", {}, retry_after_seconds=0.05)

        journal.check_room = full
        await server.serving.turns.abort(server.serving.turns.in_flight)
        await until(lambda: refused > 0)
        journal.check_room, server.engine.freeze_at = check_room, None
        other = {**ASKED, "max_output_tokens": 60}
        second = (await http.post(url, json=other)).json()
        answer = (await first).json()
    assert (answer["id"], answer["usage"]["output_tokens"]) == ("resp_a-0", 100)
    assert answer["max_output_tokens"] == 100
    assert second["id"] != answer["id"] and second["usage"]["output_tokens"] == 60
