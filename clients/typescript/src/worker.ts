/**
 * The worker: a fixed number of attempts in flight, across training steps.
 *
 * Order of shutdown: stop leasing, so that nothing new begins; let what runs end, up to the drain bound; fail
 * the rest, so that the server has it made again; close the lease stream.
 */

import type { Calls } from "./calls.js";
import { InvalidRequest, Overloaded, PenstockError } from "./errors.js";
import { type Attempt, LeaseLost, Leases, type LeaseOptions } from "./leases.js";
import { type Closed, Failed, type Outcome, type Score, asFailed, asOutcome } from "./outcome.js";
import { sleep } from "./calls.js";

/** What an attempt is run with: it returns the reward. One that throws fails its attempt only. */
export type Agent = (attempt: Attempt) => Promise<Score> | Score;

/** How a worker works. */
export interface WorkerOptions extends Omit<LeaseOptions, "wholeGroups" | "resumeAborted"> {
  /** Return after so many; unset goes on until stopped. */
  attempts?: number;
  /** Bound on one attempt; after it the attempt fails with ATTEMPT_TIMEOUT. */
  attemptMs?: number;
  /** Stops the worker: attempts in flight are finished or given back. */
  signal?: AbortSignal;
  /** How long attempts in flight may go on after that. */
  drainMs?: number;
  /** Told of each attempt that has ended. */
  onAttempt?: (attempt: Attempt, outcome: Outcome | Failed | undefined) => void;
}

/** What a worker did. */
export interface Statistics {
  /** Attempts that ended with a reward. */
  rewarded: number;
  /** Attempts that ended with a failure. */
  failed: number;
  /** Attempts whose lease or server was lost. */
  lost: number;
}

/** What the give-back of unfinished attempts may take when the worker stops. */
const GIVE_BACK_MS = 5_000;

/** Leases attempts and runs `agent` on each. Throws PenstockError where the server refuses to lease. */
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

/** One attempt, from its lease to its outcome. */
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

  /** Runs the agent; undefined where its lease is lost. */
  private async judge(agent: Agent): Promise<Outcome | Failed | undefined> {
    const { trajectory, signal } = this.attempt;
    const { attemptMs } = this.options;
    const late = new Failed("ATTEMPT_TIMEOUT", `not done within ${attemptMs} ms`);
    const timer = attemptMs && setTimeout(() => this.leases.cancel(trajectory.trajectoryId, late), attemptMs);
    try {
      // An agent that waits for something of its own may not hear the signal.
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

  /** Sends an outcome; undefined where it cannot be sent: the attempt is lost. */
  private async close(outcome: Outcome | Failed, ownSent = false): Promise<Closed | undefined> {
    const { trajectory } = this.attempt;
    const own = trajectory.outcome;
    try {
      // Closed by the agent itself: asked again, the server says again what came of it.
      return await trajectory.close(trajectory.closed && own ? own : outcome);
    } catch (error) {
      const known = error instanceof PenstockError || error instanceof TypeError || error instanceof RangeError;
      if (!known) throw error;
      // Not where the server was full all the while: the outcome is as good as it was.
      const tooLarge = error instanceof Overloaded && error.retryAfterMs === undefined;
      const refused = !(error instanceof PenstockError) || error instanceof InvalidRequest || tooLarge;
      // The outcome itself may be what cannot be sent.
      if (refused && !(outcome instanceof Failed)) return this.close(asFailed(error), ownSent);
      const differs = error instanceof PenstockError && error.reason === "OUTCOME_DIFFERS";
      // By the agent itself, which did not hear the answer.
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
  // Where nobody waits for it any more.
  waiting.catch(() => undefined);
  return waiting;
}

/** Whether all of them have ended within a time. */
async function within(ms: number, running: Map<string, Promise<void>>): Promise<boolean> {
  const timer = new AbortController();
  const all = Promise.all(running.values()).then(() => true);
  const late = sleep(ms, timer.signal).then(() => false, () => false);
  const done = await Promise.race([all, late]);
  timer.abort();
  return done;
}
