"""F18: missing, expired and wrong-role credentials, and plaintext on a TLS port, for every rpc.

Each refusal has the status and the reason of the table, repeats nothing that was sent, and leaves
the server unchanged.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from penstock.common.token_file import Role, new_token
from penstock.server.security.gate import ALLOWED, ANYBODY
from penstock.wire.failure import Failure
from penstock.wire.security import Security, open_channel
from tests.faults.report import Report
from tests.support.authorities import COMMON_NAMES, Authorities, make_authorities
from tests.support.harness import Harness, serve
from tests.support.rpcs import Rpc, call, every_rpc

RPCS = every_rpc()
WHERE = "F18 server"
# Some parse as a message of some kind, some do not.
BODIES = (b"", b"\x0a\x01x", b"\xff", b"x" * 5000)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncGenerator[tuple[Harness, Authorities]]:
    """A server that requires TLS and a token. The harness has an admin's."""
    made = make_authorities(tmp_path / "secrets")
    async with serve(tmp_path, *made.settings(), security=made.security("admin")) as running:
        yield running, made


def rounds(report: Report) -> list[random.Random]:
    return [random.Random(report.seed + case) for case in range(report.count or 1)]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def said(failure: Failure | None) -> tuple[grpc.StatusCode, str]:
    assert failure is not None
    return failure.code, failure.reason


def tells(failure: Failure | None, secret: str) -> bool:
    return failure is not None and secret in f"{failure.message} {failure.metadata}"


async def still_serves(harness: Harness, name: str) -> None:
    turn = await harness.generate(name)
    assert len(turn.tokens) == 16


