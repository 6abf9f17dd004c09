"""vLLM's parsers of tool calls and reasoning, chosen by vLLM's own names.

This is the only module that imports them. If a parser fails on a text, the turn does not fail. The text is
returned as content, together with the reason, which the parsers themselves only log.
"""

from __future__ import annotations

# First, because vLLM reads the environment when it is imported.
import penstock.server.vllm.environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import json
import logging
import re
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import Any, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.hf import get_cached_tokenizer
from vllm.tool_parsers import ToolParserManager

from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.text.renderer import Written
from penstock.server.text.streaming import StreamParser

# Attributes and terminals that hold the text with which a call begins; names differ between parsers.
_MARK_NAMES = re.compile(r"tool_calls?_(start|begin)(_token)?|tool_start_token|bot_token")
_TERMINALS = ("TOOL_START", "TOOL_SECTION_START", "TOOL_REQUESTS_START")
_GENERATED_ID = "chatcmpl-tool-"
MAX_DEPTH = 100
"""Maximum depth of arguments. JSON readers have their own bounds; that of vLLM's models is 255."""
PROMPT_END = 16
"""Tokens at the end of a prompt searched for the start of the reasoning, if the template writes it."""

_failures: ContextVar[list[BaseException] | None] = ContextVar("_failures", default=None)


class ParserUnknown(ValueError):
    """No parser has this name, or it cannot read this model's tokens. The message lists the known names."""


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ParserUnknown for a name that vLLM has no parser of; empty names mean no parser."""
    managers = (
        ("conversation.tool_parser", tool_parser, ToolParserManager),
        ("conversation.reasoning_parser", reasoning_parser, ReasoningParserManager),
    )
    for setting, name, manager in managers:
        known = sorted(cast("Iterable[str]", cast("Any", manager).list_registered()))
        if name and name not in known:
            raise ParserUnknown(f"{setting}: vLLM has no {name!r}; it has {', '.join(known)}")


class VllmParsers:
    """The methods of `penstock.server.text.renderer.OutputParser`, which documents them."""

    def __init__(self, tokenizer: object, tool_parser: str, reasoning_parser: str) -> None:
        """`tokenizer` is a Hugging Face tokenizer. Raises ParserUnknown."""
        check_names(tool_parser, reasoning_parser)
        _keep_failures()
        # vLLM's manager is untyped. Each text gets a new parser, because parsers keep state. A parser reads
        # the vocabulary, which the cached tokenizer keeps.
        self._tokenizer: Any = get_cached_tokenizer(cast("Any", tokenizer))
        try:
            found = ParserManager.get_parser(
                tool_parser_name=tool_parser or None,
                reasoning_parser_name=reasoning_parser or None,
                enable_auto_tools=bool(tool_parser),
                tokenizer=self._tokenizer,
            )
        except (TypeError, ValueError) as error:
            raise ParserUnknown(str(error)) from error
        if found is None:
            raise ParserUnknown("neither conversation.tool_parser nor reasoning_parser is set")
        self._parser_class: Any = found
        self._begins, self._opens, self._closes = _marks(self._parser_class(self._tokenizer))
        self._name = tool_parser

    def parse(
        self,
        text: str,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Written:
        failures: list[BaseException] = []
        token = _failures.set(failures)
        try:
            reasoning, content, calls = self._run(text, token_ids, prompt_token_ids, tools)
            error = self._error(text, calls, failures) if tools and self._name else ""
            if error:
                reasoning, content, _ = self._run(text, token_ids, prompt_token_ids, ())
                begun = any(mark in text for mark in self._begins)
                kept = any(mark in content for mark in self._begins)
                # Some parsers leave out what they cannot read.
                content, calls = (content if kept or not begun else text), ()
            count = self._count(token_ids, prompt_token_ids) if reasoning else 0
        except Exception as failure:
            # Parsers may raise anything on text they do not expect.
            problem = f"{self._name or 'the reasoning parser'}: {failure!r}"
            return Written(Message("assistant", text), problem)
        finally:
            _failures.reset(token)
        message = Message("assistant", content, calls, reasoning=reasoning)
        return Written(message, error, count)

    def _run(
        self, text: str, token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Tool]
    ) -> tuple[str, str, tuple[ToolCall, ...]]:
        request = _request(tools)
        parser = self._parser_class(self._tokenizer, request.tools)
        parser.set_prompt_token_ids(list(prompt))
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=bool(tools), model_output_token_ids=list(token_ids)
        )
        found = tuple(
            ToolCall(_own_id(call.id), str(call.name), str(call.arguments)) for call in calls or ()
        )
        return reasoning or "", content or "", found

    def _count(self, token_ids: Sequence[int], prompt_token_ids: Sequence[int]) -> int:
        parser = self._parser_class(self._tokenizer)
        count = int(parser.count_reasoning_tokens(list(token_ids)))
        if count:
            return count
        # Some parsers find none if the prompt already ends with the start of the reasoning.
        before = list(prompt_token_ids[-PROMPT_END:])
        both, alone = (
            int(self._parser_class(self._tokenizer).count_reasoning_tokens(tokens))
            for tokens in ([*before, *token_ids], before)
        )
        return max(0, both - alone)

    def stream(self, prompt_token_ids: Sequence[int], tools: Sequence[Tool]) -> StreamParser:
        request = _request(tools)
        parser = self._parser_class(self._tokenizer, request.tools)
        prompt = list(prompt_token_ids)
        parser.set_prompt_token_ids(prompt)

        def read(text: str, token_ids: Sequence[int]) -> tuple[str, str]:
            delta = parser.parse_delta(text, list(token_ids), request, prompt, finished=False)
            if delta is None:
                return "", ""
            return str(delta.content or ""), str(delta.reasoning or "")

        return read

    def _error(
        self, text: str, calls: Sequence[ToolCall], failures: Sequence[BaseException]
    ) -> str:
        """Why the text's call cannot be made; empty if there is no problem."""
        for call in calls:
            if wrong := _wrong(call):
                return wrong
        if failures:
            return f"{self._name} cannot read the tool call: {failures[-1]}"
        if self._opens and text.count(self._opens) > text.count(self._closes):
            return f"the tool call is cut off: {self._opens} without {self._closes}"
        begun = next((mark for mark in self._begins if mark in text), None)
        if begun is not None and not calls:
            return f"the text after {begun} is not a tool call that {self._name} can read"
        return ""


