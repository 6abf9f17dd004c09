"""What the tests of weight uploads check again and again."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from penstock.wire.failure import Failure, read_failure
from tests.support.fakes import expected_tokens
from tests.support.harness import GetServerInfoRequest, Harness, Turn, payload, send

MODEL_BYTES = len(payload(0)[0])
COUNTER = iter(range(1_000_000))


@dataclass(frozen=True)
class State:
    """Everything an upload that is refused leaves as it was."""

    active: int
    staged: tuple[int, ...]
    base: int
    loads: int
    held_bytes: int
    tokens: tuple[int, ...]


async def state_of(harness: Harness, name: str) -> State:
    """As it is now; `name` is of a turn that is made to see."""
    info = await harness.wire.GetServerInfo(GetServerInfoRequest())
    turn = await harness.generate(name)
    assert turn.tokens == expected_tokens([1, 2, 3], turn.versions)[0]
    assert set(turn.versions) == {info.active_weight_version}
    return State(
        info.active_weight_version,
        tuple(info.staged_weight_versions),
        info.delta_base_weight_version,
        len(harness.engine.loaded),
        held_bytes(harness),
        tuple(turn.tokens),
    )


def held_bytes(harness: Harness) -> int:
    """Memory that weights take on the server, what is kept for the next upload left out."""
    return harness.serving.weights._stage.held_bytes


async def refused(harness: Harness, requests: Sequence[Any]) -> Failure:
    """An upload that must be refused, and must leave everything as it was."""
    before = await state_of(harness, f"seen-{next(COUNTER)}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, requests)
    after = await state_of(harness, f"seen-{next(COUNTER)}")
    assert after == before
    return read_failure(caught.value)


def check_tokens(turn: Turn, prompt: Sequence[int]) -> None:
    """Every token is the one its version samples at its place."""
    tokens, logprobs = expected_tokens(prompt, turn.versions)
    assert turn.tokens == tokens
    assert turn.logprobs == pytest.approx(logprobs)


@contextlib.contextmanager
def no_room_for(length_bytes: int) -> Iterator[None]:
    """No file can have this length, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length_bytes - 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
