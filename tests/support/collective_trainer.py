"""A trainer that sends weights over gloo from its own process, and dies on command.

It reads one JSON command per line and runs each in a fork, so that vLLM is imported only once. It
prints one JSON object per event; the last event of a command has the key "exit".
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from penstock.trainer.config.weights import CollectiveConfig
from penstock.trainer.weights.collective.gloo import (
    GlooTrainerInitInfo,
    GlooTrainerWeightTransferEngine,
)
from penstock.trainer.weights.collective.transfer import (
    PenstockWeightSyncClient,
    WeightSyncFailed,
)
from penstock.trainer.weights.collective.transport import CollectiveTransport
from penstock.trainer.weights.copy import whole
from penstock.trainer.weights.payload import Payload
from penstock.v1 import weights_pb2
from penstock.wire.failure import read_failure
from penstock.wire.gloo_group import GroupBroken

# Small enough that a bucket holds several tensors and the larger tensors need several buckets.
BUCKET_BYTES = 24 * 1024
TIMEOUT_SECONDS = 40.0
Pairs = list[tuple[str, torch.Tensor]]


def say(**event: Any) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def heard() -> str:
    """The next line of stdin. Reads byte by byte, because parent and child share the pipe
    and neither may read ahead."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            sys.exit(0)
        line += byte
    return line.decode()


class FileSource(WeightSource):
    """Weights from a model's file. After `stop_after` tensors it reports an event and waits for
    a line before it continues."""

    def __init__(self, path: Path, stop_after: int = -1) -> None:
        state = load_file(path / "model.safetensors")
        self.pairs: Pairs = [(n, t) for n, t in state.items() if n != "lm_head.weight"]
        self._stop_after = stop_after

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.pairs]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, pair in enumerate(self.pairs):
            if place == self._stop_after:
                say(event="in the middle")
                heard()
            yield pair


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def engine_of(
    command: dict[str, Any], source: FileSource
) -> tuple[PenstockWeightSyncClient, GlooTrainerWeightTransferEngine]:
    client = PenstockWeightSyncClient(command["address"], "gloo", timeout_seconds=TIMEOUT_SECONDS)
    client.trainer_epoch = command["epoch"]
    info = GlooTrainerInitInfo("127.0.0.1", 0, 2, BUCKET_BYTES, TIMEOUT_SECONDS, rank=0)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    assert isinstance(engine, GlooTrainerWeightTransferEngine)
    return client, engine


def prepare(client: PenstockWeightSyncClient, command: dict[str, Any], version: int) -> None:
    policy = weights_pb2.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{command.get('policy', 'KEEP')}")
    client.prepare(
        weights_pb2.WeightHeader(
            weight_version=version, trainer_epoch=command["epoch"], in_flight=policy
        )
    )


def send(command: dict[str, Any]) -> None:
    """Send versions one after the other through one group, each from its own model."""
    source = FileSource(Path(command["models"][0]))
    client, engine = engine_of(command, source)
    for version, path in zip(command["versions"], command["models"], strict=True):
        source.pairs = FileSource(Path(path)).pairs
        prepare(client, command, version)
        if command.get("waits"):
            say(event="prepared")
            heard()
        engine.send_weights()
        say(active=client.result.active_weight_version, pause=client.result.pause.ToMilliseconds())
    engine.shutdown()


def send_broken(command: dict[str, Any]) -> None:
    """Send one version that has a tensor with a NaN or with a wrong checksum."""
    source = FileSource(Path(command["models"][0]))
    name, tensor = source.pairs[3]
    source.pairs[3] = name, tensor.clone()
    if command["broken"] == "nan":
        source.pairs[3][1].view(-1)[5] = float("nan")
    client, engine = engine_of(command, source)
    prepare(client, command, command["versions"][0])
    client.start_weight_update()
    hashes = [0] * len(source.pairs) if command["broken"] == "checksum" else []
    engine.send_round(source.metadata(), source, hashes)


def die(command: dict[str, Any]) -> None:
    """Send half of a version; then die, or fall silent."""
    source = FileSource(Path(command["models"][0]))
    client, engine = engine_of(command, source)
    meta = source.metadata()
    specs = tuple(
        weights_pb2.TensorSpec(
            name=m.name, shape=m.shape, dtype=str(m.dtype).removeprefix("torch.")
        )
        for m in meta
    )
    client.prepare(
        weights_pb2.WeightHeader(
            weight_version=command["versions"][0], trainer_epoch=command["epoch"], tensors=specs
        )
    )
    client.start_weight_update()
    half = len(meta) // 2
    engine.send_round(meta[:half], source.pairs[:half])
    say(event="between rounds")
    if command["where"] == "between rounds":
        kill_oneself()

    def rest() -> Iterator[tuple[str, torch.Tensor]]:
        yield source.pairs[half]
        yield source.pairs[half + 1]
        if command["where"] == "in a broadcast":
            kill_oneself()
        os.kill(os.getpid(), signal.SIGSTOP)
        yield from source.pairs[half + 2 :]

    engine.send_round(meta[half:], rest())


def lose_the_server(command: dict[str, Any]) -> None:
    """Wait in the middle of a round. The test stops the server before the round continues."""
    source = FileSource(Path(command["models"][0]), stop_after=5)
    client, engine = engine_of(command, source)
    prepare(client, command, command["versions"][0])
    try:
        engine.send_weights()
    finally:
        say(event="raised", at=time.time())


def transport(command: dict[str, Any]) -> None:
    """Send with the transport that `penstock train` uses."""

    async def run() -> None:
        pairs = FileSource(Path(command["models"][0])).pairs
        payload = Payload(pairs, "float32")
        payload.fill(pairs)
        settings = CollectiveConfig(
            backend="gloo", bucket_bytes=BUCKET_BYTES, timeout_seconds=TIMEOUT_SECONDS
        )
        transport = CollectiveTransport(command["address"], settings)
        for version in command["versions"]:
            header = weights_pb2.WeightHeader(
                weight_version=version,
                trainer_epoch=command["epoch"],
                activation=weights_pb2.ACTIVATION_STAGED,
            )
            response = await transport.send(header, whole(payload, version))
            say(active=response.active_weight_version, changed=response.changed_tensor_count)
        assert transport.bytes_sent == len(command["versions"]) * payload.length_bytes
        transport.close()

    asyncio.run(run())


WORK = {
    "send": send,
    "send broken": send_broken,
    "die": die,
    "lose the server": lose_the_server,
    "transport": transport,
}


def run(command: dict[str, Any]) -> None:
    try:
        WORK[command["do"]](command)
    except WeightSyncFailed as error:
        say(failed=error.failure.reason or error.failure.code.name, why=str(error))
    except GroupBroken as error:
        say(failed="GroupBroken", why=str(error))
    except Exception as error:
        found = getattr(error, "trailing_metadata", None)
        say(failed=read_failure(error).reason if found else type(error).__name__, why=str(error))
    # Not a normal interpreter exit: that would wait for gloo.
    os._exit(0)


def main() -> None:
    say(event="ready")
    while True:
        command = json.loads(heard())
        if not (child := os.fork()):
            run(command)
        say(pid=child)
        _, status = os.waitpid(child, 0)
        say(exit=os.waitstatus_to_exitcode(status))
