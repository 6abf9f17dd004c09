/** How an episode ended, as its agent judged it. */

import { Outcome as WireOutcome } from "./gen/penstock/v1/trajectory.js";
import { PenstockError } from "./errors.js";

/** A scored episode. */
export interface Outcome {
  /** The scalar return; finite. */
  reward: number;
  /** Named parts of the reward, and any other number worth logging. */
  metrics?: Record<string, number>;
  /** JSON values a later reader needs. */
  metadata?: Record<string, unknown>;
  /** Rewards of single turns, by index; empty where only the whole is scored. */
  turnRewards?: number[];
}

/** An episode that could not be scored: the server has the attempt made again, up to a bound. May be
 * returned or thrown by an agent. */
export class Failed extends Error {
  /** `reason` is machine-readable, UPPER_SNAKE_CASE; a server is told at most 256 characters of it. */
  constructor(
    readonly reason: string,
    message = "",
  ) {
    super(message);
    this.name = "Failed";
  }
}

/** Longest reason of a failure that a server takes. */
const REASON_LENGTH = 256;

/** What an agent may return. */
export type Score = number | boolean | Outcome | Failed;

/** Answer to a close. */
export interface Closed {
  /** Whether this close completed its group. */
  groupCompleted: boolean;
  /** Whether the attempt failed and will be made again, under another trajectory id. */
  retried: boolean;
}

/** Whether an outcome or the wire's could be sent at all. Throws RangeError, TypeError. */
export function writeOutcome(outcome: Outcome | Failed): WireOutcome {
  if (outcome instanceof Failed) {
    const value = { reason: asUtf8(outcome.reason.slice(0, REASON_LENGTH)), message: asUtf8(outcome.message) };
    return WireOutcome.fromPartial({ result: { $case: "failure", value } });
  }
  const numbers = [outcome.reward, ...(outcome.turnRewards ?? [])];
  if (!numbers.every(Number.isFinite)) throw new RangeError(`a reward must be finite, not ${outcome.reward}`);
  const { reward, metrics = {}, metadata, turnRewards = [] } = outcome;
  const written: WireOutcome = {
    result: { $case: "reward", value: reward },
    metrics,
    metadata: metadata ?? {},
    turnRewards,
  };
  try {
    WireOutcome.encode(written).finish();
  } catch (error) {
    throw new TypeError(`the outcome holds what JSON does not have: ${(error as Error).message}`);
  }
  return written;
}

/** A text with each lone surrogate replaced: they are no UTF-8. */
function asUtf8(text: string): string {
  return text.replace(/\p{Surrogate}/gu, "\ufffd");
}

export function readOutcome(outcome: WireOutcome | undefined): Outcome | Failed | undefined {
  switch (outcome?.result?.$case) {
    case "reward": {
      const { metrics, metadata = {}, turnRewards } = outcome;
      return { reward: outcome.result.value, metrics, metadata, turnRewards };
    }
    case "failure":
      return new Failed(outcome.result.value.reason, outcome.result.value.message);
    default:
      return undefined;
  }
}

/** What an agent returned, as an outcome. Throws RangeError, TypeError where it is no finite number. */
export function asOutcome(score: Score): Outcome | Failed {
  if (score instanceof Failed) return score;
  const outcome = typeof score === "object" && score !== null ? score : { reward: Number(score) };
  if (typeof score === "string" || score === undefined || score === null || typeof outcome.reward !== "number") {
    throw new TypeError(`a reward is a number, not ${score === null ? "null" : typeof score}`);
  }
  writeOutcome(outcome);
  return outcome;
}

/** What an agent threw, as data: its class in UPPER_SNAKE_CASE, and its message. */
export function asFailed(error: unknown): Failed {
  if (error instanceof Failed) return error;
  const known = error instanceof Error ? error : new Error(String(error));
  const named = known instanceof PenstockError ? known.reason : "";
  const words = known.name.replace(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])/g, "_");
  return new Failed(named || words.toUpperCase(), known.message.slice(0, 1000));
}
