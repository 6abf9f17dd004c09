"""Text and messages -> tokens, tokens -> text: the server owns them, so that callers need no tokenizer.

A conversation is rendered with the chat template on its first turn. Afterwards only what is new is
encoded, after the tokens the policy wrote: what it wrote is never decoded and encoded again. What the
template puts between an assistant's message and the next ones is found by rendering a probe.

Special tokens in text from outside are data, not control: where such text happens to spell one, it is
encoded as ordinary characters. That holds for all that comes from outside: content, reasoning, tools with
their descriptions and parameters, and calls with their arguments. The template sees marks in their place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.server.errors import FieldInvalid

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROBE = "penstock-probe-7f3a91"
# Planes of private use, which texts have no reason to hold.
_FIRST_MARK = 0xF0000
_MARK_END = "\U0010fa2e"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call the policy made."""

    tool_call_id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is the template's word: system, user, assistant or tool."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the policy may call; `parameters` is a JSON Schema."""

    name: str
    description: str
    parameters: Mapping[str, object]


class Renderer(Protocol):
    """Turns text and messages into tokens and back."""

    def encode_text(self, text: str, *, first: bool) -> NDArray[np.int32]:
        """Tokens of plain text; with `first`, what the tokenizer puts at the start of a sequence too."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> NDArray[np.int32]:
        """Tokens of a whole conversation up to where the policy writes. Raises FIELD_INVALID."""
        ...

    def render_next(self, messages: Sequence[Message], last_token: int | None) -> NDArray[np.int32]:
        """Tokens of new messages after a turn of the policy that ended in `last_token`.

        Raises FIELD_INVALID where the template cannot place them.
        """
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of tokens the policy wrote, special tokens left out."""
        ...


