"""Output tokens per second through Generate, compared with the raw engine and vLLM's HTTP server.

    python -m benchmarks.serving.throughput [--model DIR] [--rounds 5] [--turns 1,8,32,64]
        [--tokens 128] [--secure] [--only chat,http_chat]

Every system runs in a separate process. It samples the same model with the same options and parameters,
with log-probabilities of the sampled tokens. If the system is a server, the load comes from another
process. Rounds are interleaved and ratios are taken within a round, because machines are shared and noisy.
Each measurement starts only when no system is still busy with the previous one.

- The raw engine runs in its faster output mode on this machine.
- `penstock` requests each turn as a whole, like agents that wait for it (`trajectory.turn()`).
- `penstock_stream` streams tokens as they are sampled.
- `penstock_tls`, added by `--secure`, is a second server that is called over TLS. Each call carries a token
  that is read from its file.
- `chat`, `responses` and `messages`, each with a `.._stream`, are the OpenAI and Anthropic endpoints of the
  same Penstock server. `http_chat` and so on are those of vLLM. Bodies are the same and prompts are text.

Penstock's endpoints always sample with log-probabilities, because the server keeps them for the trainer.
vLLM's endpoints are called without them. In `http_chat_logprobs`, `http_responses_logprobs` and their
streams, vLLM also returns those of the sampled tokens, which `messages` does not support. `--only` measures
the named systems and the raw engine.

The last line is one JSON object. All of its values are ratios:

- to the raw engine's tokens per second:
  {"ratio_to_raw": {turns: ratio}, "penstock_stream": {...}, "chat": {...}, "http_stream": {...}, ...};
- of each endpoint to vLLM's in the same round:
  {"chat_to_http": {turns: ratio}, "chat_to_http_stream": {...}, "responses_to_http": ...};
- the same for vLLM with log-probabilities: {"chat_to_http_logprobs": {...}, ...};
- with `--secure`, those of penstock_tls and penstock_tls_stream, and, each to the same without TLS in the
  same round, "tls_to_plaintext" and "tls_to_plaintext_stream".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import psutil
import trustme
from benchmarks.serving.load import ENGINE, SAMPLING, Run, prompt
from benchmarks.serving.raw_engine import raw_engine
from benchmarks.serving.surfaces import PEERS, SURFACES, http_session, surface_runners
from benchmarks.support.processes import serving_address, started
from rich.console import Console
from rich.table import Table

from penstock.demo.model import prepare_model
from penstock.server.vllm import environment as vllm_environment
from penstock.v1 import rollout_service_pb2
from penstock.wire import codec, methods
from penstock.wire.messages import GenerateRequest, SamplingParams, StreamOptions, TokenSequence
from penstock.wire.security import Security, open_channel

SECURE = ("tls_to_plaintext", "tls_to_plaintext_stream")
LOOK_SECONDS = 0.3
QUIET_SHARE = 0.1
"""Share of one core that all systems together may use when quiet."""
RESTLESS_SECONDS = 30.0


async def quiet() -> None:
    """Returns once no system is busy.

    The workers of vLLM's server poll an empty queue for a second after their last step, which would slow
    down the next measurement. Raises TimeoutError if the systems stay busy.
    """
    async with asyncio.timeout(RESTLESS_SECONDS):
        before = _used_seconds()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = _used_seconds()
            if now - before < QUIET_SHARE * LOOK_SECONDS:
                return
            before = now


def _used_seconds() -> float:
    """Total processor time of all systems."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used += times.user + times.system
    return used


