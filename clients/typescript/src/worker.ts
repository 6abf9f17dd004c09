/**
 * The worker: a fixed number of attempts in flight, across training steps.
 *
 * Order of shutdown: stop leasing, so that no attempt starts -> let running attempts end, up to the drain bound -> fail
 * the rest, so that the server repeats them -> close the lease stream.
 */

import type { Calls } from "./calls.js";
import { InvalidRequest, Overloaded, PenstockError } from "./errors.js";
import { type Attempt, LeaseLost, Leases, type LeaseOptions } from "./leases.js";
import { type Closed, Failed, type Outcome, type Score, asFailed, asOutcome } from "./outcome.js";
import { sleep } from "./calls.js";

/** Runs an attempt and returns the reward. An error fails only its attempt. */
export type Agent = (attempt: Attempt) => Promise<Score> | Score;

/** Configuration of a worker. */
export interface WorkerOptions extends Omit<LeaseOptions, "wholeGroups" | "resumeAborted"> {
  /** Return after this many attempts; if unset, continue until stopped. */
  attempts?: number;
  /** Time limit of one attempt, if less than the server's; after it, the attempt fails with ATTEMPT_TIMEOUT. */
  attemptMs?: number;
  /** Stops the worker: attempts in flight are finished or given back. */
  signal?: AbortSignal;
  /** How long attempts in flight may continue after that. */
  drainMs?: number;
  /** Called for each attempt that has ended. */
  onAttempt?: (attempt: Attempt, outcome: Outcome | Failed | undefined) => void;
}

/** Counts of a worker's attempts. */
export interface Statistics {
  /** Attempts that ended with a reward. */
  rewarded: number;
  /** Attempts that ended with a failure. */
  failed: number;
  /** Attempts that lost their lease or server. */
  lost: number;
}

/** Time limit for giving back unfinished attempts when the worker stops. */
const GIVE_BACK_MS = 5_000;

const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Leases attempts and runs `agent` on each. Throws PenstockError if the server refuses to lease. */
export async function work(calls: Calls, options: WorkerOptions, agent: Agent): Promise<Statistics> {
  const { concurrency = 8, attempts = Infinity, signal, drainMs = 20_000 } = options;
  const statistics: Statistics = { rewarded: 0, failed: 0, lost: 0 };
  const leases = new Leases(calls, { ...options, concurrency, resumeAborted: true });
  const running = new Map<string, Promise<void>>();
  let wake = (): void => undefined;
  const stop = () => {
    leases.stopLeasing();
    wake();
  };
  /** Waits until an attempt ends, or the signal is aborted. */
  const news = () => Promise.race([...running.values(), new Promise<void>((resolve) => (wake = resolve))]);
  if (signal?.aborted) stop();
  signal?.addEventListener("abort", stop, { once: true });
  try {
    for (let begun = 0; begun < attempts; begun++) {
      const { value: attempt } = await leases.next();
      if (!attempt) break;
      const id = attempt.trajectory.trajectoryId;
      const ended = new AttemptRun(leases, attempt, options, statistics).run(agent);
      running.set(id, ended.finally(() => running.delete(id)));
      if (running.size >= concurrency && !signal?.aborted) await news();
    }
    leases.stopLeasing();
    while (running.size > 0) {
      if (!signal?.aborted) {
        await news();
        continue;
      }
      if (await within(drainMs, running)) break;
      for (const id of running.keys()) leases.cancel(id, new Failed("WORKER_STOPPED", "the worker was stopped"));
      await within(GIVE_BACK_MS, running);
      break;
    }
  } finally {
    signal?.removeEventListener("abort", stop);
    leases.close();
  }
  return statistics;
}

/** Runs one attempt, from its lease to its outcome. */
class AttemptRun {
  constructor(
    private readonly leases: Leases,
    private readonly attempt: Attempt,
    private readonly options: WorkerOptions,
    private readonly statistics: Statistics,
  ) {}

  async run(agent: Agent): Promise<void> {
    const outcome = await this.judge(agent);
    const closed = outcome && (await this.close(outcome));
    const sent = closed && (this.attempt.trajectory.outcome ?? outcome);
    if (sent === undefined) {
      this.statistics.lost++;
      this.leases.release(this.attempt.trajectory.trajectoryId);
    } else if (sent instanceof Failed) {
      this.statistics.failed++;
    } else {
      this.statistics.rewarded++;
    }
    this.options.onAttempt?.(this.attempt, sent);
  }

  /** Runs the agent; returns undefined if its lease is lost. */
  private async judge(agent: Agent): Promise<Outcome | Failed | undefined> {
    const { trajectory, signal, endsAt } = this.attempt;
    const ms = Math.min(this.options.attemptMs ?? Infinity, endsAt - Date.now());
    const late = new Failed("ATTEMPT_TIMEOUT", `not done within ${Math.round(ms)} ms`);
    const cancel = () => this.leases.cancel(trajectory.trajectoryId, late);
    // A timer that is set for longer would fire at once.
    const timer = ms <= LONGEST_TIMER_MS ? setTimeout(cancel, ms) : undefined;
    try {
      // An agent that waits for something else may not react to the signal.
      const score = await Promise.race([Promise.resolve(this.attempt).then(agent), rejected(signal)]);
      return trajectory.closed ? trajectory.outcome : asOutcome(score);
    } catch (error) {
      const reason: unknown = signal.aborted ? signal.reason : error;
      if (reason instanceof LeaseLost) return undefined;
      return trajectory.closed ? trajectory.outcome : asFailed(reason);
    } finally {
      clearTimeout(timer);
    }
  }

  /** Sends an outcome; returns undefined if that is impossible, and the attempt is lost. */
  private async close(outcome: Outcome | Failed, ownSent = false): Promise<Closed | undefined> {
    const { trajectory } = this.attempt;
    const own = trajectory.outcome;
    try {
      // The agent closed it itself; a repeated close returns the same result.
      return await trajectory.close(trajectory.closed && own ? own : outcome);
    } catch (error) {
      const known = error instanceof PenstockError || error instanceof TypeError || error instanceof RangeError;
      if (!known) throw error;
      // Not if the server was full all the time: the outcome is still valid.
      const tooLarge = error instanceof Overloaded && error.retryAfterMs === undefined;
      const refused = !(error instanceof PenstockError) || error instanceof InvalidRequest || tooLarge;
      // The outcome itself may be impossible to send.
      if (refused && !(outcome instanceof Failed)) return this.close(asFailed(error), ownSent);
      const differs = error instanceof PenstockError && error.reason === "OUTCOME_DIFFERS";
      // The agent closed it itself, but did not receive the answer.
      if (differs && own && !ownSent) return this.close(own, true);
      return undefined;
    }
  }
}

/** Rejects when a signal is aborted. */
function rejected(signal: AbortSignal): Promise<never> {
  const waiting = new Promise<never>((_, reject) => {
    if (signal.aborted) reject(signal.reason);
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
  // Prevents an unhandled rejection once no code waits for it any more.
  waiting.catch(() => undefined);
  return waiting;
}

/** Whether all of them end within a time limit. */
async function within(ms: number, running: Map<string, Promise<void>>): Promise<boolean> {
  const timer = new AbortController();
  const all = Promise.all(running.values()).then(() => true);
  const late = sleep(ms, timer.signal).then(() => false, () => false);
  const done = await Promise.race([all, late]);
  timer.abort();
  return done;
}
