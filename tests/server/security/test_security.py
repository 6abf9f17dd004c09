"""Authentication, authorization and secrets: units, and a server with TLS and tokens."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.client import AccessDenied, CredentialsUnusable, Overloaded, Patience, Task, connect
from penstock.common.token_file import (
    Role,
    hash_token,
    new_token,
)
from penstock.server.config import settings as config
from penstock.server.config.settings import ConfigError
from penstock.server.lifecycle import bind
from penstock.server.security.gate import ALLOWED, ANYBODY
from penstock.trainer.assembly import security_of
from penstock.trainer.config.trainer import ServerConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.wire.channel import MAX_METADATA_BYTES, is_loopback
from penstock.wire.failure import Failure, read_failure
from penstock.wire.security import Security, TokenSource, open_channel
from tests.faults.proxy import proxying
from tests.support.authorities import (
    COMMON_NAMES,
    Authorities,
    authority,
    make_authorities,
    write_certificate,
)
from tests.support.collector import Collector
from tests.support.harness import (
    AbortRequest,
    CompleteTrajectoryRequest,
    ContinueRequest,
    GenerateRequest,
    GetTrajectoryRequest,
    Harness,
    LeaseTasksRequest,
    Outcome,
    RenewLeaseRequest,
    StreamOptions,
    SubmitTasksRequest,
    Wire,
    collect,
    hello,
    sampling,
    sequence,
    serve,
    upload,
)
from tests.support.harness import Task as WireTask
from tests.support.processes import server_process, worker_process
from tests.support.rpcs import call, every_rpc
from tests.support.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def made(tmp_path: Path) -> Authorities:
    return make_authorities(tmp_path / "secrets")


@pytest.fixture
async def guarded(tmp_path: Path, made: Authorities) -> AsyncGenerator[Harness]:
    """A server with TLS and tokens; the harness calls it as an admin."""
    async with serve(tmp_path, *made.settings(), security=made.security("admin")) as running:
        yield running


@contextlib.asynccontextmanager
async def as_caller(harness: Harness, security: Security) -> AsyncGenerator[Any]:
    """The server's rpcs, called as another caller."""
    async with open_channel(harness.address, security) as channel:
        yield Wire(channel)


async def refused(awaitable: Any) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return read_failure(caught.value)


async def to_the_end(stream: Any) -> None:
    """Read the rest of a stream."""
    while await stream.read() is not grpc.aio.EOF:
        pass


def generate(trajectory_id: str, **fields: Any) -> Any:
    fields.setdefault("sampling_params", sampling(4))
    fields.setdefault("tokens", sequence([1, 2, 3]))
    return GenerateRequest(trajectory_id=trajectory_id, **fields)


NOW = datetime.now(UTC).replace(microsecond=0)

# A client's credentials


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
        ("127.0.0.1.example:1", False),
        ("dns:///localhost:1", False),
    ],
)
def test_a_token_goes_out_in_plaintext_to_loopback_only(address: str, loopback: bool):
    assert is_loopback(address) == loopback
    security = Security(token=new_token())
    if loopback:
        security.check(address)
        return
    with pytest.raises(CredentialsUnusable, match="not sent in plaintext") as caught:
        connect(address, security=security)
    assert security.token not in f"{caught.value} {security!r}"


def test_what_a_client_cannot_show_is_said_before_anything_is_sent(
    tmp_path: Path, made: Authorities
):
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for security, said in (
        (Security(token_file=tmp_path / "none"), "No such file"),
        (Security(token_file=empty), "does not hold a token"),
        (Security(token="two words"), "does not hold a token"),
        (Security(ca=tmp_path / "none"), "No such file"),
        (Security(certificate=made.folder / "agent-1.pem"), "given together"),
    ):
        with pytest.raises(CredentialsUnusable, match=said):
            security.check("127.0.0.1:1")
    shown = CliRunner().invoke(
        main,
        ["rollout", "--server", "10.0.0.1:1", "--reward", "a:b"],
        env={"PENSTOCK_TOKEN": new_token()},
    )
    assert shown.exit_code == 2


