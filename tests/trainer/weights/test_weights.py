"""How weights move from step to step: differences, rejected switches, the probe, and records.

The whole run is in the test's process, with a policy that computes nothing and a scripted server.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from opentelemetry import metrics as otel
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from rich.console import Console

from penstock.trainer.core.errors import SwitchRejected, WeightsRefused
from penstock.trainer.metrics.metrics import MetricsWriter
from penstock.trainer.metrics.step_record import StepRecord
from penstock.v1 import rollout_service_pb2
from penstock.wire import codec
from penstock.wire.messages import Rejection, WeightReceipt
from penstock.wire.messages import WeightProbeResult as ProbeResult
from tests.support.scripted_trainer_server import Received, ScriptedServer, Session, refuse
from tests.support.trainer_walk import Scalars, StillPolicy, delivery, greet, running

ELEMENTS = 10_000


class MovingPolicy(StillPolicy):
    """Each step changes a few elements of one tensor."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.copies += 1
        moved = torch.arange(ELEMENTS, dtype=torch.float32)
        moved[: 10 * self.steps] += 1e-3
        yield "a.weight", torch.full((3,), 2.0)
        yield "b.weight", moved


class Following(ScriptedServer):
    """A server that accepts every upload and answers each switch with the next of `answers`."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(self._serve)
        self._answers = list(answers)
        """A reason to reject with, a probe's difference, or None. Once these run out, every answer
        is None.
        """
        self.received: list[Received] = []
        self.heard: list[str] = []
        self.active = 0
        self._held: dict[int, dict[str, bytes]] = {}
        self.changed_tensor_count = 1

    @property
    def bases(self) -> list[int]:
        return [one.header.base_weight_version for one in self.received]

    def tensors(self, version: int) -> dict[str, bytes]:
        return self._held[version]

    async def _update(self, requests: AsyncIterator[Any], context: Any) -> None:
        if self.uploads:
            await super()._update(requests, context)
            return
        received = Received(self.changed_tensor_count)
        self.received.append(received)
        try:
            await received.take(requests, context)
            header = received.header
            base = self._held.get(header.base_weight_version)
            assert header.base_weight_version in (0, self.active)
            self._held[header.weight_version] = received.tensors(base)
        except AssertionError as error:
            self.failures.append(error)
            raise

    async def _serve(self, session: Session) -> None:
        await greet(session, self.active)
        number = 0
        async for request in session.requests:
            kind = request.WhichOneof("message")
            self.heard.append(kind)
            if kind == "switch_weights":
                version = request.switch_weights.weight_version
                self.heard[-1] = f"switch {version}"
                await session.send(weight_receipt=self._answer(version))
            elif kind == "receipt":
                self.heard[-1] = f"receipt {request.receipt.step}"
            elif kind == "demand":
                await session.send(delivery=delivery(number))
                number += 1

    def _answer(self, version: int) -> Any:
        answer = self._answers.pop(0) if self._answers else None
        if isinstance(answer, str):
            # The version in use can have the same number: only `rejection` shows that the switch
            # was refused.
            active = version if answer == "WEIGHTS_INCONSISTENT" else self.active
            return WeightReceipt(
                weight_version=version,
                active_weight_version=active,
                rejection=Rejection(reason=answer, message="it did not take"),
            )
        self.active = version
        receipt = WeightReceipt(weight_version=version, active_weight_version=version)
        if answer is not None:
            receipt.probe.CopyFrom(ProbeResult(mean_difference=answer, max_difference=answer))
        return receipt


async def test_only_what_a_step_changed_travels_and_the_record_says_so(tmp_path: Path) -> None:
    policy = MovingPolicy()
    async with (
        Following() as server,
        running(
            tmp_path, server.address, steps=5, policy=policy, weights={"anchor_every": 4}
        ) as run,
    ):
        await run.ends()
        dense = run.publisher.length_bytes
    assert server.bases == [0, 1, 2, 3, 0]
    assert [record["delta"] for record in run.records] == [False, True, True, True, False]
    for record, received in zip(run.records, server.received, strict=True):
        assert record["upload_bytes"] == len(received.payload)
        assert record["upload_dense_bytes"] == dense > 4 * ELEMENTS
        assert record["changed_tensors"] == 1
        assert record["unchanged"] is False
        assert record["probe_difference"] is None
    assert run.records[0]["changed_elements_ratio"] is None
    assert run.records[1]["changed_elements_ratio"] == 10 / (ELEMENTS + 3)
    assert run.records[1]["upload_bytes"] < dense / 100
    final = {name: tensor.numpy().tobytes() for name, tensor in policy.weights()}
    assert server.tensors(5) == final


@pytest.mark.parametrize(
    "reason",
    [
        "WEIGHT_LOAD_FAILED",
        "PROBE_MISMATCH",
        "WEIGHTS_INCONSISTENT",
        "WEIGHT_VERSION_NOT_STAGED",
    ],
)
async def test_a_rejected_switch_is_asked_for_once_more_with_the_whole_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    async with (
        Following(None, reason) as server,
        running(tmp_path, server.address, steps=4, policy=MovingPolicy()) as run,
    ):
        await run.ends()
        dense = run.publisher.length_bytes
    # Version 2 is sent twice, the second time whole; then differences follow from it.
    assert [one.header.weight_version for one in server.received] == [1, 2, 2, 3, 4]
    assert server.bases == [0, 1, 0, 2, 3]
    assert server.tensors(2) == server.received[2].tensors()
    # Its groups get one receipt, with the first switch.
    told = [said for said in server.heard if said.startswith(("switch", "receipt"))]
    receipts = [said for said in told if said.startswith("receipt")]
    assert receipts == ["receipt 1", "receipt 2", "receipt 3", "receipt 4"]
    assert [s for s in told if s.startswith("switch")] == [f"switch {v}" for v in (1, 2, 2, 3, 4)]
    assert told.index("receipt 2") == told.index("switch 2") + 1
    second = run.records[1]
    assert second["upload_bytes"] == len(server.received[1].payload) + dense
    assert second["delta"] is False
    assert [record["step"] for record in run.records] == [1, 2, 3, 4]
    assert f"{reason}: it did not take; sending it once more, whole" in caplog.text
    assert run.policy.steps == 4


async def test_a_version_rejected_twice_ends_the_run(tmp_path: Path) -> None:
    async with (
        Following(None, "PROBE_MISMATCH", "WEIGHT_LOAD_FAILED") as server,
        running(tmp_path, server.address, policy=MovingPolicy()) as run,
    ):
        with pytest.RaisesGroup(pytest.RaisesGroup(WeightsRefused)) as caught:
            await run.ends()
    error = caught.value.exceptions[0].exceptions[0]
    assert str(error) == (
        "version 2 was sent whole and rejected again: WEIGHT_LOAD_FAILED: it did not take"
    )
    assert [record["step"] for record in run.records] == [1]


async def test_another_rejection_ends_the_run_at_once(tmp_path: Path) -> None:
    async with (
        Following("ENGINE_LOST") as server,
        running(tmp_path, server.address, policy=MovingPolicy()) as run,
    ):
        with pytest.RaisesGroup(pytest.RaisesGroup(SwitchRejected)):
            await run.ends()
    assert len(server.received) == 1


async def test_a_server_with_another_base_costs_a_whole_version_and_no_more(
    tmp_path: Path,
) -> None:
    refused: list[int] = []

    async def mismatch(requests: AsyncIterator[Any], context: Any) -> None:
        refused.append((await anext(requests)).header.base_weight_version)
        await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "BASE_VERSION_MISMATCH")

    server = Following()
    take = Received().take

    async def first(requests: AsyncIterator[Any], context: Any) -> None:
        await take(requests, context)
        server.uploads.append(mismatch)

    server.uploads.append(first)
    async with (
        server,
        running(tmp_path, server.address, steps=3, policy=MovingPolicy()) as run,
    ):
        await run.ends()
    assert refused == [1]
    assert server.bases == [0, 2]
    assert [record["delta"] for record in run.records] == [False, False, True]


async def test_the_probe_is_the_beginning_of_the_first_trajectory_and_goes_with_every_version(
    tmp_path: Path,
) -> None:
    settings = {"probe": {"tokens": 3, "tolerance": 0.25}}
    async with (
        Following(0.125, None, 0.0625) as server,
        running(tmp_path, server.address, steps=3, policy=MovingPolicy(), weights=settings) as run,
    ):
        await run.ends()
    # Two prompt tokens and one policy token.
    assert run.probe.token_ids == (1, 2, 3)
    for received in server.received:
        probe = received.header.probe
        assert codec.token_ids(probe).tolist() == [1, 2, 3]
        assert codec.logprobs(probe).tolist() == [-2.0, -2.0]
        assert probe.tolerance == 0.25
    assert [record["probe_difference"] for record in run.records] == [0.125, None, 0.0625]


async def test_a_resumed_run_keeps_its_probe(tmp_path: Path) -> None:
    async with (
        Following() as server,
        running(
            tmp_path,
            server.address,
            steps=1,
            probe=(9, 8, 7, 6),
            weights={"probe": {"tokens": 3}},
        ) as run,
    ):
        await run.ends()
    assert codec.token_ids(server.received[0].header.probe).tolist() == [9, 8, 7]


async def test_an_update_that_changes_no_tensor_is_an_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Following()
    server.changed_tensor_count = 0
    async with server, running(tmp_path, server.address, steps=1) as run:
        await run.ends()
    (record,) = run.records
    assert (record["unchanged"], record["changed_tensors"]) == (True, 0)
    assert "version 1 changes no tensor" in caplog.text


async def test_it_is_one_too_where_only_the_trainer_can_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class StuckPolicy(MovingPolicy):
        def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a.weight", torch.full((3,), 2.0)

    # A restarted server has nothing to compare with, and reports that every tensor changed.
    async with (
        Following() as server,
        running(tmp_path, server.address, steps=3, policy=StuckPolicy()) as run,
    ):
        await run.ends()
    assert [record["changed_tensors"] for record in run.records] == [1, 1, 1]
    assert [record["unchanged"] for record in run.records] == [True, True, True]
    assert "version 1 changes no tensor" in caplog.text


@pytest.mark.parametrize("terminal", [True, False])
def test_the_alarm_is_in_the_table_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(otel, "get_meter", provider.get_meter)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=220)
    with contextlib.closing(MetricsWriter(tmp_path, Scalars(), console, steps=9)) as writer:
        for unchanged in (False, True):
            record = StepRecord(1, unchanged=unchanged, upload_bytes=300, upload_dense_bytes=10**9)
            writer.write(record, writer.begin_step(1))
    shown = out.getvalue()
    # A terminal redraws the table repeatedly.
    assert shown.count("unchanged!") >= 1 if terminal else shown.count("unchanged!") == 1
    assert "0.000" in shown
    data = reader.get_metrics_data()
    assert data is not None
    counted = {
        metric.name: metric.data.data_points[0].value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "penstock.trainer.weights.unchanged"
    }
    assert counted == {"penstock.trainer.weights.unchanged": 1}
    provider.shutdown()


async def test_a_server_that_serves_nothing_is_given_weights_before_the_first_step(
    tmp_path: Path,
) -> None:
    server = Following()
    replica = server.info.replicas.add()
    replica.state = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
    async with server, running(tmp_path, server.address, steps=1) as run:
        await run.ends()
    told = [said for said in server.heard if said.startswith(("switch", "demand"))]
    assert told[:3] == ["switch 1", "demand", "switch 2"]
    assert server.bases == [0, 1]


async def test_an_engine_of_a_hub_that_is_away_costs_a_run_nothing(tmp_path: Path) -> None:
    server = Following()
    for state in (
        rollout_service_pb2.REPLICA_STATE_SERVING,
        rollout_service_pb2.REPLICA_STATE_UNAVAILABLE,
    ):
        server.info.replicas.add().state = state
    async with server, running(tmp_path, server.address, steps=1) as run:
        await run.ends()
    told = [said for said in server.heard if said.startswith(("switch", "demand"))]
    assert told[:2] == ["demand", "switch 1"]
    assert server.bases == [0]