class TokenizerRenderer:
    """Renders with a Hugging Face tokenizer and its chat template."""

    def __init__(self, tokenizer: object, eos_token_ids: Iterable[int] = ()) -> None:
        # transformers has no complete types; every use of it is in this class.
        self._tokenizer = cast("Any", tokenizer)
        self._eos = frozenset(eos_token_ids)
        added = cast("dict[int, Any]", self._tokenizer.added_tokens_decoder)
        self._special = sorted(
            (str(token.content) for token in added.values() if token.special),
            key=len,
            reverse=True,
        )
        # The probe is no token, but control as well: what follows it is what is new.
        guarded = (PROBE, *self._special)
        self._marks = {
            text: f"{chr(_FIRST_MARK + index)}{_MARK_END}" for index, text in enumerate(guarded)
        }

    @classmethod
    def load(cls, model: str, eos_token_ids: Iterable[int] = ()) -> TokenizerRenderer:
        """Loads a model's tokenizer from its directory or hub name."""
        from transformers import AutoTokenizer

        loader = cast("Any", AutoTokenizer)
        return cls(loader.from_pretrained(model), eos_token_ids)

    def encode_text(self, text: str, *, first: bool) -> NDArray[np.int32]:
        """See Renderer."""
        guard = _Guard(self._marks)
        return self._encode(guard.text(text), guard, add_special_tokens=first)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> NDArray[np.int32]:
        """See Renderer."""
        guard = _Guard(self._marks)
        text = self._apply(
            [_template_message(message, guard) for message in messages],
            [_template_tool(tool, guard) for tool in tools],
            generate=True,
        )
        return self._encode(text, guard, add_special_tokens=False)

    def render_next(self, messages: Sequence[Message], last_token: int | None) -> NDArray[np.int32]:
        """See Renderer."""
        guard = _Guard(self._marks)
        new = [_template_message(message, guard) for message in messages]
        before: list[dict[str, object]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PROBE},
        ]
        if messages[0].role == "tool":
            # Templates want a tool's answer to follow a call.
            call = ToolCall(messages[0].tool_call_id or "probe", "probe", "{}")
            before[1]["tool_calls"] = [_template_call(call, guard)]
        text = self._apply([*before, *new], (), generate=True)
        if messages[0].role == "tool":
            # After the probe stands the call itself, which the policy wrote; what is new begins where a
            # conversation that ends with the call would end.
            ended = self._apply(before, (), generate=False)
            if not text.startswith(ended):
                raise FieldInvalid(
                    "observation.conversation", "the chat template cannot place a tool"
                )
            closing = ended[ended.rindex(PROBE) + len(PROBE) :]
            suffix = self._end_of_turn(closing) + text[len(ended) :]
        else:
            suffix = text[text.rindex(PROBE) + len(PROBE) :]
        tokens = self._encode(suffix, guard, add_special_tokens=False)
        if len(tokens) and last_token in self._eos and tokens[0] == last_token:
            # The policy wrote its end-of-turn token itself.
            return tokens[1:]
        return tokens

    def decode(self, token_ids: Iterable[int]) -> str:
        """See Renderer."""
        ids = [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _end_of_turn(self, closing: str) -> str:
        """The part of an assistant message's closing that comes after its tool calls."""
        positions = [closing.rfind(token) for token in self._special]
        start = max(positions, default=-1)
        return closing[start:] if start >= 0 else ""

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
            # Templates are programs that raise what they like at input they do not allow.
            raise FieldInvalid(
                "conversation", f"the model's chat template refuses it: {error}"
            ) from error

    def _encode(self, text: str, guard: _Guard, *, add_special_tokens: bool) -> NDArray[np.int32]:
        pieces = [(text, False)]
        for mark, token in guard.found():
            split: list[tuple[str, bool]] = []
            for piece, is_literal in pieces:
                if is_literal:
                    split.append((piece, True))
                    continue
                for index, part in enumerate(piece.split(mark)):
                    if index:
                        split.append((token, True))
                    split.append((part, False))
            pieces = split
        ids: list[int] = []
        for index, (piece, is_literal) in enumerate(pieces):
            if piece or (add_special_tokens and not index):
                ids += self._tokenizer.encode(
                    piece,
                    add_special_tokens=add_special_tokens and not index,
                    split_special_tokens=is_literal,
                )
        return np.asarray(ids, np.int32)


class _Guard:
    """Puts marks in the place of special tokens that text from outside spells, and knows which it put."""

    def __init__(self, marks: Mapping[str, str]) -> None:
        self._marks = marks
        self._found: dict[str, str] = {}

    def text(self, text: str) -> str:
        """The text with marks in it."""
        for token, mark in self._marks.items():
            if token in text:
                self._found[mark] = token
                text = text.replace(token, mark)
        return text

    def value(self, value: object) -> object:
        """A JSON value with marks in its texts and keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            table = cast("Mapping[str, object]", value)
            return {self.text(key): self.value(item) for key, item in table.items()}
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[object]", value)]
        return value

    def found(self) -> list[tuple[str, str]]:
        """(mark, token) of every mark put, also as a template writes it that escapes its JSON."""
        escaped = [(json.dumps(mark)[1:-1], token) for mark, token in self._found.items()]
        return [*self._found.items(), *escaped]


def _template_message(message: Message, guard: _Guard) -> dict[str, object]:
    rendered: dict[str, object] = {"role": message.role, "content": guard.text(message.content)}
    if message.tool_calls:
        rendered["tool_calls"] = [_template_call(call, guard) for call in message.tool_calls]
    if message.tool_call_id:
        rendered["tool_call_id"] = guard.text(message.tool_call_id)
    if message.reasoning:
        rendered["reasoning_content"] = guard.text(message.reasoning)
    return rendered


def _template_call(call: ToolCall, guard: _Guard) -> dict[str, object]:
    try:
        # Guarded once it is parsed: an escape in the text may stand for a character of a special token.
        arguments = guard.value(_arguments(call.arguments_json))
    except RecursionError:
        arguments = guard.text(call.arguments_json)
    return {
        "id": guard.text(call.tool_call_id),
        "type": "function",
        "function": {"name": guard.text(call.name), "arguments": arguments},
    }


def _arguments(text: str) -> object:
    """A call's arguments as the template wants them: an object, or the text where it is none.

    An object that cannot be written as text, because an escape in it names half a character, is none.
    """
    try:
        parsed: object = json.loads(text)
        json.dumps(parsed, ensure_ascii=False).encode()
    except ValueError:
        return text
    return parsed


def _template_tool(tool: Tool, guard: _Guard) -> dict[str, object]:
    return {
        "type": "function",
        "function": {
            "name": guard.text(tool.name),
            "description": guard.text(tool.description),
            "parameters": guard.value(tool.parameters),
        },
    }