def test_a_token_is_read_again_for_each_call(tmp_path: Path, caplog: Any):
    file = tmp_path / "token"
    first, second = new_token(), new_token()
    file.write_text(first + "\n")
    source = TokenSource(file, "")
    assert source.metadata() == (("authorization", f"Bearer {first}"),)
    file.write_text(second)
    assert source.metadata() == (("authorization", f"Bearer {second}"),)
    # If the file is half written or missing, the client keeps the last token and logs it once.
    for broken in ("", "\xff secret"):
        file.write_text(broken, encoding="latin-1")
        assert source.metadata() == (("authorization", f"Bearer {second}"),)
    file.unlink()
    assert source.metadata() == (("authorization", f"Bearer {second}"),)
    assert caplog.text.count("continuing with the last token read") == 1
    assert "secret" not in caplog.text and second not in caplog.text


def test_the_trainer_shows_what_its_configuration_names(monkeypatch: Any, made: Authorities):
    token = new_token()
    monkeypatch.setenv("PENSTOCK_TOKEN", token)
    found = security_of(ServerConfig(address="10.0.0.1:1", ca=made.ca))
    assert (found.ca, found.token, found.encrypted) == (made.ca, token, True)
    with pytest.raises(ConfigInvalid, match="not sent in plaintext") as caught:
        security_of(ServerConfig(address="10.0.0.1:1"))
    assert token not in str(caught.value)


def test_what_a_command_line_gives_counts_over_a_file(monkeypatch: Any, made: Authorities):
    own = tuple(Path(name) for name in ("own.pem", "own.key", "own.token"))
    file = Security(
        ca=made.ca, certificate=own[0], key=own[1], server_name="engine", token_file=own[2]
    )
    assert Security().over(file) == file
    assert Security(token="t").over(file) == replace(file, token="t", token_file=None)
    given = Security(token_file=Path("t"), certificate=Path("c"), key=Path("k"), server_name="hub")
    assert given.over(file) == replace(given, ca=made.ca)
    assert Security(tls=True).over(Security()).encrypted
    # The environment has the lowest priority, as it has for the file alone.
    mine, environment = new_token(), new_token()
    monkeypatch.setenv("PENSTOCK_TOKEN", environment)
    server = ServerConfig(address="10.0.0.1:1", ca=made.ca)
    assert security_of(server, Security(token=mine)).token == mine
    assert security_of(server, Security()).token == environment


# A server's requirements

FULL = "security.certificate=c", "security.key=k", "security.tokens=t"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("listen=0.0.0.0:1",), "needs security.certificate, security.key, security.tokens;"),
        (("listen=10.0.0.1:1",), "10.0.0.1:1 can be reached from outside"),
        (("listen=[::]:1",), "can be reached"),
        (("listen=rollouts.example:1",), "can be reached"),
        (("listen=0.0.0.0:1", *FULL[:2]), "needs security.tokens;"),
        (("listen=0.0.0.0:1", FULL[2]), "needs security.certificate, security.key;"),
        (FULL[:1], "given together"),
        (("security.client_ca=a", FULL[2]), "client_ca needs security.certificate"),
        (("security.client_ca=a", *FULL[:2]), "client_ca needs security.tokens"),
    ],
)
def test_a_server_open_to_anybody_does_not_start(settings: tuple[str, ...], said: str):
    with pytest.raises(ConfigError, match=said) as caught:
        config.load(None, list(settings))
    assert "\n" not in str(caught.value)


def test_a_server_starts_where_it_is_closed_or_said_to_be():
    for settings in (
        [],
        ["listen=127.0.0.1:1"],
        ["listen=localhost:1"],
        ["listen=0.0.0.0:1", *FULL],
        ["listen=0.0.0.0:1", "security.insecure=true"],
    ):
        config.load(None, settings)


async def test_a_server_without_a_gate_binds_to_loopback_only():
    with pytest.raises(ConfigError, match="can be reached"):
        bind("0.0.0.0:0", 10)


