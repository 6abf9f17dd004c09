"""A caller that continues an aborted turn at once does not hold up the call that aborted it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.v1 import trajectory_pb2, weights_pb2
from tests.support.harness import AbortRequest, Harness, sampling

ABORTED = trajectory_pb2.FINISH_REASON_ABORTED


def answer_late(harness: Harness) -> None:
    """Acts like vLLM: requests end at once, but the abort call returns only later."""
    abort = harness.engine.abort

    async def late(request_ids: Sequence[str]) -> None:
        await abort(request_ids)
        await asyncio.sleep(0.2)

    harness.engine.abort = late  # type: ignore[method-assign]


async def test_a_switch_goes_on_while_callers_continue(slow: Harness) -> None:
    answer_late(slow)
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(60)))
    await slow.sampled("t")
    abort = weights_pb2.IN_FLIGHT_POLICY_ABORT
    upload = asyncio.ensure_future(slow.upload(1, in_flight=abort))
    turn = await call
    assert turn.finished.finish_reason == ABORTED
    rest = asyncio.ensure_future(slow.resume("t"))
    async with asyncio.timeout(20):
        assert (await upload)[-1].active_weight_version == 1
        assert len(turn.tokens + (await rest).tokens) == 60
    assert set((await rest).versions) == {1}


async def test_an_abort_does_not_wait_for_the_attempt_after_it(slow: Harness) -> None:
    answer_late(slow)
    call = asyncio.ensure_future(slow.generate("t", sampling_params=sampling(400)))
    await slow.sampled("t")
    request = AbortRequest(trajectories={"trajectory_ids": ["t"]})
    abort = asyncio.ensure_future(slow.wire.Abort(request))
    assert (await call).finished.finish_reason == ABORTED
    rest = asyncio.ensure_future(slow.resume("t"))
    await abort
    # The rest takes two seconds.
    assert not rest.done()
    assert len((await rest).tokens) > 200
