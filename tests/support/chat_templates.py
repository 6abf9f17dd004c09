"""Three byte tokenizers whose chat templates differ in the ways the large model families differ.

Token 256 ends a turn in each of them, as it does for the fake engine. Tokens 258 and 259 open and
close a tool call. Each family covers different behaviour:

- ChatML writes tools as JSON, and a call after the text.
- Llama 3 has headers, drops the text of a message with a call, and refuses several calls in one message.
- Qwen 3 drops reasoning before the last question, puts an empty reasoning block into the last answer,
  and joins consecutive tool answers into one turn.
"""

from __future__ import annotations

from tests.support.tiny_model import CHAT_TEMPLATE, make_byte_tokenizer

CHATML_TOKENS = ("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<|pad|>")
LLAMA3_TOKENS = (
    *("<|eot_id|>", "<|start_header_id|>", "<tool_call>", "</tool_call>", "<|end_header_id|>"),
    *("<|begin_of_text|>", "<|pad|>"),
)
QWEN3_TOKENS = (
    *("<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<tool_response>", "</tool_response>", "<|pad|>"),
)

LLAMA3 = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>"
    "{% for message in messages %}"
    "{% if message.tool_calls %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{% elif message.role == 'tool' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>"
    "{% else %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

QWEN3 = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% endif %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}"
    "<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}"
    "<think>\n{{ (message.reasoning_content or '').strip('\\n') }}\n</think>\n\n"
    "{% endif %}{{ message.content.lstrip('\\n') }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FAMILIES = {
    "chatml": (CHATML_TOKENS, CHAT_TEMPLATE),
    "llama3": (LLAMA3_TOKENS, LLAMA3),
    "qwen3": (QWEN3_TOKENS, QWEN3),
}


def make_tokenizer(family: str) -> object:
    tokens, template = FAMILIES[family]
    return make_byte_tokenizer(tokens, template, tokens[0])
