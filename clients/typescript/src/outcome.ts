/** How an attempt ended, as its agent judged it. */

import { Outcome as WireOutcome } from "./gen/penstock/v1/trajectory.js";
import { PenstockError } from "./errors.js";

/** A scored attempt. */
export interface Outcome {
  /** The scalar return; finite. */
  reward: number;
  /** Named parts of the reward, and any other number worth logging. */
  metrics?: Record<string, number>;
  /** JSON values for later readers. */
  metadata?: Record<string, unknown>;
  /** Rewards of single turns, by index; empty if only the whole is scored. */
  turnRewards?: number[];
}

/** An attempt that could not be scored; the server repeats it, up to a bound. An agent may return or throw it. */
export class Failed extends Error {
  /** `reason` is machine-readable, UPPER_SNAKE_CASE; it is cut after 256 characters. */
  constructor(
    readonly reason: string,
    message = "",
  ) {
    super(message);
    this.name = "Failed";
  }
}

/** Maximum length of a failure's reason that a server accepts. */
const REASON_LENGTH = 256;

/** Values that an agent may return. */
export type Score = number | boolean | Outcome | Failed;

/** The server's answer to a close. */
export interface Closed {
  /** Whether this close completed its group. */
  groupCompleted: boolean;
  /** Whether the attempt failed and will be repeated, under another trajectory id. */
  retried: boolean;
}

/** Checks that an outcome can be sent, and converts it for the wire. Throws RangeError, TypeError. */
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

/** A text with each lone surrogate replaced, because UTF-8 cannot encode them. */
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

/** An agent's result as an outcome. Throws RangeError, TypeError if it is not a finite number. */
export function asOutcome(score: Score): Outcome | Failed {
  if (score instanceof Failed) return score;
  const outcome = typeof score === "object" && score !== null ? score : { reward: Number(score) };
  if (typeof score === "string" || score === undefined || score === null || typeof outcome.reward !== "number") {
    throw new TypeError(`a reward is a number, not ${score === null ? "null" : typeof score}`);
  }
  writeOutcome(outcome);
  return outcome;
}

/** An agent's error as a failure: its class in UPPER_SNAKE_CASE, and its message. */
export function asFailed(error: unknown): Failed {
  if (error instanceof Failed) return error;
  const known = error instanceof Error ? error : new Error(String(error));
  const named = known instanceof PenstockError ? known.reason : "";
  const words = known.name.replace(/(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])/g, "_");
  return new Failed(named || words.toUpperCase(), known.message.slice(0, 1000));
}