def test_an_insecure_server_says_so_loudly(caplog: Any):
    from penstock.server.security.gate import open_gate

    open_gate(config.load(None, ["listen=0.0.0.0:1", "security.insecure=true"]))
    assert "in plaintext from anyone who reaches it" in caplog.text


def test_a_token_in_the_place_of_a_file_is_not_told_on():
    token = new_token()
    for setting in (f"security.token={token}", f"security.insecure={token}"):
        with pytest.raises(ConfigError) as caught:
            config.load(None, [setting])
        assert token not in str(caught.value)


@pytest.mark.parametrize("name", ["tokens", "certificate", "key", "client_ca"])
async def test_a_file_that_cannot_be_read_is_named_at_the_start(
    made: Authorities, tmp_path: Path, name: str
):
    from penstock.server.security.gate import open_gate

    settings = [*made.settings(mutual=True), f"security.{name}={tmp_path / 'none'}"]
    with pytest.raises(ConfigError, match="none: No such file"):
        loaded = config.load(None, ["listen=127.0.0.1:0", *settings])
        bind(loaded.listen, 10, open_gate(loaded))


# Roles


def test_the_table_of_roles_names_every_rpc_and_no_other():
    assert set(ALLOWED) | ANYBODY == {rpc.name for rpc in every_rpc()}
    assert not set(ALLOWED) & ANYBODY
    assert all(Role.ADMIN in roles for roles in ALLOWED.values())
    agent = {name.rpartition("/")[2] for name, roles in ALLOWED.items() if Role.AGENT in roles}
    assert not agent & {"UpdateWeights", "Exchange", "SubmitTasks"}


async def test_a_method_that_is_none_is_unimplemented(guarded: Harness):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await guarded.channel.unary_unary("/penstock.v1.TaskService/Nothing")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_each_role_does_its_part(guarded: Harness, made: Authorities):
    async with (
        as_caller(guarded, made.security("agent")) as agent,
        as_caller(guarded, made.security("trainer")) as trainer,
    ):
        task = WireTask(task_id="t", group_size=1, text="hi", sampling_params=sampling(4))
        await trainer.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        await upload(trainer, 1)
        exchange = await hello(trainer)
        leases = agent.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
        lease = await leases.read()
        turn = await collect(agent.Generate(generate(lease.trajectory_id, tokens=None)))
        assert turn.versions == [1] * 4
        leases.cancel()
        exchange.half_close()
        failure = await refused(upload(agent, 2))
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.PERMISSION_DENIED,
            "ROLE_NOT_ALLOWED",
        )
        assert failure.metadata == {
            "caller": "agent",
            "role": "agent",
            "method": "penstock.v1.RolloutService/UpdateWeights",
            "allowed": "admin, trainer",
        }
    assert guarded.serving.switch.active_version == 1


