"""Converts text and messages to tokens and back, so that callers need no tokenizer.

The first turn of a conversation renders it with the chat template. Later turns only encode the new
messages and append them to the policy's tokens, which are never decoded and encoded again. Rendering a
probe shows what the template puts between an assistant's message and the following ones.

Control tokens spelled in any outside text, tools and tool calls included, are data: they are encoded as
ordinary characters, and the template sees placeholder marks instead. Not all control tokens of a template
are special to the tokenizer (Qwen's around tool calls, tool results and reasoning are not). So every added
token counts as one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penstock.server.core.errors import FieldInvalid
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.text.streaming import StreamParser, TurnStream
from penstock.server.text.template import Guard, template_message, template_tool

PROBE = "penstock-probe-7f3a91"
# A private-use plane, whose characters ordinary text has no reason to contain.
_FIRST_MARK = 0xF0000
_FIRST_PLACE = 0x100000
"""Marks that say where a message is; another private-use plane."""
_MARK_END = "\U0010fa2e"


@dataclass(frozen=True, slots=True)
class Written:
    """The policy's output in one turn, as a message."""

    message: Message
    tool_call_error: str = ""
    """Why text that begins like a tool call is not one; else empty. The text is then content."""
    reasoning_token_count: int = 0
    """As the parser counts them; 0 if there is no parser that counts."""

    @property
    def byte_count(self) -> int:
        """Approximate memory of the text."""
        message = self.message
        arguments = sum(len(call.arguments_json) for call in message.tool_calls)
        return len(message.content) + len(message.reasoning) + arguments


