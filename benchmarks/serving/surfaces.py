"""The HTTP endpoints that Penstock's server and vLLM's server both have, and turns through them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from benchmarks.serving.load import PROMPT_TOKENS, SAMPLING, Run


def http_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
    )


@dataclass(frozen=True)
class Surface:
    """An HTTP endpoint that both servers have."""

    path: str
    messages: str
    """Field of the request that has the messages."""
    max_tokens: str
    output_tokens: str
    """Field of `usage` that counts sampled tokens."""
    ignores_eos: bool = True
    """Whether vLLM's endpoint supports `ignore_eos`. If not, turns can end early on both servers."""
    counted_when_asked: bool = False
    """Whether a stream includes `usage` only on request."""
    logprobs: Mapping[str, object] | None = None
    """Fields that request log-probabilities from vLLM; None if it does not support them here."""


SURFACES = {
    "chat": Surface(
        *("chat/completions", "messages", "max_tokens", "completion_tokens"),
        counted_when_asked=True,
        logprobs={"logprobs": True},
    ),
    "responses": Surface(
        *("responses", "input", "max_output_tokens", "output_tokens"),
        logprobs={"include": ["message.output_text.logprobs"]},
    ),
    "messages": Surface("messages", "messages", "max_tokens", "output_tokens", ignores_eos=False),
}
PEERS = {
    f"{surface}_to_http{logprobs}{stream}": (
        f"{surface}{stream}",
        f"http_{surface}{logprobs}{stream}",
    )
    for surface, described in SURFACES.items()
    for logprobs in (("",) if described.logprobs is None else ("", "_logprobs"))
    for stream in ("", "_stream")
}


def surface_runners(
    session: aiohttp.ClientSession,
    base: str,
    name: str,
    surface: Surface,
    logprobs: Mapping[str, object] | None = None,
) -> dict[str, Run]:
    """Runners of single turns on one server's endpoint, whole and streamed."""

    async def turn(tokens: int, stream: bool) -> int:
        question = " ".join(
            str(number) for number in random.sample(range(1000), PROMPT_TOKENS // 4)
        )
        asks_usage = stream and surface.counted_when_asked
        body = {
            "model": "m",
            surface.messages: [{"role": "user", "content": question}],
            surface.max_tokens: tokens,
            "stream": stream,
            "temperature": SAMPLING["temperature"],
            **({"ignore_eos": True} if surface.ignores_eos else {}),
            **(logprobs or {}),
            **({"stream_options": {"include_usage": True}} if asks_usage else {}),
        }
        usage: dict[str, int] = {}
        async with session.post(f"{base}/{surface.path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            if stream:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        told = event.get("response") or event
                        usage = told.get("usage") or usage
            else:
                usage = (await answer.json())["usage"]
        count = usage[surface.output_tokens]
        assert count == tokens or (not surface.ignores_eos and 0 < count < tokens), usage
        return count

    def runner(stream: bool) -> Run:
        async def run(turns: int, tokens: int) -> float:
            began = time.perf_counter()
            counts = await asyncio.gather(*(turn(tokens, stream) for _ in range(turns)))
            # Scaled to turns of full length.
            return (time.perf_counter() - began) * turns * tokens / sum(counts)

        return run

    return {name: runner(False), f"{name}_stream": runner(True)}
