"""`penstock health`: what a probe learns about a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc

from tests.support.authorities import make_authorities
from tests.support.harness import serve


async def health(*arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "health", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    return process.returncode, printed.decode()


async def test_a_server_serves_or_is_alive_at_least(tmp_path: Path) -> None:
    async with serve(tmp_path) as running:
        assert await health(running.address) == (0, f"{running.address}: SERVING\n")
        running.serving.switch.await_trainer(True)
        assert await health(running.address) == (1, f"{running.address}: NOT_SERVING\n")
        assert await health(running.address, "--alive") == (0, f"{running.address}: NOT_SERVING\n")


async def test_a_probe_by_tls_needs_no_token(tmp_path: Path) -> None:
    made = make_authorities(tmp_path / "secrets")
    async with serve(tmp_path, *made.settings(), security=made.security("admin")) as running:
        status, said = await health(running.address, "--ca", str(made.ca))
        assert (status, said) == (0, f"{running.address}: SERVING\n")
        status, said = await health(running.address, "--timeout", "2")
        assert status == 1
        status, said = await health(running.address, "--ca", str(tmp_path / "none.pem"))
        assert status == 1 and "none.pem" in said


async def test_nobody_there_is_neither() -> None:
    server = grpc.aio.server()
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.stop(None)
    status, said = await health(address, "--alive", "--timeout", "2")
    assert status == 1
    assert said.startswith(f"penstock health: {address}: ")
