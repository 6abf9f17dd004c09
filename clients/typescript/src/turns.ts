/** A turn as the caller sees it, and its assembly from the events of one or more streams. */

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

/** A run of tokens with one author and, for the policy, one weight version. */
export interface Segment {
  tokenIds: Int32Array;
  /** Of each token under the distribution it was sampled from; empty for context. */
  logprobs: Float32Array;
  /** Weights that sampled the tokens; 0n for context. */
  weightVersion: bigint;
  /** From zero. */
  turnIndex: number;
  /** Temperature the tokens were sampled at; zero for context. */
  temperature: number;
  /** Whether the policy wrote them, or the environment did. */
  fromPolicy: boolean;
  /** Of one that `stream` yields: tokens of the turn before it. */
  position: number;
}

/** One turn of the policy, over all its attempts. */
export interface Turn {
  /** From zero. */
  index: number;
  /** The policy's tokens, one segment per weight version. */
  segments: Segment[];
  finishReason: FinishReason;
  /** Whether `resume` can go on with it. */
  aborted: boolean;
  /** What the policy wrote; empty where the trajectory was opened with tokens. */
  text: string;
  /** The same with tool calls, where the trajectory was opened with messages. */
  message?: Message;
  /** Tokens the policy saw before it wrote. */
  contextTokenCount: number;
  /** Those of them that the engine took from its cache. */
  cachedTokenCount: number;
  /**
   * Why what begins as a tool call is none, for the policy to be told: its text is in the message's content. Empty
   * where there is no such thing.
   */
  toolCallError: string;
}

/** A trajectory as the server holds it. */
export interface TrajectoryRecord {
  trajectoryId: string;
  /** Context and policy; their tokens, concatenated, are the sequence the model saw. */
  segments: Segment[];
  /** Why the last policy segment stopped; unset while a turn runs. */
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

/** A turn under way: what has arrived of it so far, over streams and attempts. */
export class TurnProgress {
  /** Whether the server is known to have begun it. */
  started = false;
  segments: Segment[] = [];
  tokenCount = 0;
  contextTokenCount = 0;
  finished: Turn | undefined;

  constructor(
    readonly index: number,
    /** What began it. */
    readonly request: TurnRequest,
  ) {}

  /** An aborted turn that is to go on. */
  static of(turn: Turn, resume: TurnRequest): TurnProgress {
    const progress = new TurnProgress(turn.index, resume);
    progress.started = true;
    progress.segments = [...turn.segments];
    progress.tokenCount = countOf(turn.segments);
    progress.contextTokenCount = turn.contextTokenCount;
    return progress;
  }

  /** The server has begun it. */
  start(event: TurnStarted): void {
    this.started = true;
    // A resumed attempt counts what was written before as context; the turn's own is the first.
    this.contextTokenCount ||= event.contextTokenCount;
  }

  /** Appends tokens that arrived; returns them with their position. */
  add(segment: Segment): Segment {
    const placed = { ...segment, position: this.tokenCount };
    this.segments.push(placed);
    this.tokenCount += placed.tokenIds.length;
    return placed;
  }

  /** The server never began it, or does not know that it did: it begins anew. */
  forget(): void {
    this.started = false;
    this.segments = [];
    this.tokenCount = this.contextTokenCount = 0;
  }

  /**
   * The server has begun it, and what the record holds is the turn so far. Returns what the caller was not
   * given yet. What it was given and the record does not have never became durable; then the first segment,
   * or the next that arrives, has a position before that.
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

  /** Ends the turn. Throws PenstockError where tokens are missing. */
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

  /** Whether an error means that the server never began it. */
  refused(error: unknown): boolean {
    const unsure = error instanceof ServerUnavailable || error instanceof DeadlineExceeded;
    return error instanceof PenstockError && !this.started && !unsure;
  }
}

/** A segment of the wire. Throws PenstockError where its arrays disagree. */
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

/** Tokens of several segments. */
export const countOf = (segments: Segment[]): number => segments.reduce((n, s) => n + s.tokenIds.length, 0);

/** The tokens of several segments, one after another. */
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

/** One segment per run of equal weight version and temperature. */
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
