"""A server killed during a weight upload gets the weights again before it samples."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from penstock.client import Task, Trajectory, connect
from tests.support.processes import Server, server_process
from tests.support.trainer_walk import StillPolicy, running

LENGTH = 1 << 20
"""Elements; large enough that an upload takes a while."""
STEPS = 6
KILLED_AT = 3
"""The version being uploaded at the kill."""
KILLS_IN_LOAD = f"engine.load=kill@{KILLED_AT}"


class BigPolicy(StillPolicy):
    """Changes one more element in each step."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensor = torch.zeros(LENGTH)
        tensor[: self.steps] = 1.0
        yield "a.weight", tensor


def write_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a.weight": np.zeros(LENGTH, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
    return folder


class Interrupted:
    """A transport whose server is killed at a chosen moment of one upload."""

    def __init__(self, transport: Any, server: Server, moment: str) -> None:
        self._transport, self._server, self._moment = transport, server, moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def begin(self, header: Any, payload: Any) -> Any:
        ahead = self._transport.begin(header, payload)
        if header.weight_version != KILLED_AT or self._moment not in ("filling", "staged"):
            return ahead
        moment, self._moment = self._moment, ""
        if moment == "staged":
            return InterruptedAhead(ahead, self._server)
        asyncio.get_running_loop().call_later(0.002, self._server.process.kill)
        return ahead

    async def send(self, header: Any, parcel: Any) -> Any:
        moment = self._moment if header.weight_version == KILLED_AT else ""
        if moment:
            self._moment = ""
        if moment == "uploading":
            asyncio.get_running_loop().call_later(0.002, self._server.process.kill)
        staged = await self._transport.send(header, parcel)
        if moment == "staged":
            self._server.process.kill()
        return staged


class InterruptedAhead:
    """An early upload whose server is killed once it has staged the weights."""

    def __init__(self, ahead: Any, server: Server) -> None:
        self._ahead, self._server = ahead, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ahead, name)

    async def commit(self, tensor_xxh3: Any) -> Any:
        staged = await self._ahead.commit(tensor_xxh3)
        self._server.process.kill()
        return staged


@contextlib.asynccontextmanager
async def started_again(server: Server) -> AsyncGenerator[None]:
    """Restart the server after it was killed; the new start waits for its trainer."""

    async def keep() -> None:
        await server.process.wait()
        await server.start("--set", "weights.await_trainer=true")

    keeping = asyncio.create_task(keep())
    try:
        yield
        await keeping
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


@pytest.mark.parametrize(
    ("moment", "transport"),
    [
        ("uploading", "stream"),
        ("filling", "shared_memory"),
        ("staged", "shared_memory"),
        ("switching", "checkpoint"),
    ],
)
async def test_a_server_killed_on_the_way_is_given_the_weights_again_before_it_samples(
    tmp_path: Path, moment: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if moment == "switching":
        monkeypatch.setenv("PENSTOCK_FAILPOINTS", KILLS_IN_LOAD)
    model = write_model(tmp_path / "model")
    versions: list[int] = []

    async def agent(task: Task, trajectory: Trajectory) -> float:
        turn = await trajectory.turn(max_tokens=8, ignore_eos=True)
        versions.extend(turn.weight_versions)
        return float(len(versions) % 2)

    async with (
        server_process(tmp_path, "--model", str(model), "--step-seconds", "0.002") as server,
        connect(server.address) as client,
    ):
        os.environ.pop("PENSTOCK_FAILPOINTS", None)
        working = asyncio.create_task(client.work(agent, concurrency=4))
        options = {"transport": transport, "delta": "on" if transport == "stream" else "auto"}
        async with (
            started_again(server),
            running(
                tmp_path, server.address, steps=STEPS, policy=BigPolicy(), weights=options
            ) as run,
        ):
            (sender,) = run.publisher.senders
            sender.transports = [Interrupted(found, server, moment) for found in sender.transports]
            await run.ends(30)
            assert (await client.server_info()).active_weight_version == STEPS
        working.cancel()
        await asyncio.wait([working])
    assert len(server.processes) == 2
    assert [record["weight_version"] for record in run.records] == list(range(1, STEPS + 1))
    # The weights that sample after the kill are the trainer's: the uploaded
    # version or the previous one.
    assert max(record["lag_max"] for record in run.records) <= 2
    after = versions[next(i for i, v in enumerate(versions) if v >= KILLED_AT - 1) :]
    assert min(after) >= KILLED_AT - 2