class OutputParser(Protocol):
    """Splits the text of a turn into its parts. Several threads may call it at the same time."""

    def parse(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Written:
        """Parses a whole turn. Never raises, whatever the text. Calls have the ids that the policy wrote,
        in formats that have one, and arguments that are JSON objects.

        Args:
            text: The policy's text, with its special tokens except the one that ended the turn.
            token_ids: The same as tokens.
            prompt_token_ids: The context of the turn. Some templates begin the reasoning there.
            tools: The conversation's tools. Without any, no text counts as a tool call.
        """
        ...

    def stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> StreamParser:
        """Parses one turn while it is written, as `parse` would parse the text so far. May raise."""
        ...


class Renderer:
    """Renders with a Hugging Face tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: object,
        eos_token_ids: Iterable[int] = (),
        parser: OutputParser | None = None,
    ) -> None:
        """Without a `parser`, everything the policy writes is content."""
        # transformers has no complete types, so only this class uses it.
        self._tokenizer = cast("Any", tokenizer)
        self._eos = frozenset(eos_token_ids)
        self._parser = parser
        added = cast("dict[int, Any]", self._tokenizer.added_tokens_decoder)
        self._special_ids = {
            int(number): str(token.content) for number, token in added.items() if token.special
        }
        control = {
            str(token.content): int(number)
            for number, token in added.items()
            # Code tokenizers add runs of spaces, others single letters: in a text these are ordinary.
            if token.special or len(str(token.content).strip()) > 1
        }
        self._control_ids = frozenset(control.values())
        # The probe is not a token, but is guarded like one: the new text starts after the last probe.
        guarded = (PROBE, *sorted(control, key=len, reverse=True))
        self._marks = {
            text: f"{chr(_FIRST_MARK + index)}{_MARK_END}" for index, text in enumerate(guarded)
        }

    def encode_text(self, text: str, *, first: bool) -> NDArray[np.int32]:
        """`first` adds the tokenizer's start-of-sequence tokens."""
        guard = Guard(self._marks)
        return self._encode(guard.text(text), guard, add_special_tokens=first)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> NDArray[np.int32]:
        """Tokens of a whole conversation up to where the policy continues. Raises FIELD_INVALID."""
        guard = Guard(self._marks)
        written = [template_message(message, guard) for message in messages]
        offered = [template_tool(tool, guard) for tool in tools]
        text = self._apply(written, offered, generate=True)
        self._check_placed((), written, offered, text)
        return self._encode(text, guard, add_special_tokens=False)

    def render_next(self, messages: Sequence[Message], last_token: int | None) -> NDArray[np.int32]:
        """Tokens of new messages after a turn of the policy that ended in `last_token`. Raises
        FIELD_INVALID if the template cannot place them."""
        guard = Guard(self._marks)
        new = [template_message(message, guard) for message in messages]
        before: list[dict[str, object]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PROBE},
        ]
        if messages[0].role == "tool":
            # Templates require a call before a tool's answer, and some write the call instead of the text.
            call_id = guard.text(messages[0].tool_call_id or "probe")
            function: dict[str, object] = {"name": PROBE, "arguments": {}}
            before[1]["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        whole = self._apply([*before, *new], (), generate=True)
        suffix = _after_probe(whole)
        self._check_placed(before, new, (), whole)
        if messages[0].role == "tool":
            # After the probe comes the call, which the policy already wrote. The new text begins
            # where a conversation that ends with the call would end.
            closing = _after_probe(self._apply(before, (), generate=False))
            if not suffix.startswith(closing):
                raise FieldInvalid(
                    "observation.conversation", "the chat template cannot place a tool"
                )
            # The closing of an assistant message after its tool calls begins with a special token.
            end = max((closing.rfind(token) for token in self._special_ids.values()), default=-1)
            suffix = (closing[end:] if end >= 0 else "") + suffix[len(closing) :]
        tokens = self._encode(suffix, guard, add_special_tokens=False)
        if len(tokens) and last_token in self._eos and tokens[0] == last_token:
            # The policy wrote its end-of-turn token itself.
            return tokens[1:]
        return tokens

    def decode(self, token_ids: Iterable[int]) -> str:
        """Omits special tokens."""
        ids = [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        """Parses the tokens of a turn into the assistant's message. The result is deterministic. Tool
        calls for which the policy writes no id get one derived from `name`, which identifies the turn. The
        parser sees special tokens; the message contains none."""
        if self._parser is None:
            return Written(Message("assistant", self.decode(token_ids)))
        ids = list(token_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self._parser.parse(text, ids, prompt_token_ids, tools)
        # Only remove tokens that occur: the policy may spell one out in ordinary tokens.
        control = [self._special_ids[token] for token in set(ids) & self._special_ids.keys()]
        message = Message(
            "assistant",
            _without(parsed.message.content, control),
            _name_calls(parsed.message.tool_calls, name),
            reasoning=_without(parsed.message.reasoning, control),
        )
        return replace(parsed, message=message)

    def open_stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> TurnStream:
        """Parses one turn while it is written, like `read_message` but without tool calls."""
        if self._parser is None:
            return TurnStream(self.decode)

        def decode(token_ids: Iterable[int]) -> str:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

        parse = self._parser.stream(prompt_token_ids, tools)
        return TurnStream(decode, parse, self._special_ids, self._eos)

    def _apply(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        *,
        generate: bool,
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
            )
        except Exception as error:
            # Templates are programs and may raise anything for input that they do not allow.
            raise FieldInvalid(
                "conversation", f"the model's chat template rejects it: {error}"
            ) from error

    def _check_placed(
        self,
        before: Sequence[Mapping[str, object]],
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        text: str,
    ) -> None:
        """Raises FIELD_INVALID for a message or a tool of which the template writes nothing: the policy
        would never know of it. `text` is what it wrote, beginning with the messages `before`.

        Templates may change what they write, so the question is put to the template: each text gets a mark
        at its end, and the marks have to come out.
        """
        marked = [_with_mark(message, place) for place, message in enumerate(messages)]
        offered = [_tool_with_mark(tool, len(marked) + i) for i, tool in enumerate(tools)]
        try:
            found = self._apply([*before, *marked], offered, generate=True)
        except FieldInvalid:
            # It reads the text, for example as JSON. Then it also writes it as it is.
            found = ""
        for place, message in enumerate(messages):
            content = str(message["content"]).strip()
            if content and not _has_mark(found, place) and (found or content not in text):
                role = message["role"]
                raise FieldInvalid(
                    f"conversation.messages[{place}]",
                    f"is omitted by the model's chat template, which writes no {role} message there",
                )
        for index in range(len(tools)):
            if found and not _has_mark(found, len(messages) + index):
                raise FieldInvalid(
                    f"conversation.tools[{index}]", "is omitted by the model's chat template"
                )

    def _encode(self, text: str, guard: Guard, *, add_special_tokens: bool) -> NDArray[np.int32]:
        found = dict(guard.found())
        pieces = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            if piece in found:
                ids += self._spell(found[piece])
            elif piece or (add_special_tokens and not index):
                ids += self._tokenizer.encode(
                    piece, add_special_tokens=add_special_tokens and not index
                )
        return np.asarray(ids, np.int32)

    def _spell(self, text: str) -> list[int]:
        """Encodes a control token's text as ordinary tokens."""
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        if len(text) == 1 or self._control_ids.isdisjoint(ids):
            return ids
        # split_special_tokens only covers special tokens. Splitting the text avoids the other added ones.
        return self._spell(text[0]) + self._spell(text[1:])


def _mark(place: int) -> str:
    # Two characters, because each plane of private use has 65,534.
    return chr(_FIRST_PLACE + place // 4096) + chr(_FIRST_PLACE + place % 4096)


def _has_mark(text: str, place: int) -> bool:
    """Also in the form of a template that escapes its JSON."""
    mark = _mark(place)
    return mark in text or json.dumps(mark)[1:-1] in text


def _with_mark(message: Mapping[str, object], place: int) -> Mapping[str, object]:
    content = str(message["content"])
    return {**message, "content": content + _mark(place)} if content.strip() else message


def _tool_with_mark(tool: Mapping[str, object], place: int) -> Mapping[str, object]:
    function = cast("Mapping[str, object]", tool["function"])
    return {**tool, "function": {**function, "name": f"{function['name']}{_mark(place)}"}}


def _after_probe(text: str) -> str:
    """What the template wrote after the policy's last message. Raises FIELD_INVALID."""
    _, probe, after = text.rpartition(PROBE)
    if not probe:
        raise FieldInvalid(
            "observation.conversation", "the chat template omits the assistant's message"
        )
    return after


def load_tokenizer(model: str) -> object:
    """`model` is a directory or a hub name."""
    from transformers import AutoTokenizer

    loader = cast("Any", AutoTokenizer)
    return loader.from_pretrained(model)


def _without(text: str, parts: Iterable[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _name_calls(calls: Iterable[ToolCall], turn: str) -> tuple[ToolCall, ...]:
    """The policy's own ids are kept if they are unique within the turn."""
    named: dict[str, ToolCall] = {}
    for index, call in enumerate(calls):
        own = call.tool_call_id
        call_id = own if own and own not in named else _call_id(turn, index)
        named[call_id] = replace(call, tool_call_id=call_id)
    return tuple(named.values())


def _call_id(turn: str, index: int) -> str:
    """Nine letters and digits, the only form that the strictest template accepts."""
    digest = hashlib.blake2b(f"{turn}/{index}".encode(), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]
