"""vLLM's parsers behind the server's interface: what they find, and how
unreadable calls are handled."""

from __future__ import annotations

import logging
import logging.handlers
import queue
from typing import Any

import pytest

pytest.importorskip("vllm")

from penstock.server.__main__ import main as serve
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.vllm.parsers import ParserUnknown, VllmParsers, check_names
from tests.support.chat_templates import make_tokenizer

TOOL = Tool("add", "adds", {"type": "object", "properties": {"a": {"type": "integer"}}})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
FOUND = (ToolCall("", "add", '{"a": 1}'),)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer("qwen3")


def parse(tokenizer: Any, text: str, tool: str, reasoning: str = "", tools: Any = (TOOL,)) -> Any:
    parsers = VllmParsers(tokenizer, tool, reasoning)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return parsers.parse(text, ids, [1, 2], tools)


@pytest.mark.parametrize(("parser", "call"), [("hermes", CALL), ("qwen3_coder", XML)])
def test_calls_and_reasoning_are_found(tokenizer: Any, parser: str, call: str) -> None:
    parsed = parse(tokenizer, f"<think>\nhm\n</think>\n\nSo {call}{call}", parser, "qwen3")
    assert (parsed.message.reasoning.strip(), parsed.message.content.strip()) == ("hm", "So")
    assert (parsed.message.tool_calls, parsed.tool_call_error) == (FOUND * 2, "")
    plain = parse(tokenizer, "Just text.", parser)
    assert (plain.message, plain.tool_call_error) == (Message("assistant", "Just text."), "")


def test_without_tools_nothing_is_a_call(tokenizer: Any) -> None:
    parsed = parse(tokenizer, CALL, "hermes", tools=())
    assert (parsed.message, parsed.tool_call_error) == (Message("assistant", CALL), "")


DEEP = '{"a": ' * 101 + "1" + "}" * 101

MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "Expecting"),
    ("hermes", '<tool_call>{"name": "add", "arg', "Unterminated string"),
    ("hermes", '<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "not a JSON object"),
    ("hermes", "<tool_call></tool_call>", "Expecting value"),
    # Python reads and writes this as JSON; other implementations do not.
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>',
        "surrogates",
    ),
    ("hermes", '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "surrogates"),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        "not JSON compliant",
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        "not JSON compliant",
    ),
    (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>',
        "more than 100 deep",
    ),
    ("hermes", f"{CALL}<tool_call>[</tool_call>", "Expecting value"),
    ("qwen3_coder", "So <tool_call>\n<function=add>\n<para", "cut off"),
    ("qwen3_coder", CALL, "not a tool call that qwen3_coder can read"),
]


@pytest.mark.parametrize(("parser", "text", "reason"), MALFORMED)
def test_what_cannot_be_read_comes_back_as_text_with_a_reason(
    tokenizer: Any, parser: str, text: str, reason: str
) -> None:
    logged = queue.SimpleQueue[Any]()
    handler = logging.handlers.QueueHandler(logged)
    logging.getLogger().addHandler(handler)
    try:
        parsed = parse(tokenizer, text, parser)
    finally:
        logging.getLogger().removeHandler(handler)
    assert parsed.message == Message("assistant", text)
    assert reason in parsed.tool_call_error
    # It is the policy's mistake, so the operator's log stays empty.
    assert logged.empty()


def test_names_are_checked_with_those_there_are() -> None:
    check_names("hermes", "qwen3")
    check_names("", "")
    with pytest.raises(ParserUnknown, match=r"tool_parser: vLLM has no 'herms'; it has .*hermes"):
        check_names("herms", "")
    with pytest.raises(ParserUnknown, match=r"reasoning_parser: vLLM has no 'qwen'; .*qwen3"):
        check_names("", "qwen")


def test_a_parser_that_does_not_fit_the_tokenizer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ParserUnknown, match="mistral"):
        VllmParsers(tokenizer, "mistral", "")


def test_penstock_serve_names_the_parsers_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    setting = "conversation.tool_parser=herms"
    assert serve(["--model", "nowhere", "--set", setting]) == 2
    shown = capsys.readouterr().err
    assert "vLLM has no 'herms'" in shown and "hermes" in shown