def make_credentials(folder: Path) -> tuple[list[str], Security]:
    """Creates a certificate and a token; returns the server's options and the client's security."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    server = authority.issue_cert("127.0.0.1")
    server.private_key_pem.write_to_path(folder / "key.pem")
    server.cert_chain_pems[0].write_to_path(folder / "server.pem")
    create = ("token", "create", "--file", str(folder / "tokens.toml"), "--name", "agent")
    made = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *create, "--role", "agent"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "token").write_text(made.stdout)
    settings = {"certificate": "server.pem", "key": "key.pem", "tokens": "tokens.toml"}
    options = [f"security.{name}={folder / file}" for name, file in settings.items()]
    security = Security(ca=folder / "ca.pem", token_file=folder / "token")
    return [part for option in options for part in ("--set", option)], security


@contextlib.asynccontextmanager
async def secure_server(model: str) -> AsyncIterator[dict[str, Run]]:
    with tempfile.TemporaryDirectory() as folder:
        options, security = make_credentials(Path(folder))
        async with penstock_server(model, "penstock_tls", options, security) as systems:
            yield systems


@contextlib.asynccontextmanager
async def penstock_server(
    model: str,
    name: str = "penstock",
    options: Sequence[str] = (),
    security: Security | None = None,
) -> AsyncIterator[dict[str, Run]]:
    command = ("-m", "penstock.cli", "serve", "--model", model, "--listen", "127.0.0.1:0")
    command += (*options, *ENGINE)
    async with started(*command, end_seconds=None) as process:
        try:
            address = await serving_address(process)
            endpoints = (await process.read()).split(" on ")[1]
            async with http_session() as session, open_channel(address, security) as channel:
                systems = generate_runners(channel, name)
                if security is None:
                    for surface, described in SURFACES.items():
                        systems |= surface_runners(session, endpoints, surface, described)
                yield systems
        finally:
            process.terminate()


def generate_runners(channel: grpc.aio.Channel, name: str) -> dict[str, Run]:
    """Runners of single turns through `Generate`, whole and streamed."""
    generate = methods.streaming(channel, rollout_service_pb2.GenerateResponse)
    count = 0

    async def turn(tokens: int, final_only: bool) -> None:
        nonlocal count
        count += 1
        request = GenerateRequest(
            trajectory_id=f"bench-{count}",
            stream_options=StreamOptions(final_only=final_only),
            tokens=TokenSequence(token_ids=codec.array_bytes(np.asarray(prompt(), np.int32))),
            sampling_params=SamplingParams(max_tokens=tokens, **SAMPLING),
        )
        got = 0
        async for event in generate(request):
            if event.WhichOneof("event") == "segment":
                ids, logprobs = codec.token_ids(event.segment), codec.logprobs(event.segment)
                assert len(ids) == len(logprobs)
                got += len(ids)
        assert got == tokens, got

    def runner(final_only: bool) -> Run:
        async def run(turns: int, tokens: int) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(turn(tokens, final_only) for _ in range(turns)))
            return time.perf_counter() - began

        return run

    return {name: runner(True), f"{name}_stream": runner(False)}


@contextlib.asynccontextmanager
async def http_server(model: str) -> AsyncIterator[dict[str, Run]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"),
        *("--enforce-eager", "--block-size", "32", "--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm", "--served-model-name", "m", *ENGINE),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        # By default vLLM closes idle connections after 5 s, while they are still in the session's pool.
        env={**os.environ, "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"},
    )
    base = f"http://127.0.0.1:{port}"
    session = http_session()
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{base}/health") as answer:
                    if answer.status == 200:
                        break
            assert process.returncode is None, "vLLM's HTTP server ended"
            await asyncio.sleep(0.5)

    async def turn(tokens: int, stream: bool) -> None:
        body = {
            "model": "m",
            "prompt": prompt(),
            "max_tokens": tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": stream,
            **SAMPLING,
        }
        got = 0
        async with session.post(f"{base}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if stream:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        got += _count(json.loads(line[6:]))
            else:
                got = _count(await answer.json())
        assert got == tokens, got

    def runner(stream: bool) -> Run:
        async def run(turns: int, tokens: int) -> float:
            began = time.perf_counter()
            await asyncio.gather(*(turn(tokens, stream) for _ in range(turns)))
            return time.perf_counter() - began

        return run

    systems = {"http_stream": runner(True), "http_unary": runner(False)}
    for surface, described in SURFACES.items():
        systems |= surface_runners(session, f"{base}/v1", f"http_{surface}", described)
        if described.logprobs is not None:
            name = f"http_{surface}_logprobs"
            systems |= surface_runners(session, f"{base}/v1", name, described, described.logprobs)
    try:
        yield systems
    finally:
        await session.close()
        process.terminate()
        await process.wait()


def _count(answer: dict[str, list[dict[str, object]]]) -> int:
    choice = answer["choices"][0]
    ids, logprobs = choice.get("token_ids") or [], choice["logprobs"]
    assert isinstance(ids, list) and isinstance(logprobs, dict)
    assert len(logprobs["token_logprobs"]) == len(ids)
    return len(ids)


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, dict[str, float]]:
    model = str(prepare_model(arguments.model, console.print))
    counts = [int(count) for count in arguments.turns.split(",")]
    speeds: dict[str, dict[int, list[float]]] = {}
    ratios: dict[str, dict[int, list[float]]] = {}
    async with contextlib.AsyncExitStack() as stack:
        console.print(f"starting the engines on {model}")
        raw = await stack.enter_async_context(raw_engine(model))
        systems = await stack.enter_async_context(penstock_server(model))
        if arguments.secure:
            systems |= await stack.enter_async_context(secure_server(model))
        if not arguments.no_http:
            systems |= await stack.enter_async_context(http_server(model))
        if arguments.only:
            systems = {name: systems[name] for name in arguments.only.split(",")}
        modes: dict[str, list[float]] = {mode: [] for mode in ("final", "1", "8", "32")}
        await raw(8, 32, "final")
        for _ in range(3):
            for mode, seconds in modes.items():
                await quiet()
                seconds.append(await raw(32, arguments.tokens // 2, mode))
        mode = min(modes, key=lambda m: statistics.median(modes[m]))
        console.print(f"the raw engine is fastest here in output mode {mode!r}")
        for run in systems.values():
            await run(8, 32)
        for number in range(arguments.rounds):
            for turns in counts:
                order = ["raw", *systems]
                random.shuffle(order)
                round_speeds: dict[str, float] = {}
                for name in order:
                    await quiet()
                    seconds = (
                        await raw(turns, arguments.tokens, mode)
                        if name == "raw"
                        else await systems[name](turns, arguments.tokens)
                    )
                    round_speeds[name] = turns * arguments.tokens / seconds
                for name, speed in round_speeds.items():
                    speeds.setdefault(name, {}).setdefault(turns, []).append(speed)
                    ratio = speed / round_speeds["raw"]
                    ratios.setdefault(name, {}).setdefault(turns, []).append(ratio)
                for name in SECURE:
                    plain = name.replace("tls_to_plaintext", "penstock")
                    secure = name.replace("tls_to_plaintext", "penstock_tls")
                    if plain in round_speeds and secure in round_speeds:
                        ratio = round_speeds[secure] / round_speeds[plain]
                        ratios.setdefault(name, {}).setdefault(turns, []).append(ratio)
                for name, (ours, theirs) in PEERS.items():
                    if ours in round_speeds and theirs in round_speeds:
                        ratio = round_speeds[ours] / round_speeds[theirs]
                        ratios.setdefault(name, {}).setdefault(turns, []).append(ratio)
            console.print(f"round {number + 1} of {arguments.rounds}")
    table = Table(title=f"output tokens per second (ratio to raw), median of {arguments.rounds}")
    table.add_column("turns in flight", justify="right")
    for name in speeds:
        table.add_column(name, justify="right")
    for turns in counts:
        table.add_row(
            str(turns),
            *(
                f"{statistics.median(speeds[name][turns]):.0f} "
                f"({statistics.median(ratios[name][turns]):.3f})"
                for name in speeds
            ),
        )
    console.print(table)
    for name in (*PEERS, *SECURE):
        for turns, values in ratios.get(name, {}).items():
            found = sorted(values)
            console.print(
                f"{turns} turns: {name} {statistics.median(found):.3f} "
                f"(middle half {found[len(found) // 4]:.3f} to {found[-1 - len(found) // 4]:.3f})"
            )
    return {
        "ratio_to_raw" if name == "penstock" else name: {
            str(turns): round(statistics.median(values), 4) for turns, values in by_turns.items()
        }
        for name, by_turns in ratios.items()
        if name != "raw"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="model directory or hub name; default: the demo's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", default="1,8,32,64")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per turn")
    parser.add_argument("--no-http", action="store_true", help="do not measure vLLM's HTTP server")
    parser.add_argument("--only", help="names of systems to measure; default: all")
    parser.add_argument(
        "--secure", action="store_true", help="also measure a server with TLS and tokens"
    )
    arguments = parser.parse_args()
    console = Console(width=110)
    # All engines run with the settings that `penstock serve` uses.
    vllm_environment.set_cpu_defaults()
    print(json.dumps(asyncio.run(measure(arguments, console))))


if __name__ == "__main__":
    main()
