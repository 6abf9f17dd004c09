"""Text and messages -> tokens, tokens -> text: the server owns them, so that callers need no tokenizer.

A conversation is rendered with the chat template on its first turn. Afterwards only what is new is
encoded, after the tokens the policy wrote: what it wrote is never decoded and encoded again. What the
template puts between an assistant's message and the next ones is found by rendering a probe.

Control tokens in text from outside are data, not control: where such text happens to spell one, it is
encoded as ordinary characters. Not all of a template's are special to the tokenizer: Qwen's adds those
around calls, their answers and reasoning as ordinary ones. So every added token counts. That holds for all
that comes from outside: content, reasoning, tools with their descriptions and parameters, and calls with
their arguments. The template sees marks in their place.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.server.core.errors import FieldInvalid
from penstock.server.text.streaming import ParsedStream, PlainStream, StreamParser, TurnStream

if TYPE_CHECKING:
    from numpy.typing import NDArray


PROBE = "penstock-probe-7f3a91"
# Planes of private use, which texts have no reason to hold.
_FIRST_MARK = 0xF0000
_PROBE_FUNCTION: Mapping[str, object] = {"name": PROBE, "arguments": {}}
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


@dataclass(frozen=True, slots=True)
class Written:
    """What the policy wrote in a turn, as a message."""

    message: Message
    tool_call_error: str = ""
    """Why what begins as a tool call is none; empty where there is no such thing."""
    reasoning_token_count: int = 0
    """Of its tokens, as the parser counts them; 0 where there is none that does."""

    @property
    def byte_count(self) -> int:
        """About what its text takes of memory."""
        message = self.message
        arguments = sum(len(call.arguments_json) for call in message.tool_calls)
        return len(message.content) + len(message.reasoning) + arguments


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call as a parser found it."""

    name: str
    arguments_json: str
    """A JSON object."""
    tool_call_id: str = ""
    """As the policy wrote it, in formats that have one."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn's text, taken apart."""

    content: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()
    error: str = ""
    """Why what begins as a tool call is none: there are no calls then, and the content holds its text."""
    reasoning_token_count: int = 0
    """Tokens that are reasoning; 0 where the parser counts none."""


