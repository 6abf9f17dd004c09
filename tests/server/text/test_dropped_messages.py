"""Messages and tools of which a template writes nothing: the policy would never know of them."""

from __future__ import annotations

import pytest

from penstock.server.core.errors import FieldInvalid
from penstock.server.text.messages import Message, Tool, ToolCall
from penstock.server.text.renderer import Renderer
from tests.support.chat_templates import FAMILIES, make_tokenizer
from tests.support.tiny_model import make_byte_tokenizer

USER = Message("user", "What is 2 + 2?")
TOOL = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "number"}}})
# A system message counts at the beginning only, as in the templates of gpt-oss and Qwen3-VL.
FIRST_SYSTEM = """
{%- for m in messages -%}
  {%- if m.role != 'system' or loop.first -%}[{{ m.role }}]{{ m.content | trim }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
ESCAPING = FIRST_SYSTEM.replace("m.content | trim", "m.content | tojson")
UPPER = FIRST_SYSTEM.replace(
    "m.content | trim", "m.content if m.role == 'assistant' else m.content | upper"
)
WITH_TOOLS = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}" + FIRST_SYSTEM
)
STRICT = """
{%- for m in messages -%}
  {%- if m.role == 'user' and m.content not in ('What is 2 + 2?', '?') -%}
    {{ raise_exception('no') }}
  {%- endif -%}
  {%- if m.role != 'system' -%}[{{ m.role }}]{{ m.content }}{%- endif -%}
{%- endfor -%}"""


def renderer(template: str) -> Renderer:
    return Renderer(make_byte_tokenizer(chat_template=template))


def system(text: str = "Be brief.") -> Message:
    return Message("system", text)


@pytest.mark.parametrize("template", [FIRST_SYSTEM, ESCAPING, UPPER])
def test_a_message_that_a_template_drops_is_refused(template: str) -> None:
    made = renderer(template)
    made.render([system(), USER], [])
    made.render_next([USER], None)
    answered = [USER, Message("assistant", "4")]
    with pytest.raises(
        FieldInvalid, match=r"conversation.messages\[2\] is omitted .* system"
    ) as error:
        made.render([*answered, system(), USER], [])
    assert error.value.field == "conversation.messages[2]"
    with pytest.raises(FieldInvalid, match=r"conversation.messages\[0\] is omitted .* system"):
        made.render_next([system(), USER], None)


def test_a_dropped_message_is_found_though_another_has_its_text() -> None:
    with pytest.raises(FieldInvalid, match=r"messages\[1\] is omitted"):
        renderer(FIRST_SYSTEM).render(
            [Message("user", "Hi"), system("Hi"), Message("user", "Hi")], []
        )


def test_a_message_without_text_has_nothing_to_lose() -> None:
    call = ToolCall("c", "add", "{}")
    messages = [USER, system(""), Message("assistant", "", (call,)), Message("tool", " ")]
    renderer(FIRST_SYSTEM).render(messages, [])


def test_tools_that_a_template_does_not_know_are_refused() -> None:
    with pytest.raises(FieldInvalid, match=r"conversation.tools\[0\] is omitted"):
        renderer(FIRST_SYSTEM).render([USER], [TOOL])
    renderer(WITH_TOOLS).render([USER], [TOOL])


def test_a_template_that_reads_texts_is_asked_about_what_it_wrote() -> None:
    made = renderer(STRICT)
    made.render([USER], [])
    with pytest.raises(FieldInvalid, match=r"messages\[0\] is omitted"):
        made.render([system(), USER], [])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_templates_of_the_large_families_drop_nothing_of_a_tool_loop(family: str) -> None:
    made = Renderer(make_tokenizer(family))
    call = ToolCall("abcdefghi", "add", '{"a": 2}')
    first = [system(), USER] if family != "mistral" else [USER]
    made.render(first, [TOOL])
    made.render(
        [*first, Message("assistant", "", (call,)), Message("tool", "4", tool_call_id="abcdefghi")],
        [TOOL],
    )
    made.render_next([Message("tool", "4", tool_call_id="abcdefghi")], None)
    made.render_next([USER], None)


def test_many_messages_have_marks_of_their_own() -> None:
    """Each is looked for, also where the mark of one place begins like that of another."""
    made = renderer(FIRST_SYSTEM)
    talk = [Message(("user", "assistant")[i % 2], "x") for i in range(5_000)]
    made.render(talk, [])
    talk[4_321] = system("x")
    with pytest.raises(FieldInvalid, match=r"messages\[4321\] is omitted"):
        made.render(talk, [])