async def test_an_agents_trajectories_are_its_own(tmp_path: Path, made: Authorities):
    other = new_token()
    made.tokens["other"] = other
    made.write_tokens(
        other={
            "role": "agent",
            "sha256": hash_token(other).hex(),
            "expires": NOW + timedelta(hours=1),
        }
    )
    async with (
        serve(
            tmp_path, *made.settings(), security=made.security("admin"), step_seconds=0.01
        ) as running,
        as_caller(running, made.security("agent")) as agent,
        as_caller(running, made.security("other")) as rogue,
        as_caller(running, made.security("trainer")) as trainer,
    ):
        # The turn stays in flight until its agent stops it, however slowly the others connect.
        place = {"group_id": "g", "group_size": 2, "sampling_params": sampling(10_000)}
        stream = agent.Generate(generate("mine", tokens=sequence([1]), **place))
        assert (await stream.read()).HasField("started")
        groups, ids = AbortRequest(), AbortRequest()
        groups.groups.group_ids.append("g")
        ids.trajectories.trajectory_ids.append("mine")
        everything = AbortRequest()
        everything.all.SetInParent()
        for request in (groups, ids, everything):
            failure = await refused(rogue.Abort(request))
            assert failure.reason == "ROLE_NOT_ALLOWED", request
        failure = await refused(agent.Abort(everything))
        assert failure.metadata["selector"] == "all"
        await agent.Abort(ids)
        await to_the_end(stream)
        for touched in (
            rogue.GetTrajectory(GetTrajectoryRequest(trajectory_id="mine")),
            rogue.CompleteTrajectory(
                CompleteTrajectoryRequest(trajectory_id="mine", outcome=Outcome(reward=9.0))
            ),
            rogue.RenewLease(RenewLeaseRequest(trajectory_ids=["mine"])),
            collect(rogue.Continue(ContinueRequest(trajectory_id="mine", text="x"))),
            collect(rogue.Generate(generate("branch", parent_trajectory_id="mine"))),
        ):
            assert (await refused(touched)).reason == "ROLE_NOT_ALLOWED"
        assert (await agent.GetTrajectory(GetTrajectoryRequest(trajectory_id="mine"))).open
        assert (await trainer.GetTrajectory(GetTrajectoryRequest(trajectory_id="mine"))).open

        # An attempt belongs to its agent from the lease on, even before its first turn. Other
        # agents can guess the ids of siblings.
        task = WireTask(task_id="t", group_size=1, text="hi")
        await trainer.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        leases = agent.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
        leased = (await leases.read()).trajectory_id
        failure = await refused(collect(rogue.Generate(generate(leased, tokens=None))))
        assert failure.reason == "ROLE_NOT_ALLOWED"
        turn = await collect(agent.Generate(generate(leased, tokens=None)))
        assert len(turn.tokens) == 4
        # Naming a trajectory does not give a caller ownership.
        await rogue.RenewLease(RenewLeaseRequest(trajectory_ids=["next"]))
        assert len((await collect(agent.Generate(generate("next")))).tokens) == 4
        leases.cancel()


async def test_a_certificates_role_is_that_of_its_common_name(tmp_path: Path, made: Authorities):
    by_name = {role: made.security(None, name) for role, name in COMMON_NAMES.items()}
    async with (
        serve(tmp_path, *made.settings(mutual=True), security=by_name[Role.ADMIN]) as running,
        as_caller(running, by_name[Role.TRAINER]) as trainer,
        as_caller(running, by_name[Role.AGENT]) as agent,
        as_caller(running, made.security("trainer", COMMON_NAMES[Role.AGENT])) as both,
    ):
        await upload(trainer, 1)
        assert (await refused(upload(agent, 2))).metadata["caller"] == "agent-1"
        assert len((await collect(agent.Generate(generate("a")))).tokens) == 4
        # A token takes precedence over a certificate.
        await upload(both, 2)
        assert running.serving.switch.active_version == 2


# While the server runs


async def test_tokens_change_while_the_server_runs(
    guarded: Harness, made: Authorities, tmp_path: Path, caplog: Any
):
    file = tmp_path / "agents-token"
    file.write_text(made.tokens["agent"])
    async with as_caller(guarded, Security(ca=made.ca, token_file=file)) as agent:
        await collect(agent.Generate(generate("one")))
        fresh = new_token()
        replaced = {
            "role": "agent",
            "sha256": hash_token(fresh).hex(),
            "expires": NOW.replace(year=2099),
        }
        made.write_tokens(agent=replaced)
        assert (await refused(collect(agent.Generate(generate("two"))))).reason == "TOKEN_INVALID"
        file.write_text(fresh)
        await collect(agent.Generate(generate("two")))
        # An invalid or missing file leaves the tokens in force.
        for broken in (f'[tokens.agent]\ntoken = "{fresh}"', "x = = 1", None):
            if broken is None:
                made.token_file.unlink()
            else:
                made.token_file.write_text(broken)
            for _ in range(3):
                await agent.RenewLease(RenewLeaseRequest())
        assert caplog.text.count("keeping the previous tokens") == 3
        assert fresh not in caplog.text
        made.write_tokens(agent=None)
        assert (await refused(agent.RenewLease(RenewLeaseRequest()))).reason == "TOKEN_INVALID"


