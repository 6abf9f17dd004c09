"""The request and answer models of OpenAI's and Anthropic's HTTP protocols, as vLLM defines them.

The HTTP endpoints import them from here, so that a release of vLLM that moves one changes one module.
Importing this takes seconds: it imports vLLM.
"""

from __future__ import annotations

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
)
from vllm.entrypoints.openai.responses.protocol import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseInProgressEvent,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor,
    split_delta,
)
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items,
    construct_input_messages,
    reuse_streamed_item_ids,
)
from vllm.entrypoints.serve.engine.protocol import (
    CompletionTokenUsageInfo,
    PromptTokenUsageInfo,
    UsageInfo,
)
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams

__all__ = [
    "AnthropicMessagesRequest",
    "AnthropicServingMessages",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionResponseChoice",
    "ChatCompletionResponseStreamChoice",
    "ChatCompletionStreamResponse",
    "ChatMessage",
    "CompletionTokenUsageInfo",
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "FunctionCall",
    "InputTokensDetails",
    "OutputTokensDetails",
    "PromptTokenUsageInfo",
    "ResponseCompletedEvent",
    "ResponseCreatedEvent",
    "ResponseInProgressEvent",
    "ResponseUsage",
    "ResponsesRequest",
    "ResponsesResponse",
    "SamplingParams",
    "SimpleStreamingEventProcessor",
    "ToolCall",
    "UsageInfo",
    "VLLMClientError",
    "build_response_output_items",
    "construct_input_messages",
    "reuse_streamed_item_ids",
    "split_delta",
]
