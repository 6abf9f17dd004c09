/** A turn as returned to the caller, and its assembly from the events of one or more streams. */

import { status } from "@grpc/grpc-js";
import type { TurnRequest } from "./calls.js";
import { DeadlineExceeded, PenstockError, ServerUnavailable } from "./errors.js";
import type { TurnFinished, TurnStarted } from "./gen/penstock/v1/rollout_service.js";
import {
  Author,
  FinishReason as WireFinishReason,
  type Segment as WireSegment,
  type Trajectory as WireTrajectory,
} from "./gen/penstock/v1/trajectory.js";
import { type Failed, type Outcome, readOutcome } from "./outcome.js";
import { type Message, readMessage } from "./prompt.js";

/** Why generation stopped; an "aborted" turn can be resumed at the exact token. */
export type FinishReason = "stop" | "length" | "aborted";

/** A run of tokens with one author; the policy's also has one weight version. */
export interface Segment {
  tokenIds: Int32Array;
  /** Log-probability of each token under the distribution it was sampled from; empty for context. */
  logprobs: Float32Array;
  /** Version of the weights that sampled the tokens; 0n for context. */
  weightVersion: bigint;
  /** Index of the turn, from zero. */
  turnIndex: number;
  /** Temperature at which the tokens were sampled; zero for context. */
  temperature: number;
  /** Whether the policy wrote the tokens; otherwise the environment did. */
  fromPolicy: boolean;
  /** In a segment from `stream`: number of the turn's tokens before it. */
  position: number;
}

/** One turn of the policy, including its resumed parts. */
export interface Turn {
  /** Index of the turn, from zero. */
  index: number;
  /** The policy's tokens, one segment per weight version. */
  segments: Segment[];
  finishReason: FinishReason;
  /** Whether `resume` can continue the turn. */
  aborted: boolean;
  /** The policy's text; empty if the trajectory was opened with tokens. */
  text: string;
  /** The same as a message with tool calls, if the trajectory was opened with messages. */
  message?: Message;
  /** Number of tokens the policy saw before it wrote. */
  contextTokenCount: number;
  /** How many of them the engine took from its prefix cache. */
  cachedTokenCount: number;
  /**
   * Why text that looks like a tool call is not one; an error message for the policy. The text itself is in the
   * message's content. Empty if there is no such text.
   */
  toolCallError: string;
}

/** A trajectory as the server holds it. */
export interface TrajectoryRecord {
  trajectoryId: string;
  /** Segments of context and policy; their tokens, concatenated, are the sequence that the model saw. */
  segments: Segment[];
  /** Why the last policy segment stopped; unset while a turn is in flight. */
  finishReason?: FinishReason;
  turnCount: number;
  outcome?: Outcome | Failed;
  /** Whether it can still be extended. */
  open: boolean;
}

const FINISH_REASONS = new Map<WireFinishReason, FinishReason>([
  [WireFinishReason.FINISH_REASON_STOP, "stop"],
  [WireFinishReason.FINISH_REASON_LENGTH, "length"],
  [WireFinishReason.FINISH_REASON_ABORTED, "aborted"],
]);

export const readFinishReason = (reason: WireFinishReason): FinishReason | undefined => FINISH_REASONS.get(reason);

/** A turn in flight: what has arrived so far, over several streams and resumptions. */
export class TurnProgress {
  /** Whether the server is known to have started it. */
  started = false;
  segments: Segment[] = [];
  tokenCount = 0;
  contextTokenCount = 0;
  finished: Turn | undefined;

  constructor(
    readonly index: number,
    /** The request that started it. */
    readonly request: TurnRequest,
  ) {}

  /** An aborted turn that is to be resumed. */
  static of(turn: Turn, resume: TurnRequest): TurnProgress {
    const progress = new TurnProgress(turn.index, resume);
    progress.started = true;
    progress.segments = [...turn.segments];
    progress.tokenCount = countOf(turn.segments);
    progress.contextTokenCount = turn.contextTokenCount;
    return progress;
  }

  /** Records that the server has started the turn. */
  start(event: TurnStarted): void {
    this.started = true;
    // A resumed turn reports its earlier tokens as context, so only the first report counts.
    this.contextTokenCount ||= event.contextTokenCount;
  }

  /** Appends tokens that arrived; returns them with their position. */
  add(segment: Segment): Segment {
    const placed = { ...segment, position: this.tokenCount };
    this.segments.push(placed);
    this.tokenCount += placed.tokenIds.length;
    return placed;
  }

  /** Resets the turn, which the server never started or does not know: it starts again. */
  forget(): void {
    this.started = false;
    this.segments = [];
    this.tokenCount = this.contextTokenCount = 0;
  }