async def test_a_stream_ends_with_what_its_caller_was_let_in_by(
    guarded: Harness, made: Authorities
):
    soon = datetime.now(UTC) + timedelta(seconds=0.6)
    token = made.tokens["agent"]
    made.write_tokens(agent={"role": "agent", "sha256": hash_token(token).hex(), "expires": soon})
    async with (
        as_caller(guarded, made.security("agent")) as agent,
        as_caller(guarded, made.security("trainer")) as trainer,
        asyncio.timeout(20),
    ):
        leases = agent.LeaseTasks(LeaseTasksRequest(agent_id="a", concurrency=1))
        exchange = await hello(trainer)
        failure = await refused(leases.read())
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.UNAVAILABLE,
            "CREDENTIAL_ENDED",
        )
        # A revoked credential ends its streams at the next call of any caller.
        made.write_tokens(trainer=None)
        await guarded.wire.RenewLease(RenewLeaseRequest())
        assert (await refused(exchange.call.read())).reason == "CREDENTIAL_ENDED"
        assert (await refused(hello(trainer))).reason == "TOKEN_INVALID"


async def test_an_agent_works_on_over_a_token_that_is_replaced(
    guarded: Harness, made: Authorities, tmp_path: Path
):
    file = tmp_path / "token"
    file.write_text(made.tokens["agent"])
    tasks = [WireTask(task_id=str(i), group_size=1, text="hi") for i in range(6)]
    await guarded.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
    done = 0

    async def agent(task: Task, trajectory: Any) -> float:
        nonlocal done
        await trajectory.turn(max_tokens=4)
        done += 1
        if done == 3:
            fresh = new_token()
            file.write_text(fresh)
            expires = NOW + timedelta(hours=1)
            made.write_tokens(
                **{
                    "agent": None,
                    "agent@2": {
                        "role": "agent",
                        "sha256": hash_token(fresh).hex(),
                        "expires": expires,
                    },
                }
            )
        return 1.0

    security = Security(ca=made.ca, token_file=file)
    async with connect(guarded.address, security=security) as client, asyncio.timeout(20):
        statistics = await client.work(agent, concurrency=1, attempts=6)
    assert statistics.scored_count == 6


async def test_a_certificate_changes_while_the_server_runs(
    guarded: Harness, made: Authorities, tmp_path: Path, caplog: Any
):
    write_certificate(made.folder, "server", authority().issue_cert("renamed.example"))
    renamed = Security(
        ca=made.ca, token=made.tokens["agent"], server_name="renamed.example", tls=True
    )
    async with open_channel(guarded.address, renamed, own_connection=True) as channel:
        assert await collect(Wire(channel).Generate(generate("one")))
    # The server keeps the previous certificate if the new one is unusable.
    (made.folder / "server.pem").write_text("nothing")
    async with open_channel(guarded.address, renamed, own_connection=True) as channel:
        assert await collect(Wire(channel).Generate(generate("two")))
    assert "keeping the previous certificate" in caplog.text


async def test_a_server_far_away_is_reached_by_tls(guarded: Harness, made: Authorities):
    async with proxying(guarded.port) as proxy, asyncio.timeout(20):
        for way in (proxy.up, proxy.down):
            way.latency_seconds = 0.15
        security = made.security("agent")
        async with open_channel(proxy.address, security, own_connection=True) as channel:
            # The first call on a connection, with no retry.
            turn = await collect(Wire(channel).Generate(generate("far")))
    assert len(turn.tokens) == 4


# Limits


async def test_a_caller_has_so_many_turns_in_flight(tmp_path: Path):
    limited = ("limits.caller.turns_in_flight=2",)
    async with serve(tmp_path, *limited, step_seconds=0.02) as running:
        long = {"sampling_params": sampling(20)}
        first = running.wire.Generate(generate("a", **long))
        detached = running.wire.Generate(
            generate("b", stream_options=StreamOptions(detach=True), **long)
        )
        await first.read()
        await detached.read()
        # The detached turn continues and still counts.
        detached.cancel()
        failure = await refused(collect(running.wire.Generate(generate("c"))))
        assert (failure.code, failure.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CALLER_LIMIT",
        )
        assert failure.metadata["limit"] == "turns_in_flight"
        assert failure.retry_after_seconds == 1.0
        with pytest.raises(Overloaded):
            async with connect(running.address, patience=Patience(overload_seconds=0.1)) as client:
                await client.trajectory("d").turn("hi")
        await to_the_end(first)
        await running.serving.turns.wait_idle()
        for name in ("c", "d", "e"):
            await collect(running.wire.Generate(generate(name)))
        # Refused and failed calls free their place.
        for _ in range(5):
            await refused(collect(running.wire.Continue(ContinueRequest(trajectory_id="none"))))
        await collect(running.wire.Generate(generate("f")))


