"""A fake engine that writes like a policy at the start of its training, and remembers everything.

It writes tokens that no tokenizer would produce for their text, invalid UTF-8, and control tokens
mid-turn. Sometimes it writes reasoning and tool calls: whole, malformed or cut short. Like
`FakeEngine` it is a function of (prefix, weight version).
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from penstock.server.engine.protocol import Delta, EngineRequest
from tests.support.fakes import EOS, FakeEngine
from tests.support.merging_tokenizers import control_tokens, make_merging_tokenizer

CALLS = {
    "chatml": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"arguments":{"a":  2},"name":"add"}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
    ),
    "llama3": (
        '{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name":"add", "parameters":{"a":  2}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}',
        '{"name": "add", "parameters": [1]}',
    ),
}
CALLS["qwen3"] = CALLS["chatml"]
"""Calls as each family's model writes them: two that its parser
accepts, and two that it rejects."""
THOUGHT = "<think>\nHm, so I add.\n</think>\n\n"

# Frequencies per thousand tokens.
SCRIPT_BEGINS = 30
SCRIPT_BEGINS_TURN = 550
ENDS, ENDS_TURN_AT_ONCE = 30, 10
CONTROL = 10
BYTE = 10
SHORT = 350
# One script token in this many is replaced by another token.
CUT_SHORT = 197


class Style:
    """What a family's policy writes."""

    def __init__(self, family: str) -> None:
        tokenizer: Any = make_merging_tokenizer(family)
        self.vocab_size = len(tokenizer)
        self.control = list(control_tokens(family))[1:]
        self.ordinary = range(256 + len(self.control) + 1, self.vocab_size)
        letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
        pairs = [first + second for first in letters for second in letters]
        encoded = [_encode(tokenizer, text) for text in letters + pairs]
        self.short = [tokens[0] for tokens in encoded if len(tokens) == 1]
        """Tokens of letters and letter pairs. A tokenizer encodes words made of
        such pieces with longer tokens."""
        prompt = [{"role": "user", "content": "?"}]
        before, after = (
            tokenizer.apply_chat_template(prompt, add_generation_prompt=ask, tokenize=False)
            for ask in (False, True)
        )
        self._opening: list[int] = _encode(tokenizer, after.removeprefix(before))
        self.scripts = list(_scripts(family, tokenizer))
        self._longest = max(map(len, self.scripts))
        self._begun: dict[int, list[list[int]]] = defaultdict(list)
        for script in self.scripts:
            for count in range(1, len(script)):
                self._begun[script[count - 1]].append(script[: count + 1])

    def opens_turn(self, last: Sequence[int]) -> bool:
        """Whether nothing of the turn is written yet."""
        return list(last[-len(self._opening) :]) == self._opening

    def following(self, last: Sequence[int]) -> list[int]:
        """The possible next tokens of scripts in progress. Of several
        scripts, the longest match wins."""
        found: list[int] = []
        most = 0
        for *begun, token in self._begun.get(last[-1], ()):
            count = len(begun)
            if count < most or list(last[-count:]) != begun:
                continue
            found = [*found, token] if count == most else [token]
            most = count
        return found

    def recent(self, prefix: bytes) -> list[int]:
        """The end of a prefix, long enough to determine the next token."""
        count = max(self._longest, len(self._opening))
        return np.frombuffer(prefix, np.int32)[-count:].tolist()


def _scripts(family: str, tokenizer: Any) -> Iterator[list[int]]:
    """Calls, some with reasoning before them and the end of the turn after them. One in four is
    spelled as the tokenizer encodes it."""
    draw = random.Random(family)
    for text in (*CALLS[family], ""):
        for begin in ("", THOUGHT) if family == "qwen3" else ("",):
            for end in ([], [EOS]) if begin + text else ():
                yield [*_encode(tokenizer, begin + text), *end]
                for _ in range(3):
                    yield [*spell(tokenizer, begin + text, draw), *end]


def spell(tokenizer: Any, text: str, draw: random.Random) -> list[int]:
    """A text as tokens other than its usual encoding; control tokens stay as they are."""
    control = sorted(map(str, tokenizer.get_added_vocab()), key=len, reverse=True)
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, control))})", text):
        at = 0
        while at < len(part):
            end = len(part) if part in control else at + draw.randrange(1, 4)
            found += _encode(tokenizer, part[at:end])
            at = end
    return found


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@dataclass
class Attempt:
    """One request as the engine saw it."""

    given: list[int]
    wrote: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    @property
    def tokens(self) -> list[int]:
        """The whole context at the end of the request."""
        return [*self.given, *self.wrote]


TurnName = tuple[str, int]
"""A trajectory's id and a turn's index."""


class WritingEngine(FakeEngine):
    """Writes in a style, and records for each turn its requests: what
    the engine received and wrote."""

    def __init__(self, *args: Any, style: Style, **fields: Any) -> None:
        super().__init__(*args, vocab_size=style.vocab_size, **fields)
        self.turns: dict[TurnName, list[Attempt]] = {}
        self.count = 0
        """Tokens written."""
        self._counted = asyncio.Event()
        self._style = style
        self.choose = self._choose

    async def written(self, count: int) -> None:
        """Wait until `count` more tokens are written."""
        until = self.count + count
        while self.count < until:
            self._counted.clear()
            await self._counted.wait()

    def _choose(self, prefix: bytes, version: int) -> tuple[int, float]:
        digest = xxhash.xxh3_64_intdigest(prefix, seed=version)
        return self._token(prefix, digest), -float((digest >> 16) % 1000) / 1000.0

    def _token(self, prefix: bytes, digest: int) -> int:
        style, last = self._style, self._style.recent(prefix)
        kind, which = digest % 1000, digest >> 32
        following = style.following(last)
        if following and digest % CUT_SHORT:
            return following[which % len(following)]
        begins, ends = SCRIPT_BEGINS, ENDS
        if style.opens_turn(last):
            begins, ends = SCRIPT_BEGINS_TURN, ENDS_TURN_AT_ONCE
        for share, tokens in (
            (begins, [script[0] for script in style.scripts]),
            (ends, [EOS]),
            (CONTROL, style.control),
            (BYTE, range(256)),
            (SHORT, style.short),
        ):
            if kind < share:
                return tokens[which % len(tokens)]
            kind -= share
        return style.ordinary[which % len(style.ordinary)]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        trajectory_id, index, _ = request.request_id.rsplit("/", 2)
        attempt = Attempt(request.token_ids.tolist())
        self.turns.setdefault((trajectory_id, int(index)), []).append(attempt)
        return self._kept(attempt, await super().generate(request))

    async def _kept(self, attempt: Attempt, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
        async for delta in deltas:
            wrote = delta.token_ids.tolist()
            attempt.wrote += wrote
            attempt.logprobs += delta.logprobs.tolist()
            attempt.versions += [delta.weight_version] * len(wrote)
            self.count += len(wrote)
            self._counted.set()
            yield delta
