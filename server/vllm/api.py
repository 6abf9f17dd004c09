"""The request and answer models of OpenAI's and Anthropic's HTTP protocols, as vLLM defines them.

The HTTP endpoints import them from here, so that a release of vLLM that moves one changes one module.
Importing this takes seconds: it imports vLLM.
"""

from __future__ import annotations

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest as AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall as DeltaFunctionCall
from vllm.entrypoints.generate.base.protocol import DeltaMessage as DeltaMessage
from vllm.entrypoints.generate.base.protocol import DeltaToolCall as DeltaToolCall
from vllm.entrypoints.generate.base.protocol import FunctionCall as FunctionCall
from vllm.entrypoints.generate.base.protocol import ToolCall as ToolCall
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionRequest as ChatCompletionRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse as ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseChoice as ChatCompletionResponseChoice,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponseStreamChoice as ChatCompletionResponseStreamChoice,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionStreamResponse as ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatMessage as ChatMessage
from vllm.entrypoints.openai.responses.protocol import InputTokensDetails as InputTokensDetails
from vllm.entrypoints.openai.responses.protocol import OutputTokensDetails as OutputTokensDetails
from vllm.entrypoints.openai.responses.protocol import (
    ResponseCompletedEvent as ResponseCompletedEvent,
)
from vllm.entrypoints.openai.responses.protocol import ResponseCreatedEvent as ResponseCreatedEvent
from vllm.entrypoints.openai.responses.protocol import (
    ResponseInProgressEvent as ResponseInProgressEvent,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest as ResponsesRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse as ResponsesResponse
from vllm.entrypoints.openai.responses.protocol import ResponseUsage as ResponseUsage
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingEventProcessor as SimpleStreamingEventProcessor,
)
from vllm.entrypoints.openai.responses.streaming_events import split_delta as split_delta
from vllm.entrypoints.openai.responses.utils import (
    build_response_output_items as build_response_output_items,
)
from vllm.entrypoints.openai.responses.utils import (
    construct_input_messages as construct_input_messages,
)
from vllm.entrypoints.openai.responses.utils import (
    reuse_streamed_item_ids as reuse_streamed_item_ids,
)
from vllm.entrypoints.serve.engine.protocol import (
    CompletionTokenUsageInfo as CompletionTokenUsageInfo,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo as PromptTokenUsageInfo
from vllm.entrypoints.serve.engine.protocol import UsageInfo as UsageInfo
from vllm.exceptions import VLLMClientError as VLLMClientError
from vllm.sampling_params import SamplingParams as SamplingParams