async def test_a_caller_has_so_many_tokens_in_flight(tmp_path: Path):
    async with serve(tmp_path, "limits.caller.tokens_in_flight=20", step_seconds=0.01) as running:
        first = running.wire.Generate(generate("a", sampling_params=sampling(17)))
        await first.read()
        failure = await refused(collect(running.wire.Generate(generate("b"))))
        assert failure.metadata["limit"] == "tokens_in_flight"
        assert failure.metadata["count"] == "20"
        await to_the_end(first)
        await running.serving.turns.wait_idle()
        await collect(running.wire.Generate(generate("b")))


async def test_a_caller_has_so_many_trajectories_open(tmp_path: Path):
    async with serve(tmp_path, "limits.caller.open_trajectories=2") as running:
        for name in ("a", "b"):
            await running.generate(name)
        failure = await refused(running.generate("c"))
        assert failure.metadata["limit"] == "open_trajectories"
        # Extending a trajectory does not open another; completing one makes room.
        await running.resume("a", text="x")
        await running.complete("a")
        await running.generate("c")


@pytest.mark.parametrize(
    ("limit", "most"),
    [("open_trajectories", 2), ("turns_in_flight", 2), ("tokens_in_flight", 30_000)],
)
async def test_turns_that_begin_together_are_counted_together(
    tmp_path: Path, limit: str, most: int
):
    """A long prompt is encoded concurrently with the others, so no turn has begun
    when the last call is admitted."""
    settings = f"limits.caller.{limit}={most}"
    async with serve(tmp_path, settings, step_seconds=0.05, max_context=40_000) as running:
        calls = [
            running.wire.Generate(
                GenerateRequest(
                    trajectory_id=f"t{number}", text="h" * 20_000, sampling_params=sampling(40)
                )
            )
            for number in range(20)
        ]
        begun = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
        failures = [
            read_failure(error) for error in begun if isinstance(error, grpc.aio.AioRpcError)
        ]
        assert [failure.metadata["limit"] for failure in failures] == [limit] * 18
        for call in calls:
            call.cancel()
        # Refused calls hold no place.
        await running.serving.turns.wait_idle()
        for number in range(20):
            if running.serving.store.find(f"t{number}") is not None:
                await running.complete(f"t{number}")
        await running.generate("after")


async def test_a_caller_has_so_many_calls_open(tmp_path: Path):
    async with serve(tmp_path, "limits.caller.calls=2") as running, asyncio.timeout(20):
        watch = running.channel.unary_stream("/grpc.health.v1.Health/Watch")
        streams = [watch(b""), watch(b"")]
        for stream in streams:
            await stream.read()
        failure = await refused(running.generate("c"))
        assert failure.metadata["limit"] == "calls"
        for stream in streams:
            stream.cancel()
        async with connect(running.address) as client:
            # The client retries, as the server advised.
            assert (await client.trajectory("c").turn("hi", max_tokens=2)).finish_reason


async def test_messages_and_metadata_have_their_bounds(guarded: Harness, tmp_path: Path):
    for rpc in every_rpc():
        big = (("penstock-test", "x" * MAX_METADATA_BYTES),)
        failure = await call(guarded.channel, rpc, metadata=big)
        assert failure is not None and failure.reason == "MESSAGE_TOO_LARGE", (rpc, failure)
        assert failure.metadata["limit"] == str(MAX_METADATA_BYTES)
    small = tmp_path / "small"
    small.mkdir()
    async with serve(small, "limits.caller.message_bytes=100") as running:
        for rpc in every_rpc():
            failure = await call(running.channel, rpc, b"x" * 101)
            assert failure is not None and failure.reason == "MESSAGE_TOO_LARGE", (rpc, failure)
            failure = await call(running.channel, rpc, b"\xff")
            assert failure is not None and failure.reason == "MALFORMED_MESSAGE", (rpc, failure)


