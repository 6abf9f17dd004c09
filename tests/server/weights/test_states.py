"""States of a change of weights and of an upload: which follow each other, what each lets through."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest
import xxhash

from penstock.server.core.errors import DomainError
from penstock.server.engine.protocol import TensorMeta
from penstock.server.weights.staging.incoming import IncomingUpload, UploadPhase
from penstock.server.weights.staging.manifest import Encoding, ManifestTensor, WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.server.weights.switch import SwitchPhase, WeightSwitch
from penstock.wire.reasons import Reason

IDLE, PREPARING, ROLLING, CLOSED, UNCONFIRMED = SwitchPhase
SWITCH_MOVES = {
    (IDLE, PREPARING),
    (IDLE, ROLLING),
    (IDLE, CLOSED),
    (PREPARING, CLOSED),
    (PREPARING, IDLE),
    (ROLLING, IDLE),
    (CLOSED, UNCONFIRMED),
    (CLOSED, IDLE),
    (UNCONFIRMED, CLOSED),
    (UNCONFIRMED, IDLE),
}
WAYS = {
    IDLE: (),
    PREPARING: (PREPARING,),
    ROLLING: (ROLLING,),
    CLOSED: (CLOSED,),
    UNCONFIRMED: (CLOSED, UNCONFIRMED),
}
"""How a switch gets to each state."""
RECEIVING, VERIFYING, STAGED, ENDED = UploadPhase
UPLOAD_MOVES = {
    (RECEIVING, VERIFYING),
    (RECEIVING, ENDED),
    (VERIFYING, STAGED),
    (VERIFYING, ENDED),
}
UPLOAD_WAYS = {
    RECEIVING: (),
    VERIFYING: (VERIFYING,),
    STAGED: (VERIFYING, STAGED),
    ENDED: (ENDED,),
}
REFUSAL = DomainError(Reason.WEIGHTS_INCONSISTENT, "told to refuse")


@pytest.mark.parametrize(("before", "after"), itertools.product(SwitchPhase, SwitchPhase))
async def test_a_switch_takes_the_ways_of_its_table_only(
    before: SwitchPhase, after: SwitchPhase
) -> None:
    switch = WeightSwitch()
    for phase in WAYS[before]:
        switch.move(phase)
    if (before, after) in SWITCH_MOVES:
        switch.move(after)
        assert switch.phase is after
    else:
        with pytest.raises(RuntimeError):
            switch.move(after)
        assert switch.phase is before


@pytest.mark.parametrize("phase", SwitchPhase)
@pytest.mark.parametrize("pinned", [False, True])
async def test_turns_wait_in_these_states_and_are_admitted_after_them(
    phase: SwitchPhase, *, pinned: bool
) -> None:
    switch = WeightSwitch(3)

    async def admitted() -> int:
        async with switch.admission(pinned=pinned) as version:
            return version

    waits = phase in (CLOSED, UNCONFIRMED) or (pinned and phase is ROLLING)
    async with switch.change():
        for step in WAYS[phase]:
            switch.move(step)
        assert switch.changing == (phase in (CLOSED, UNCONFIRMED, ROLLING))
        turn = asyncio.ensure_future(admitted())
        for _ in range(3):
            await asyncio.sleep(0)
        assert turn.done() != waits
    assert await turn == 3
    assert switch.phase is IDLE


@pytest.mark.parametrize("phase", SwitchPhase)
async def test_a_refusal_stands_in_every_state(phase: SwitchPhase) -> None:
    told: list[bool] = []

    def note() -> None:
        told.append(switch.trusted)

    switch = WeightSwitch(on_health=note)
    async with switch.change():
        for step in WAYS[phase]:
            switch.move(step)
        switch.refuse(REFUSAL)
        with pytest.raises(DomainError):
            async with switch.admission():
                pass
    assert not switch.trusted
    switch.refuse(None)
    assert told == [False, True]


@pytest.mark.parametrize("good", [False, True])
async def test_a_verdict_ends_the_wait_for_it(*, good: bool) -> None:
    switch = WeightSwitch()
    async with switch.change():
        await switch.hold_turns()
        switch.withhold(4)
        assert (switch.phase, switch.unconfirmed_version) == (UNCONFIRMED, 4)
        waiting = asyncio.ensure_future(switch.confirmed())
        await asyncio.sleep(0)
        assert not waiting.done()
        switch.judge(good=good)
        assert await waiting is good
        # Tokens of a refused version are discarded until the change has ended.
        assert switch.unconfirmed_version == (None if good else 4)
        assert await switch.confirmed() is good
    assert switch.unconfirmed_version is None
    assert await switch.confirmed()


async def test_the_gate_closes_once_admissions_under_way_have_finished() -> None:
    switch = WeightSwitch()
    entered, leave = asyncio.Event(), asyncio.Event()

    async def admitted() -> None:
        async with switch.admission():
            entered.set()
            await leave.wait()

    turn = asyncio.ensure_future(admitted())
    await entered.wait()

    async def close() -> None:
        async with switch.gate_closed():
            assert turn.done()

    closing = asyncio.ensure_future(close())
    for _ in range(3):
        await asyncio.sleep(0)
    assert switch.phase is CLOSED and not closing.done()
    leave.set()
    await closing


async def uploading(folder: Path, way: tuple[UploadPhase, ...] = ()) -> IncomingUpload:
    stage = WeightStage(folder, {"t": TensorMeta((4,))}, "float32")
    data = bytes(16)
    manifest = [
        ManifestTensor("t", (4,), "float32", 0, 16, xxhash.xxh3_64_intdigest(data), Encoding.RAW)
    ]
    upload = await stage.begin_inline(1, manifest, len(data))
    for phase in way:
        upload._move(phase)
    return upload


@pytest.mark.parametrize(("before", "after"), itertools.product(UploadPhase, UploadPhase))
async def test_an_upload_takes_the_ways_of_its_table_only(
    tmp_path: Path, before: UploadPhase, after: UploadPhase
) -> None:
    upload = await uploading(tmp_path, UPLOAD_WAYS[before])
    if (before, after) in UPLOAD_MOVES:
        upload._move(after)
        assert upload.phase is after
    else:
        with pytest.raises(RuntimeError):
            upload._move(after)
        assert upload.phase is before


@pytest.mark.parametrize("whole", [False, True])
async def test_an_upload_ends_staged_or_without_its_memory(tmp_path: Path, *, whole: bool) -> None:
    upload = await uploading(tmp_path)
    data = bytes(16)
    coming = asyncio.ensure_future(upload.wait_for(16))
    if whole:
        upload.write_chunk(0, data, xxhash.xxh3_64_intdigest(data))
        staged = await upload.verify()
        assert upload.phase is STAGED
        await upload.end()
        assert upload.phase is STAGED and staged.buffer.view is not None
        staged.release()
    else:
        with pytest.raises(WeightRefused):
            await upload.verify()
        assert upload.phase is ENDED
        upload.release()
        with pytest.raises(WeightRefused, match="takes no chunks"):
            upload.write_chunk(0, data, xxhash.xxh3_64_intdigest(data))
    assert await coming is whole