NO_TOKEN = (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_MISSING")
BAD_TOKEN = (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
WRONG_ROLE = (grpc.StatusCode.PERMISSION_DENIED, "ROLE_NOT_ALLOWED")


def unknown_metadata(
    made: Authorities, chooser: random.Random
) -> list[tuple[tuple[str, str], ...]]:
    """Headers in place of a token, none of them valid."""
    good = made.tokens[chooser.choice(["agent", "trainer", "admin"])]
    return [
        bearer(new_token()),
        bearer(""),
        bearer(good[:-1]),
        bearer(good + "x"),
        bearer(good.upper()),
        (("authorization", good),),
        (("authorization", f"Basic {good}"),),
        (*bearer(good), *bearer(good)),
    ]


async def test_f18_nobody_enters_without_a_token(
    guarded: tuple[Harness, Authorities], report: Report
) -> None:
    harness, made = guarded
    done = 0
    async with open_channel(harness.address, Security(ca=made.ca)) as channel:
        for chooser in rounds(report):
            for rpc in chooser.sample(RPCS, len(RPCS)):
                body = chooser.choice(BODIES)
                failure = await call(channel, rpc, body, open_ended=chooser.random() < 0.5)
                done += 1
                if rpc.name not in ANYBODY:
                    assert said(failure) == NO_TOKEN, (rpc, failure)
                else:
                    assert failure is None or failure.code != grpc.StatusCode.UNAUTHENTICATED
    await still_serves(harness, "after")
    report.survived(WHERE, "no token", done, "calls")


async def test_f18_nobody_enters_with_what_is_no_token(
    guarded: tuple[Harness, Authorities], report: Report
) -> None:
    harness, made = guarded
    done = 0
    async with open_channel(harness.address, Security(ca=made.ca)) as channel:
        for chooser in rounds(report):
            for rpc in chooser.sample(RPCS, len(RPCS)):
                if rpc.name in ANYBODY:
                    continue
                kinds = unknown_metadata(made, chooser)
                for metadata in kinds if report.count else chooser.sample(kinds, 2):
                    failure = await call(channel, rpc, metadata=metadata)
                    done += 1
                    assert said(failure) == BAD_TOKEN, (rpc, failure)
                    sent = metadata[0][1].rpartition(" ")[2]
                    assert not sent or not tells(failure, sent)
    await still_serves(harness, "after")
    report.survived(WHERE, "unknown or malformed token", done, "calls")


async def test_f18_nobody_enters_with_an_expired_or_revoked_token(
    guarded: tuple[Harness, Authorities], report: Report
) -> None:
    harness, made = guarded
    done = 0
    async with open_channel(harness.address, Security(ca=made.ca)) as channel:
        for chooser in rounds(report):
            for rpc in chooser.sample(RPCS, len(RPCS)):
                if rpc.name in ANYBODY:
                    continue
                made.write_tokens()
                role = chooser.choice(sorted(ALLOWED[rpc.name]))
                let_in = await call(channel, rpc, metadata=bearer(made.tokens[role]), seconds=0.5)
                assert let_in is None or said(let_in) not in (NO_TOKEN, BAD_TOKEN, WRONG_ROLE)
                made.write_tokens(**{role: None})
                for name in (role, "expired"):
                    token = made.tokens[name]
                    failure = await call(channel, rpc, metadata=bearer(token))
                    done += 1
                    assert said(failure) == BAD_TOKEN, (rpc, name, failure)
                    assert not tells(failure, token)
    made.write_tokens()
    await still_serves(harness, "after")
    report.survived(WHERE, "expired or revoked token", done, "calls")


async def test_f18_nobody_calls_what_its_role_may_not(
    guarded: tuple[Harness, Authorities], report: Report
) -> None:
    harness, made = guarded
    done = 0
    async with open_channel(harness.address, Security(ca=made.ca)) as channel:
        for chooser in rounds(report):
            for rpc in chooser.sample(RPCS, len(RPCS)):
                for role in set(Role) - set(ALLOWED.get(rpc.name, Role)):
                    body = chooser.choice(BODIES)
                    metadata = bearer(made.tokens[role])
                    failure = await call(channel, rpc, body, metadata=metadata)
                    done += 1
                    assert said(failure) == WRONG_ROLE, (rpc, role, failure)
                    assert failure is not None and failure.metadata["role"] == role
    assert harness.serving.switch.active_version == 0
    await still_serves(harness, "after")
    report.survived(WHERE, "role that may not", done, "calls")


async def refuses_the_connection(
    harness: Harness, credentials: grpc.ChannelCredentials | None, token: str, rpcs: list[Rpc]
) -> int:
    # Without retries: gRPC would repeat idempotent calls.
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(harness.address, options=options)
    else:
        channel = grpc.aio.secure_channel(harness.address, credentials, options=options)
    async with channel:
        for rpc in rpcs:
            failure = await call(channel, rpc, metadata=bearer(token))
            assert failure is not None, rpc
            assert failure.code == grpc.StatusCode.UNAVAILABLE, (rpc, failure)
            assert not tells(failure, token)
    return len(rpcs)


def certified(made: Authorities, name: str | None) -> grpc.ChannelCredentials:
    """TLS with the common authority, and the certificate of this name."""
    own = [(made.folder / f"{name}{end}").read_bytes() for end in ("-key.pem", ".pem") if name]
    return grpc.ssl_channel_credentials(made.ca.read_bytes(), *own)


async def test_f18_a_tls_port_takes_neither_plaintext_nor_strangers(
    guarded: tuple[Harness, Authorities], report: Report, tmp_path: Path
) -> None:
    harness, made = guarded
    done = 0
    for chooser in rounds(report):
        rpcs = chooser.sample(RPCS, len(RPCS))
        done += await refuses_the_connection(harness, None, made.tokens["admin"], rpcs)
    await still_serves(harness, "after")
    report.survived(WHERE, "plaintext on a TLS port", done, "calls")

    (tmp_path / "mutual").mkdir()
    settings = made.settings(mutual=True)
    as_admin = made.security(None, COMMON_NAMES[Role.ADMIN])
    done = 0
    async with serve(tmp_path / "mutual", *settings, security=as_admin) as mutual:
        for chooser in rounds(report):
            rpcs = chooser.sample(RPCS, len(RPCS))
            # Neither a token without a certificate, nor a certificate of another authority.
            for name in (None, "stranger"):
                credentials = certified(made, name)
                token = made.tokens["admin"]
                done += await refuses_the_connection(mutual, credentials, token, rpcs)
            async with open_channel(mutual.address, made.security(None, "nobody")) as channel:
                for rpc in rpcs:
                    failure = await call(channel, rpc, seconds=0.5 if rpc.name in ANYBODY else 20.0)
                    done += 1
                    if rpc.name not in ANYBODY:
                        assert said(failure) == WRONG_ROLE, (rpc, failure)
        await still_serves(mutual, "after")
    report.survived(WHERE, "certificate of nobody, or of another", done, "calls")