def _wrong(call: ToolCall) -> str:
    """Empty if the call is fit. Python's JSON reader and the parsers accept what other readers refuse."""
    try:
        arguments: Any = json.loads(call.arguments_json)
        # NaN is not JSON. A lone surrogate, which JSON can spell, is not text.
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        (call.name + call.arguments_json).encode()
    except (ValueError, RecursionError) as error:
        return f"the arguments of {call.name!r} are not JSON: {error}"
    if not isinstance(arguments, dict):
        return f"the arguments of {call.name!r} are not a JSON object"
    if _is_deeper(arguments, MAX_DEPTH):
        return f"the arguments of {call.name!r} are nested more than {MAX_DEPTH} deep"
    return ""


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [part for whole in level for part in _parts(whole)]
    return bool(level)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _request(tools: Sequence[Tool]) -> Any:
    """As the parsers expect one. Its other fields do not matter."""
    described = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]
    return ChatCompletionRequest.model_validate(
        {"messages": [], "tools": described, "tool_choice": "auto"}
        if described
        else {"messages": [], "tool_choice": "none"}
    )


def _own_id(call_id: str | None) -> str:
    """Empty if the parser generated it, not the model."""
    return "" if call_id is None or call_id.startswith(_GENERATED_ID) else call_id


def _marks(parser: Any) -> tuple[tuple[str, ...], str, str]:
    """Texts that begin tool calls, and the opening and closing text of calls that are always closed."""
    tool_parser = parser.tool_parser
    if tool_parser is None:
        return (), "", ""
    engine = getattr(tool_parser, "_parser_engine", None)
    if engine is None:
        names = [name for name in dir(tool_parser) if _MARK_NAMES.fullmatch(name)]
        found = [getattr(tool_parser, name) for name in names]
        return _texts(found), "", ""
    terminals: dict[str, object] = engine.parser_engine_config.terminals
    begins = _texts(terminals.get(name) for name in _TERMINALS)
    opens, closes = (_texts([terminals.get(name)]) for name in ("TOOL_START", "TOOL_END"))
    if len(opens) == len(closes) == 1 and opens != closes:
        return begins, opens[0], closes[0]
    return begins, "", ""


def _texts(found: Iterable[object]) -> tuple[str, ...]:
    texts: list[str] = []
    for item in found:
        variants = cast("tuple[object, ...]", item) if isinstance(item, tuple) else (item,)
        texts += [text for text in variants if isinstance(text, str) and text]
    return tuple(dict.fromkeys(texts))


class _KeepFailures(logging.Handler):
    """Keeps exceptions that a parser logs for the caller of the parser; passes other records on."""

    def emit(self, record: logging.LogRecord) -> None:
        kept = _failures.get()
        if kept is not None and record.exc_info and record.exc_info[1] is not None:
            kept.append(record.exc_info[1])
        else:
            logging.getLogger("vllm").callHandlers(record)


_HANDLER = _KeepFailures()


def _keep_failures() -> None:
    for name in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
        logger = logging.getLogger(name)
        logger.propagate = False
        if _HANDLER not in logger.handlers:
            logger.addHandler(_HANDLER)