async def test_callers_are_counted_apart(tmp_path: Path, made: Authorities):
    limited = ("limits.caller.open_trajectories=1", *made.settings())
    async with (
        serve(tmp_path, *limited, security=made.security("admin")) as running,
        as_caller(running, made.security("agent")) as agent,
    ):
        await running.generate("a")
        await collect(agent.Generate(generate("b")))
        assert (await refused(running.generate("c"))).metadata["caller"] == "admin"
        assert (await refused(collect(agent.Generate(generate("c"))))).metadata["caller"] == "agent"


# Code comes only from the operator

# Every place in the product that turns a name or bytes into code.
LOADS_CODE = {
    # `--reward`, `--generate`, and a loss or an advantage in the trainer's own configuration.
    "common/functions.py": {"import_module"},
    # The command line's own modules, by names in its source.
    "cli/loading.py": {"import_module"},
    "cli/shell.py": {"import_module"},
    # Functions written for slime, which name others in arguments from the operator.
    "client/plugins/slime_functions.py": {"import_module"},
    # The names that a package offers, from its own source.
    "__init__.py": {"import_module"},
    "rewards/__init__.py": {"import_module"},
    # An answer's code and the tests of it, in processes that do nothing else.
    "rewards/candidate.py": {"compile", "exec"},
    "rewards/judging.py": {"compile", "exec"},
    # The source of the installed megatron-core.
    "policy/megatron/hook.py": {"compile"},
}
RUNS = {"eval", "exec", "compile", "__import__", "import_module"}
LOADERS = {"importlib", "runpy", "pickle", "cloudpickle", "marshal", "shelve", "dill"}


