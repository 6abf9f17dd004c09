"""The same agent for each official SDK: a question, a tool call, the tool's answer and a final
answer.

The agents know only their SDK and a base URL. They raise if an answer does not have the SDK's
shape.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai

USER = {"role": "user", "content": "what is the weather in Paris?"}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
ANSWER = "21 degrees"
MAX_TOKENS = 100


async def chat_agent(base: str, stream: bool, **fields: Any) -> str:
    """A tool-using conversation through OpenAI's chat completions."""
    tools: Any = [
        {
            "type": "function",
            "function": {"name": "weather", "description": "", "parameters": SCHEMA},
        }
    ]
    messages: list[Any] = [USER]
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": tools}
            asked |= {"max_completion_tokens": MAX_TOKENS, **fields}
            if stream:
                async with client.chat.completions.stream(
                    **asked, stream_options={"include_usage": True}
                ) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_completion()
            else:
                answer = await client.chat.completions.create(**asked)
            assert answer.usage is not None and answer.usage.completion_tokens > 0
            choice = answer.choices[0]
            if not choice.message.tool_calls:
                return str(choice.message.content)
            assert choice.finish_reason in ("tool_calls", "length")
            messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in choice.message.tool_calls:
                assert call.type == "function" and set(json.loads(call.function.arguments)) == {"q"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": ANSWER})
    raise AssertionError("no answer")


async def responses_agent(base: str, stream: bool, **fields: Any) -> str:
    """The same conversation through OpenAI's responses."""
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
    items: list[Any] = [USER]
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "input": items, "tools": tools}
            asked |= {"max_output_tokens": MAX_TOKENS, **fields}
            if stream:
                async with client.responses.stream(**asked) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            assert answer.usage is not None and answer.usage.output_tokens > 0
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            for call in calls:
                items.append(
                    {
                        "type": "function_call",
                        "call_id": call.call_id,
                        "name": call.name,
                        "arguments": call.arguments,
                    }
                )
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}
                )
    raise AssertionError("no answer")


async def messages_agent(base: str, stream: bool, **fields: Any) -> str:
    """The same conversation through Anthropic's messages."""
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    messages: list[Any] = [USER]
    async with anthropic.AsyncAnthropic(base_url=base, api_key="any") as client:
        for _ in range(2):
            asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": tools}
            asked |= {"max_tokens": MAX_TOKENS, **fields}
            if stream:
                async with client.messages.stream(**asked) as events:
                    async for _event in events:
                        pass
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            assert answer.usage.output_tokens > 0
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                assert answer.content[0].type == "text"
                return answer.content[0].text
            messages.append({"role": "assistant", "content": answer.content})
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": ANSWER} for call in calls
            ]
            messages.append({"role": "user", "content": results})
    raise AssertionError("no answer")
