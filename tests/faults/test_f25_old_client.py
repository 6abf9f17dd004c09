"""F25: a client that speaks the protocol of an earlier release works with this server.

`recorded/protocol-RELEASE.binpb` is what `buf build` made of proto/ at that release. Nothing in it
may be removed or changed (`buf breaking`). A whole walk as trainer and agent, with only the
messages of that release, must get the same answers as then. Each release adds its own file:

    buf build --exclude-source-info -o tests/faults/recorded/protocol-RELEASE.binpb
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from tests.faults.report import Report
from tests.support.fakes import expected_tokens
from tests.support.harness import header, messages, serve

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
RELEASES = sorted(path.stem.removeprefix("protocol-") for path in RECORDED.glob("*.binpb"))
BIN = Path(sys.executable).parent
MOST_TOKENS = 16
ROLLOUTS, TASKS, TRAINERS = "RolloutService", "TaskService", "TrainerService"


class OldClient:
    """Calls with the messages of a release. It neither sends nor sees anything newer."""

    def __init__(self, release: str, channel: grpc.aio.Channel) -> None:
        found = descriptor_pb2.FileDescriptorSet()
        found.ParseFromString((RECORDED / f"protocol-{release}.binpb").read_bytes())
        self._pool: Any = descriptor_pool.DescriptorPool()
        for file in found.file:
            self._pool.Add(file)
        self._channel = channel

    def message(self, name: str, **fields: Any) -> Any:
        """A message of penstock.v1 as that release defines it."""
        return GetMessageClass(self._pool.FindMessageTypeByName(f"penstock.v1.{name}"))(**fields)

    def again(self, message: Any, name: str) -> Any:
        """Convert one of today's messages to the release's definition."""
        made = self.message(name)
        made.ParseFromString(message.SerializeToString())
        return made

    def call(self, service: str, method: str) -> Any:
        found = self._pool.FindServiceByName(f"penstock.v1.{service}").methods_by_name[method]
        kind = {
            (False, False): self._channel.unary_unary,
            (False, True): self._channel.unary_stream,
            (True, True): self._channel.stream_stream,
        }[found.client_streaming, found.server_streaming]
        return kind(
            f"/penstock.v1.{service}/{method}",
            request_serializer=GetMessageClass(found.input_type).SerializeToString,
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )

    async def ask(self, service: str, method: str, **fields: Any) -> Any:
        return await self.call(service, method)(self.message(f"{method}Request", **fields))

    async def turn(self, method: str, **fields: Any) -> tuple[list[int], list[int]]:
        """The tokens of a turn, and the version of each."""
        sampling = {"max_tokens": MOST_TOKENS, "ignore_eos": True}
        request = self.message(f"{method}Request", sampling_params=sampling, **fields)
        tokens: list[int] = []
        versions: list[int] = []
        kinds: list[str] = []
        async for event in self.call(ROLLOUTS, method)(request):
            kinds.append(event.WhichOneof("event"))
            if kinds[-1] == "segment":
                part = list(event.segment.token_ids)
                tokens += part
                versions += [event.segment.weight_version] * len(part)
        assert (kinds[0], kinds[-1]) == ("started", "finished")
        return tokens, versions


async def walk(old: OldClient, name: str, prompt: list[int], step: int) -> None:
    """Use tasks, leases, turns, outcomes, a delivery, a receipt, weights and a refusal."""
    epoch, version = step, step
    outgoing: asyncio.Queue[Any] = asyncio.Queue()

    async def sent() -> AsyncGenerator[Any]:
        while (fields := await outgoing.get()) is not None:
            yield old.message("ExchangeRequest", **fields)

    exchange = old.call(TRAINERS, "Exchange")(sent())
    contract = {"max_lag": 4, "groups_per_step": 1}
    outgoing.put_nowait(
        {
            "hello": {
                "run_id": "run",
                "trainer_epoch": epoch,
                "staleness": contract,
                "weight_version": version - 1,
                "resume_step": step - 1,
            }
        }
    )
    assert (await exchange.read()).WhichOneof("message") == "welcome"
    outgoing.put_nowait({"demand": {"group_count": 1}})

    task = {"task_id": name, "group_size": 1, "tokens": {"token_ids": prompt}}
    submitted = await old.ask(TASKS, "SubmitTasks", tasks=[task])
    assert (submitted.accepted_count, submitted.duplicate_count) == (1, 0)
    leases = old.call(TASKS, "LeaseTasks")(
        old.message("LeaseTasksRequest", agent_id="old", concurrency=1)
    )
    lease = await leases.read()
    assert lease.task.task_id == name
    attempt = lease.trajectory_id
    tokens, versions = await old.turn(
        "Generate", trajectory_id=attempt, tokens={"token_ids": prompt}
    )
    assert tokens == expected_tokens(prompt, versions)[0]
    assert len(tokens) == MOST_TOKENS
    more, _ = await old.turn("Continue", trajectory_id=attempt, tokens={"token_ids": [5]})
    assert len(more) == MOST_TOKENS
    assert not (await old.ask(TASKS, "RenewLease", trajectory_ids=[attempt])).expired_trajectory_ids
    found = (await old.ask(ROLLOUTS, "GetTrajectory", trajectory_id=attempt)).trajectory
    written = [segment.token_ids for segment in found.segments]
    assert [token for part in written for token in part] == [*prompt, *tokens, 5, *more]
    closed = await old.ask(
        TASKS, "CompleteTrajectory", trajectory_id=attempt, outcome={"reward": 1.0}
    )
    assert closed.group_completed
    leases.cancel()

    delivered = (await exchange.read()).delivery
    assert delivered.group.task_id == name
    assert [t.outcome.reward for t in delivered.group.trajectories] == [1.0]
    outgoing.put_nowait({"receipt": {"delivery_ids": [delivered.delivery_id], "step": step}})

    head, data = header(version, trainer_epoch=epoch)
    upload = old.call(ROLLOUTS, "UpdateWeights")(
        iter([old.again(message, "UpdateWeightsRequest") for message in messages(head, data)])
    )
    states = [answer.state async for answer in upload]
    assert states
    info = await old.ask(ROLLOUTS, "GetServerInfo")
    assert info.active_weight_version == version
    outgoing.put_nowait({"checkpoint": {"step": step}})
    outgoing.put_nowait(None)
    while await exchange.read() is not grpc.aio.EOF:
        pass
    assert await exchange.code() == grpc.StatusCode.OK
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await old.ask(ROLLOUTS, "GetTrajectory", trajectory_id="nobody's")
    assert reason_of(refused.value) == "TRAJECTORY_UNKNOWN"


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Read the reason as any gRPC client can."""
    trailers = dict(error.trailing_metadata() or ())
    status, info = status_pb2.Status(), error_details_pb2.ErrorInfo()
    status.ParseFromString(trailers["grpc-status-details-bin"])
    assert status.details[0].Unpack(info)
    return info.reason


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.skipif(shutil.which("buf", path=str(BIN)) is None, reason="needs the extra `dev`")
def test_nothing_of_a_release_is_taken_away(release: str) -> None:
    against = RECORDED / f"protocol-{release}.binpb"
    result = subprocess.run(
        (str(BIN / "buf"), "breaking", "--against", str(against)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("release", RELEASES)
async def test_a_client_of_a_release_walks_the_whole_way(
    tmp_path: Path, release: str, report: Report, request: pytest.FixtureRequest
) -> None:
    count, steps = report.count or 2, iter(range(1, 1_000_000))

    async def happen(rng: random.Random) -> None:
        step = next(steps)
        prompt = [rng.randrange(1, 200) for _ in range(rng.randint(1, 20))]
        async with asyncio.timeout(60):
            await walk(old, f"task{step}", prompt, step)

    async with serve(tmp_path) as server:
        old = OldClient(release, server.channel)
        name = f"client of {release}"
        await report.repeat("F25 fake", name, request.node.nodeid, count, happen, "walks")
    report.survived("F25 fake", name, count, "walks")


def test_there_is_a_release() -> None:
    assert RELEASES