def names_code(path: Path) -> set[str]:
    """The calls and imports in a file that turn a name or bytes into code."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            found.update(LOADERS & {name.split(".")[0] for name in module} - {"importlib"})
        if not isinstance(node, ast.Call) or all(isinstance(a, ast.Constant) for a in node.args):
            continue  # Constant arguments, as in `import_module("json")`, come from the source.
        function, owner = node.func, ""
        if isinstance(function, ast.Attribute):
            owner = ast.unparse(function.value).split(".")[0]
        name = getattr(function, "attr", getattr(function, "id", ""))
        weights_only = any(word.arg == "weights_only" for word in node.keywords)
        if (not owner or owner in LOADERS) and name in RUNS:
            found.add(name)
        elif (owner in LOADERS and name.startswith(("spec_from", "load"))) or (
            owner == "torch" and name == "load" and not weights_only
        ):
            found.add(f"{owner}.{name}")
    return found


def test_nothing_but_the_command_line_names_code():
    found: dict[str, set[str]] = {}
    for package in ("server", "trainer", "clients/python/penstock"):
        for path in (ROOT / package).rglob("*.py"):
            if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                inside = path.relative_to(ROOT / package)
                if names := names_code(path):
                    found[str(inside)] = names
    assert found == LOADS_CODE


async def test_a_task_that_names_code_runs_none(harness: Harness, tmp_path: Path, monkeypatch: Any):
    (tmp_path / "canary_of_a_task.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = "canary_of_a_task:reward"
    async with connect(harness.address) as client:
        await client.submit_tasks(
            [
                Task(
                    "t",
                    "canary_of_a_task:generate",
                    {"reward": names, "generate": names, "__reduce__": names, "answer": names},
                )
            ]
        )

        async def agent(task: Task, trajectory: Any) -> float:
            await trajectory.turn(max_tokens=2)
            return 1.0

        async with asyncio.timeout(20):
            await client.work(agent, concurrency=1, attempts=1)
    assert "canary_of_a_task" not in sys.modules


# Secrets

REWARD = "def reward(task, trajectory):\n    return float(len(trajectory.text) % 2)\n"


async def test_a_run_over_tls_writes_no_secret_anywhere(
    tmp_path: Path, made: Authorities, monkeypatch: Any
):
    (tmp_path / "run_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PENSTOCK_LOG", "DEBUG")
    collector = Collector()
    traces, port = await collector.serve()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    for name, text in made.tokens.items():
        (made.folder / f"{name}-token").write_text(text)
    run, model = tmp_path / "run", make_tiny_model(tmp_path / "model")
    run.mkdir()
    settings = [part for setting in made.settings() for part in ("--set", setting)]
    printed: list[str] = []
    async with server_process(run, *settings, "--model", str(model)) as server:
        trusted = ("--ca", str(made.ca), "--token-file")
        agents = (*trusted, str(made.folder / "agent-token"), "--reward", "run_reward:reward")
        config = trainer_config(tmp_path, made, server.address, model)
        async with (
            worker_process(run, server.address, *agents),
            connect(server.address, security=made.security("trainer")) as client,
            asyncio.timeout(60),
        ):
            status, text = await command("train", str(config))
            assert status == 0, text
            printed.append(text)
            assert (await client.server_info()).active_weight_version >= 1
            with pytest.raises(AccessDenied) as denied:
                await client.trajectory("x").turn("hi")
            printed.append(f"{denied.value} {denied.value.metadata}")
            token = str(made.folder / "expired-token")
            status, text = await command("weights", "show", server.address, *trusted, token)
            assert status == 1 and "TOKEN_INVALID: the token expired" in text
            printed.append(text)
    await traces.stop(1)
    assert collector.spans
    printed += [f"{service} {span}" for service, span in collector.spans]
    printed += await asyncio.to_thread(_dry_runs, made, config)
    (run / "printed").write_text("\n".join(printed))
    keys = [path.read_text().splitlines()[1] for path in made.folder.glob("*-key.pem")]
    written = [path for path in run.rglob("*") if path.is_file()]
    assert {"server.log", "worker.log", "printed", "metrics.jsonl"} <= {p.name for p in written}
    for path in written:
        data = path.read_bytes()
        for secret in (*made.tokens.values(), *keys):
            assert secret.encode() not in data, path
            # Check part of the secret too, because an abbreviated secret would also leak.
            assert secret[-20:].encode() not in data, path


async def command(*arguments: str) -> tuple[int, str]:
    """Run `penstock`; return its exit status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text = (await process.communicate())[0].decode()
    return process.returncode or 0, text


def trainer_config(folder: Path, made: Authorities, address: str, model: Path) -> Path:
    """A configuration of one step on two prompts."""
    (folder / "data.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    found = folder / "trainer.toml"
    found.write_text(
        f'''
        server = {{ address = "{address}", ca = "{made.ca}", token_file = "{made.folder}/trainer-token" }}
        run = {{ out = "{folder}/run/out", steps = 1 }}
        model = {{ path = "{model}", dtype = "float32", threads = 1 }}
        data.group_size = 2
        data.sampling.max_tokens = 8
        data.jsonl.path = "{folder}/data.jsonl"
        train = {{ groups_per_step = 2, learning_rate = 1e-3 }}
        checkpoint = {{ every_steps = 1 }}
        '''
    )
    return found


def _dry_runs(made: Authorities, config: Path) -> list[str]:
    """The dry-run output of the trainer and the server, and the output for a misplaced token."""
    token = made.tokens["trainer"]
    environment = {"PENSTOCK_TOKEN": token}
    first = CliRunner().invoke(main, ["train", str(config), "--dry-run"], env=environment)
    assert first.exit_code == 0, first.output
    mistaken = ["--set", f"server.token={token}", "--dry-run"]
    wrong = CliRunner().invoke(main, ["train", str(config), *mistaken])
    assert wrong.exit_code == 2, wrong.output
    settings = [part for setting in made.settings() for part in ("--set", setting)]
    second = subprocess.run(
        [sys.executable, "-m", "tests.support.fake_serve", *settings, "--dry-run"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        check=True,
    )
    return [first.output, wrong.output, second.stdout, second.stderr]