  /**
   * Takes the record's tokens as the turn so far, which the server has started. Returns what the caller has not been
   * given yet. Tokens that the caller was given but the record lacks never became durable. In that case, the first
   * segment, or the next to arrive, has a position before them.
   */
  catchUp(record: TrajectoryRecord): Segment[] {
    this.started = true;
    const written = record.segments.filter((s) => s.fromPolicy && s.turnIndex === this.index);
    this.contextTokenCount ||= countOf(record.segments) - countOf(written);
    const known = commonCount(this.segments, written);
    this.segments = [];
    this.tokenCount = 0;
    const missing: Segment[] = [];
    for (const segment of written) {
      const placed = this.add(segment);
      const taken = Math.min(Math.max(0, known - placed.position), placed.tokenIds.length);
      if (taken < placed.tokenIds.length) missing.push(after(placed, taken));
    }
    return missing;
  }

  /** Ends the turn. Throws PenstockError if tokens are missing. */
  finish(event: TurnFinished): void {
    if (event.policyTokenCount !== this.tokenCount) {
      throw new PenstockError(`${this.tokenCount} of ${event.policyTokenCount} tokens of a turn arrived`, {
        code: status.DATA_LOSS,
      });
    }
    const finishReason = readFinishReason(event.finishReason) ?? "stop";
    const message = event.message && readMessage(event.message);
    this.finished = {
      index: this.index,
      segments: mergeRuns(this.segments),
      finishReason,
      aborted: finishReason === "aborted",
      text: message?.content ?? event.text,
      ...(message ? { message } : {}),
      contextTokenCount: this.contextTokenCount,
      cachedTokenCount: event.cachedTokenCount,
      toolCallError: event.toolCallError,
    };
  }

  /** Whether an error means that the server never started the turn. */
  refused(error: unknown): boolean {
    const unsure = error instanceof ServerUnavailable || error instanceof DeadlineExceeded;
    return error instanceof PenstockError && !this.started && !unsure;
  }
}

/** Reads a wire segment. Throws PenstockError if its arrays disagree. */
export function readSegment(segment: WireSegment): Segment {
  const { tokenIds, logprobs, weightVersion, turnIndex, temperature } = segment;
  const fromPolicy = segment.author === Author.AUTHOR_POLICY;
  if (fromPolicy && tokenIds.length !== logprobs.length) {
    throw new PenstockError(`${tokenIds.length} tokens, ${logprobs.length} log-probabilities`, {
      reason: "MALFORMED_MESSAGE",
    });
  }
  return {
    tokenIds: Int32Array.from(tokenIds),
    logprobs: Float32Array.from(logprobs),
    weightVersion,
    turnIndex,
    temperature,
    fromPolicy,
    position: 0,
  };
}

export function readTrajectory(trajectory: WireTrajectory, open: boolean): TrajectoryRecord {
  const finishReason = readFinishReason(trajectory.finishReason);
  const outcome = readOutcome(trajectory.outcome);
  return {
    trajectoryId: trajectory.trajectoryId,
    segments: trajectory.segments.map(readSegment),
    ...(finishReason ? { finishReason } : {}),
    turnCount: trajectory.turnCount,
    ...(outcome ? { outcome } : {}),
    open,
  };
}

/** Number of tokens in several segments. */
export const countOf = (segments: Segment[]): number => segments.reduce((n, s) => n + s.tokenIds.length, 0);

/** The tokens of several segments, concatenated. */
export function tokensOf(segments: Segment[]): Int32Array {
  const tokens = new Int32Array(countOf(segments));
  let at = 0;
  for (const segment of segments) {
    tokens.set(segment.tokenIds, at);
    at += segment.tokenIds.length;
  }
  return tokens;
}

function after(segment: Segment, count: number): Segment {
  const { tokenIds, logprobs, position } = segment;
  return {
    ...segment,
    tokenIds: tokenIds.subarray(count),
    logprobs: logprobs.subarray(count),
    position: position + count,
  };
}

function commonCount(first: Segment[], second: Segment[]): number {
  const [a, b] = [tokensOf(first), tokensOf(second)];
  const length = Math.min(a.length, b.length);
  for (let i = 0; i < length; i++) if (a[i] !== b[i]) return i;
  return length;
}

/** Merges neighbouring segments of equal weight version and temperature. */
function mergeRuns(segments: Segment[]): Segment[] {
  const runs: Segment[][] = [];
  for (const segment of segments) {
    const run = runs.at(-1);
    const last = run?.[0];
    if (last?.weightVersion === segment.weightVersion && last.temperature === segment.temperature) {
      run?.push(segment);
    } else {
      runs.push([segment]);
    }
  }
  return runs.map((run) => {
    const tokenIds = tokensOf(run);
    const logprobs = new Float32Array(tokenIds.length);
    const first = run[0]!.position;
    for (const { position, logprobs: part } of run) logprobs.set(part, position - first);
    return { ...run[0]!, tokenIds, logprobs };
  });
}