class OutputParser(Protocol):
    """Takes a turn's text apart. It may be called by several threads at a time."""

    def parse(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Parsed:
        """Reads a turn. It raises for no text.

        Args:
            text: What the policy wrote, special tokens among it but not the one that ended the turn.
            token_ids: The same as tokens.
            prompt_token_ids: What it was written after: some templates begin the reasoning themselves.
            tools: Those of the conversation; without any nothing is a call.
        """
        ...

    def stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> StreamParser:
        """Reads one turn while it is written, as `parse` would up to there; it may raise."""
        ...


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

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        """The tokens of a turn as the assistant's message; the same ones always make the same.

        `name` is the turn's, for ids of its calls where the policy writes none.
        """
        ...

    def open_stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> TurnStream:
        """Reads one turn while it is written: what `read_message` reads of it, calls left out."""
        ...


class TokenizerRenderer:
    """Renders with a Hugging Face tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: object,
        eos_token_ids: Iterable[int] = (),
        parser: OutputParser | None = None,
    ) -> None:
        """`parser` takes apart what the policy writes; without one it is all content."""
        # transformers has no complete types; every use of it is in this class.
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
            if token.special or _may_control(str(token.content))
        }
        self._control_ids = frozenset(control.values())
        # The probe is no token, but control as well: what follows it is what is new.
        guarded = (PROBE, *sorted(control, key=len, reverse=True))
        self._marks = {
            text: f"{chr(_FIRST_MARK + index)}{_MARK_END}" for index, text in enumerate(guarded)
        }

    @classmethod
    def load(
        cls, model: str, eos_token_ids: Iterable[int] = (), parser: OutputParser | None = None
    ) -> TokenizerRenderer:
        """Loads a model's tokenizer from its directory or hub name."""
        return cls(load_tokenizer(model), eos_token_ids, parser)

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
            # Templates want a tool's answer to follow a call, and some write the call in place of the text.
            call_id = guard.text(messages[0].tool_call_id or "probe")
            before[1]["tool_calls"] = [
                {"id": call_id, "type": "function", "function": _PROBE_FUNCTION}
            ]
        suffix = _after_probe(self._apply([*before, *new], (), generate=True))
        if messages[0].role == "tool":
            # After the probe stands the call itself, which the policy wrote; what is new begins where a
            # conversation that ends with the call would end.
            closing = _after_probe(self._apply(before, (), generate=False))
            if not suffix.startswith(closing):
                raise FieldInvalid(
                    "observation.conversation", "the chat template cannot place a tool"
                )
            suffix = self._end_of_turn(closing) + suffix[len(closing) :]
        tokens = self._encode(suffix, guard, add_special_tokens=False)
        if len(tokens) and last_token in self._eos and tokens[0] == last_token:
            # The policy wrote its end-of-turn token itself.
            return tokens[1:]
        return tokens

    def decode(self, token_ids: Iterable[int]) -> str:
        """See Renderer."""
        ids = [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def read_message(
        self,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
        name: str,
    ) -> Written:
        """See Renderer. The parser sees special tokens, the message has none of them."""
        if self._parser is None:
            return Written(Message("assistant", self.decode(token_ids)))
        ids = list(token_ids)
        if ids and ids[-1] in self._eos:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        parsed = self._parser.parse(text, ids, prompt_token_ids, tools)
        # Only those that are there: the policy may spell one in ordinary tokens.
        control = [self._special_ids[token] for token in set(ids) & self._special_ids.keys()]
        message = Message(
            "assistant",
            _without(parsed.content, control),
            _name_calls(parsed.calls, name),
            reasoning=_without(parsed.reasoning, control),
        )
        return Written(message, parsed.error, parsed.reasoning_token_count)

    def open_stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> TurnStream:
        """See Renderer."""
        if self._parser is None:
            return PlainStream(self.decode)

        def decode(token_ids: Iterable[int]) -> str:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

        parse = self._parser.stream(prompt_token_ids, tools)
        return ParsedStream(decode, parse, self._special_ids, self._eos)

    def _end_of_turn(self, closing: str) -> str:
        """The part of an assistant message's closing that comes after its tool calls."""
        positions = [closing.rfind(token) for token in self._special_ids.values()]
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
            if is_literal:
                ids += self._spell(piece)
            elif piece or (add_special_tokens and not index):
                ids += self._tokenizer.encode(
                    piece, add_special_tokens=add_special_tokens and not index
                )
        return np.asarray(ids, np.int32)

    def _spell(self, text: str) -> list[int]:
        """A control token's text as ordinary tokens."""
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True
        )
        if len(text) == 1 or self._control_ids.isdisjoint(ids):
            return ids
        # The tokenizer can be kept from finding special ones only; it finds none in a text cut in two.
        return self._spell(text[0]) + self._spell(text[1:])


def _may_control(text: str) -> bool:
    """Whether an added token may be a mark of the template's, not white space or a single letter.

    Tokenizers of code add runs of spaces, others single letters: in a text these are ordinary.
    """
    return len(text.strip()) > 1


def _after_probe(text: str) -> str:
    """What a template wrote after the last message of the policy's. Raises FIELD_INVALID."""
    before, probe, after = text.rpartition(PROBE)
    if not probe and not before:
        raise FieldInvalid(
            "observation.conversation", "the chat template leaves out what the policy wrote"
        )
    return after


def load_tokenizer(model: str) -> object:
    """A model's Hugging Face tokenizer, from its directory or hub name."""
    from transformers import AutoTokenizer

    loader = cast("Any", AutoTokenizer)
    return loader.from_pretrained(model)


def _without(text: str, parts: Iterable[str]) -> str:
    for part in parts:
        text = text.replace(part, "")
    return text


def _name_calls(calls: Iterable[ParsedCall], turn: str) -> tuple[ToolCall, ...]:
    """Calls with ids: those that the policy wrote, as far as they tell the calls of the turn apart."""
    named: dict[str, ToolCall] = {}
    for index, call in enumerate(calls):
        own = call.tool_call_id
        call_id = own if own and own not in named else _call_id(turn, index)
        named[call_id] = ToolCall(call_id, call.name, call.arguments_json)
    return tuple(named.values())


def _call_id(turn: str, index: int) -> str:
    """Nine letters and digits, which is what the strictest of the templates takes."""
    digest = hashlib.blake2b(f"{turn}/{index}".encode(), digest_size=8).digest()
    return base64.b32encode(digest).decode().lower()[:9]


class _Guard:
    """Puts marks in the place of control tokens that text from outside spells, and knows which it put."""

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
