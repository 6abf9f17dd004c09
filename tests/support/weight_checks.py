"""Checks shared by the tests of weight uploads."""

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
    """The server state that a refused upload must leave unchanged."""

    active: int
    staged: tuple[int, ...]
    base: int
    loads: int
    held_bytes: int
    tokens: tuple[int, ...]


async def state_of(harness: Harness, name: str) -> State:
    """The current state. `name` is for the trajectory of a turn that
    reveals the computing weights."""
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
    """The server's memory for weights, without buffers kept for the next upload."""
    return harness.serving.weights.stage.held_bytes


async def refused(harness: Harness, requests: Sequence[Any]) -> Failure:
    """Send an upload that must be refused, and check that it changes nothing."""
    before = await state_of(harness, f"seen-{next(COUNTER)}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(harness, requests)
    after = await state_of(harness, f"seen-{next(COUNTER)}")
    assert after == before
    return read_failure(caught.value)


def check_tokens(turn: Turn, prompt: Sequence[int]) -> None:
    """Check that every token is the one its version samples at its position."""
    tokens, logprobs = expected_tokens(prompt, turn.versions)
    assert turn.tokens == tokens
    assert turn.logprobs == pytest.approx(logprobs)


@contextlib.contextmanager
def no_room_for(length_bytes: int) -> Iterator[None]:
    """Limit file size so that a file of this length cannot be written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length_bytes - 1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
