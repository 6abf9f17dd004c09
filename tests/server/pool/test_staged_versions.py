"""Versions that are staged while another one is switched to, in an order that the test chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.server.pool.fanout import Fanout
from tests.support.harness import until, upload
from tests.support.pools import serve_pool


async def test_engines_switch_to_the_version_that_the_hub_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer version is accepted while an older one is staged again for its switch."""
    async with serve_pool(tmp_path, 2) as pool:
        close, closing, go = Fanout.close, asyncio.Event(), asyncio.Event()

        async def slowly(fanout: Fanout) -> None:
            if fanout.weight_version == 2:
                closing.set()
                await go.wait()
            await close(fanout)

        monkeypatch.setattr(Fanout, "close", slowly)
        wire, weights = pool.hub.wire, pool.hub.serving.weights
        await upload(wire, 1, staged=True)
        await upload(wire, 2, staged=True)
        await asyncio.sleep(0.2)
        switching = asyncio.create_task(weights.activate(1, None))
        await asyncio.wait_for(closing.wait(), 20)
        await upload(wire, 3, staged=True)
        await asyncio.sleep(0.2)
        go.set()
        await asyncio.wait_for(switching, 20)
        assert pool.hub.serving.switch.active_version == 1
        assert [member.version for member in pool.engine.roster.members] == [1, 1]
        await weights.activate(3, None)
        await until(lambda: [m.version for m in pool.engine.roster.members] == [3, 3])
