/** Prompts, sampling options and tasks: the wire's messages in a form that is easier to write. */

import { type ChatMessage, type Conversation, Role, type Tool as WireTool } from "./gen/penstock/v1/conversation.js";
import { SamplingParams } from "./gen/penstock/v1/rollout_service.js";
import { Task as WireTask } from "./gen/penstock/v1/task_service.js";
import { Purpose as WirePurpose } from "./gen/penstock/v1/trajectory.js";

/** A call that the policy made. `argumentsJson` is exactly what it wrote, and may be invalid. */
export interface ToolCall {
  toolCallId: string;
  name: string;
  argumentsJson: string;
}

/** One chat message. */
export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  content?: string;
  toolCalls?: ToolCall[];
  /** Id of the call that a tool's message answers. */
  toolCallId?: string;
  reasoning?: string;
}

/** A function that the policy may call; `parameters` is a JSON Schema. */
export interface Tool {
  name: string;
  description?: string;
  parameters?: Record<string, unknown>;
}

/** Text, one message or several, or tokens: an Int32Array. */
export type Observation = string | Message | Message[] | Int32Array;

/** Sampling options, from this turn on. */
export interface Sampling {
  /** Defaults to 1; zero means greedy. */
  temperature?: number;
  topP?: number;
  /** Zero means no limit. */
  topK?: number;
  /** Limit of the policy's tokens in one turn, including its resumed parts. */
  maxTokens?: number;
  stopTokenIds?: number[];
  stop?: string[];
  seed?: bigint | number;
  ignoreEos?: boolean;
}

/** The purpose of a task and of the group that answers it. */
export type Purpose = "train" | "eval";

/** A task, to be attempted several times. */
export interface Task {
  /** Chosen by the submitter, unique in the run; makes submission idempotent. */
  taskId: string;
  /** Text (encoded without a chat template), messages or tokens; if unset, the agent builds it. */
  prompt?: Observation;
  tools?: Tool[];
  /** JSON values for the agent and for scoring. */
  metadata: Record<string, any>;
  groupSize: number;
  finishCount: number;
  purpose: Purpose;
  dataSource: string;
  index: bigint;
  sampling: Sampling;
}

type WirePrompt = NonNullable<WireTask["prompt"]>;

const ROLES = {
  system: Role.ROLE_SYSTEM,
  user: Role.ROLE_USER,
  assistant: Role.ROLE_ASSISTANT,
  tool: Role.ROLE_TOOL,
} as const;
const ROLE_NAMES = new Map<Role, Message["role"]>(
  Object.entries(ROLES).map(([name, role]) => [role, name as Message["role"]]),
);

/** A prompt for the wire's oneof; in a conversation a plain string is a user's message. */
export function writePrompt(shown: Observation | undefined, tools: Tool[], chat: boolean): WirePrompt | undefined {
  if (shown instanceof Int32Array) return { $case: "tokens", value: { tokenIds: Array.from(shown) } };
  if (typeof shown === "string") {
    if (!chat && tools.length === 0) return { $case: "text", value: shown };
    return { $case: "conversation", value: writeConversation([{ role: "user", content: shown }], tools) };
  }
  if (shown === undefined && tools.length === 0) return undefined;
  const messages = shown === undefined ? [] : Array.isArray(shown) ? shown : [shown];
  return { $case: "conversation", value: writeConversation(messages, tools) };
}

function writeConversation(messages: Message[], tools: Tool[]): Conversation {
  return { messages: messages.map(writeMessage), tools: tools.map(writeTool) };
}

function writeMessage(message: Message): ChatMessage {
  return {
    role: ROLES[message.role],
    content: message.content ?? "",
    toolCalls: message.toolCalls ?? [],
    toolCallId: message.toolCallId ?? "",
    reasoning: message.reasoning ?? "",
  };
}

function writeTool(tool: Tool): WireTool {
  return { name: tool.name, description: tool.description ?? "", parameters: tool.parameters ?? {} };
}

export function readMessage(message: ChatMessage): Message {
  const { content, toolCalls, toolCallId, reasoning } = message;
  return { role: ROLE_NAMES.get(message.role) ?? "user", content, toolCalls, toolCallId, reasoning };
}

export function writeSampling(sampling: Sampling): SamplingParams {
  const { seed, ...rest } = sampling;
  return SamplingParams.fromPartial({ ...rest, ...(seed === undefined ? {} : { seed: BigInt(seed) }) });
}

function readSampling(params: SamplingParams | undefined): Sampling {
  return params === undefined ? {} : { ...params };
}

export function writePurpose(purpose: Purpose | undefined): WirePurpose {
  if (purpose === undefined) return WirePurpose.PURPOSE_UNSPECIFIED;
  return purpose === "eval" ? WirePurpose.PURPOSE_EVAL : WirePurpose.PURPOSE_TRAIN;
}

export function writeTask(task: Partial<Task> & { taskId: string }): WireTask {
  return WireTask.fromPartial({
    taskId: task.taskId,
    purpose: writePurpose(task.purpose),
    groupSize: task.groupSize ?? 1,
    finishCount: task.finishCount ?? 0,
    prompt: writePrompt(task.prompt, task.tools ?? [], false),
    metadata: task.metadata ?? {},
    dataSource: task.dataSource ?? "",
    index: task.index ?? 0n,
    samplingParams: writeSampling(task.sampling ?? {}),
  });
}

export function readTask(task: WireTask): Task {
  return {
    taskId: task.taskId,
    ...readPrompt(task),
    metadata: task.metadata ?? {},
    groupSize: task.groupSize,
    finishCount: task.finishCount,
    purpose: task.purpose === WirePurpose.PURPOSE_EVAL ? "eval" : "train",
    dataSource: task.dataSource,
    index: task.index,
    sampling: readSampling(task.samplingParams),
  };
}

function readPrompt({ prompt }: WireTask): Pick<Task, "prompt" | "tools"> {
  switch (prompt?.$case) {
    case "text":
      return { prompt: prompt.value };
    case "tokens":
      return { prompt: Int32Array.from(prompt.value.tokenIds) };
    case "conversation":
      return {
        prompt: prompt.value.messages.map(readMessage),
        tools: prompt.value.tools.map((tool) => ({ ...tool, parameters: tool.parameters ?? {} })),
      };
    default:
      return {};
  }
}
