"""Three tokenizers of bytes whose chat templates differ as those of the large families do.

The end of a turn is token 256 in each, which is where the fake engine ends one; what opens and closes a
call is 258 and 259. What matters of the
families: ChatML writes tools as JSON and a call after the text; Llama 3 has headers, leaves the text out
beside a call and refuses several calls in one message; Qwen 3 leaves out reasoning before the last
question, puts an empty one into the last answer, and joins the answers of tools into one turn.
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
    """The tokenizer of a family."""
    tokens, template = FAMILIES[family]
    return make_byte_tokenizer(tokens, template, tokens[0])
