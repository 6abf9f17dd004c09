"""A version as patches: what the trainer gives vLLM's sparse engine, and what it reports to the
server.

vLLM's own engine needs NCCL. A stand-in makes the same calls with the same fields, and applies the
patches here. Everything except the broadcasts is the code that runs between GPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from penstock.trainer.config.weights import CollectiveConfig, WeightsConfig
from penstock.trainer.core.aio import ComputeThread
from penstock.trainer.exchange.stream import Exchange
from penstock.trainer.weights.collective.transport import CollectiveTransport
from penstock.trainer.weights.copy import WeightCopy
from penstock.trainer.weights.publisher import Publisher
from penstock.trainer.weights.sender import Sender
from penstock.trainer.weights.sent import Sent
from tests.support.harness import Harness, serve, weights_of
from tests.trainer.weights.test_publisher import Connected, bytes_of

EPOCH = 1 << 62


class StandIn:
    """Stands in for vLLM's SparseNCCLTrainerWeightTransferEngine, and holds the workers' tensors."""

    def __init__(self, client: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        self._client = client
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.patches: list[Any] = []
        client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1})

    def send_weights(self, patches: list[Any]) -> None:
        assert patches, "vLLM would say nothing to the server"
        self._client.start_weight_update()
        self._client.update_weights(
            {
                "names": [patch.name for patch in patches],
                "dtype_names": [str(patch.values.dtype).split(".")[-1] for patch in patches],
                "shapes": [list(patch.full_shape) for patch in patches],
                "num_updates_list": [patch.indices.numel() for patch in patches],
            }
        )
        for patch in patches:
            assert patch.indices.dtype == torch.int32 and patch.indices.ndim == 1
            assert patch.values.shape == patch.indices.shape
            target = self.tensors[patch.name]
            assert target.shape == patch.full_shape
            target.view(-1)[patch.indices.long()] = patch.values
        self.patches = patches
        self._client.finish_weight_update()

    def shutdown(self) -> None: ...

    @property
    def elements(self) -> int:
        return sum(patch.indices.numel() for patch in self.patches)


class Weights:
    def __init__(self) -> None:
        self.tensors = {
            name: torch.from_numpy(tensor.copy()) for name, tensor in weights_of(1).items()
        }

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class Trainer:
    """A trainer that publishes to a server with patches."""

    def __init__(self, harness: Harness, weights: Weights, publisher: Publisher) -> None:
        self._harness = harness
        self._weights = weights
        self._publisher = publisher
        self.engine: StandIn | None = None

    async def publish(self, version: int) -> Sent:
        await self._publisher.fill(self._weights, version)
        (sender,) = self._publisher.senders
        sent = await sender.upload(version)
        assert sent is not None
        sender.switched(version)
        assert set((await self._harness.generate(f"t{version}")).versions) == {version}
        return sent


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path) as harness:
        yield harness


@contextlib.asynccontextmanager
async def training(
    harness: Harness, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Trainer]:
    compute = ComputeThread()
    copy, exchange = WeightCopy(compute), cast("Exchange", Connected(EPOCH))
    copy.dtype = "float32"
    settings = CollectiveConfig(backend="sparse_nccl", timeout_seconds=20)
    transport = CollectiveTransport(harness.address, settings)
    publisher = Publisher(copy, [Sender(harness.channel, copy, exchange, transports=[transport])])
    trainer = Trainer(harness, weights, publisher)
    # The tensors that the engine loaded from its checkpoint.
    loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.tensors.items()}

    def join(self: CollectiveTransport, source: object) -> StandIn:
        assert source is None
        trainer.engine = StandIn(self._client, loaded)
        return trainer.engine

    monkeypatch.setattr(CollectiveTransport, "_join", join)
    monkeypatch.setattr(CollectiveTransport, "_device", lambda _: torch.device("cpu"))
    try:
        yield trainer
    finally:
        await asyncio.to_thread(publisher.close)
        compute.close()


async def test_what_changed_travels_and_the_engine_has_every_bit(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Weights()
    count = sum(tensor.numel() for tensor in weights.tensors.values())
    first_name, second_name = list(weights.tensors)[:2]
    async with training(harness, weights, monkeypatch) as trainer:
        sent = await trainer.publish(1)
        engine = trainer.engine
        assert engine is not None
        assert (sent.delta, engine.elements, sent.bytes_sent) == (False, count, 8 * count)
        assert bytes_of_all(engine.tensors) == bytes_of(weights)

        first = weights.tensors[first_name].view(-1)
        first[0], first[1] = 0.0, -0.0
        await trainer.publish(2)
        # Zero and minus zero are equal as numbers but not as weights.
        first[0] = -0.0
        weights.tensors[second_name].view(-1)[-1] += 1
        sent = await trainer.publish(3)
        assert (sent.delta, engine.elements, sent.bytes_sent) == (True, 2, 16)
        assert [patch.name for patch in engine.patches] == [first_name, second_name]
        assert [found["names"] for found in names_of(harness)] == [[first_name, second_name]]
        assert bytes_of_all(engine.tensors) == bytes_of(weights)

        # The server must learn about a version that changes nothing, too.
        sent = await trainer.publish(4)
        assert (sent.delta, engine.elements) == (True, 1)
        assert bytes_of_all(engine.tensors) == bytes_of(weights)
        assert trainer.engine is engine


async def test_an_engine_with_other_weights_gets_every_element_at_once(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Weights()
    count = sum(tensor.numel() for tensor in weights.tensors.values())
    async with training(harness, weights, monkeypatch) as trainer:
        await trainer.publish(1)
        await harness.upload(2)
        weights.tensors[next(iter(weights.tensors))].view(-1)[0] += 1
        sent = await trainer.publish(3)
        engine = trainer.engine
        assert engine is not None
        assert (sent.delta, engine.elements) == (False, count)
        assert bytes_of_all(engine.tensors) == bytes_of(weights)
        sent = await trainer.publish(4)
        assert (sent.delta, engine.elements) == (True, 1)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "ipc", "sparse_nccl"])
def test_differences_can_be_asked_of_the_sparse_one_only(backend: str) -> None:
    settings = {"transport": "collective", "collective": {"backend": backend}, "delta": "on"}
    if backend == "sparse_nccl":
        assert WeightsConfig.model_validate(settings).delta == "on"
        return
    with pytest.raises(ValueError, match="cannot be combined with"):
        WeightsConfig.model_validate(settings)


def names_of(harness: Harness) -> list[Mapping[str, Any]]:
    return [dict(found) for found in map(described, harness.engine.rounds)]


def described(found: Any) -> Any:
    return found if isinstance(found, Mapping) else found[0]


def bytes_of_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: np.ascontiguousarray(tensor.numpy()).tobytes() for name, tensor in tensors.items()
    }
