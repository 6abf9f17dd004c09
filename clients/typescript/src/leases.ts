/**
 * Leases: the attempts that this agent holds while it works on them.
 *
 * - The receiver reads lease streams, one after another, and waits for the server and for room.
 * - The renewer renews all held leases in one call, every third of a lease and at least every 3 s. A server takes
 *   back the leases of a lost stream after a grace period of about ten seconds.
 */

import { Backoff, type Calls, isUnreachable, sleep } from "./calls.js";
import { Overloaded, PenstockError, ServerUnavailable } from "./errors.js";
import { LeaseTasksRequest, type LeaseTasksResponse } from "./gen/penstock/v1/task_service.js";
import { type Purpose, type Task, readTask, writePurpose } from "./prompt.js";
import { Trajectory } from "./trajectory.js";

const LONGEST_RENEWAL_MS = 3_000;

/** One attempt at a task. */
export interface Attempt {
  task: Task;
  /** Its first turn opens it, and `complete` or `fail` closes it; a worker closes it itself. */
  trajectory: Trajectory;
  groupId: string;
  /** Position in the group, from zero. */
  sampleIndex: number;
  /** Earlier attempts at this place in the group. */
  retryCount: number;
  /** When it has to be closed, in Unix milliseconds. The server takes it back after that. */
  endsAt: number;
  /** Aborted when its lease is lost, or its time is over; further work on it is wasted. */
  signal: AbortSignal;
}

/** Which attempts to lease. */
export interface LeaseOptions {
  /** Attempts held at a time. */
  concurrency?: number;
  /** Names this process, for metrics and traces. */
  agentId?: string;
  /** Only tasks of this purpose; unset takes any. */
  purpose?: Purpose;
  /** Lease all attempts of a group here. A group larger than `concurrency` is then never leased. */
  wholeGroups?: boolean;
  /** Whether a turn that a weight update aborted resumes automatically. */
  resumeAborted?: boolean;
  /** Called when the server cannot be reached or does not lease now; the client keeps retrying. */
  onServerLost?: (error: PenstockError) => void;
  /** Called when the server leases again. */
  onServerBack?: () => void;
}

interface Held {
  trajectory: Trajectory;
  controller: AbortController;
}

/** Attempts as they are leased: `for await (const attempt of client.leaseTasks({ concurrency: 8 }))`. The server
 * leases another when one is closed. Leaving the loop gives back those still held. */
export class Leases implements AsyncIterableIterator<Attempt> {
  private readonly request: LeaseTasksRequest;
  private readonly concurrency: number;
  private readonly held = new Map<string, Held>();
  private ready: Attempt[] = [];
  private readonly receiving = new AbortController();
  private readonly renewing = new AbortController();
  private renewMs = LONGEST_RENEWAL_MS;
  private sooner = new AbortController();
  private lost = false;
  private ended: { error?: unknown } | undefined;
  private started = false;
  private wake: (() => void)[] = [];

  constructor(
    private readonly calls: Calls,
    private readonly options: LeaseOptions,
  ) {
    const { concurrency = 1, agentId = `node-${process.pid}`, purpose, wholeGroups = false } = options;
    if (!Number.isInteger(concurrency) || concurrency < 1) {
      throw new RangeError(`concurrency must be at least 1, got ${concurrency}`);
    }
    this.concurrency = concurrency;
    this.request = { agentId, concurrency, purpose: writePurpose(purpose), wholeGroups };
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<Attempt, undefined>> {
    this.start();
    while (this.ready.length === 0 && !this.ended) await this.news();
    const attempt = this.ready.shift();
    this.tell();
    if (attempt) return { done: false, value: attempt };
    if (this.ended?.error !== undefined) throw this.ended.error;
    return { done: true, value: undefined };
  }

  async return(): Promise<IteratorResult<Attempt, undefined>> {
    this.close();
    return { done: true, value: undefined };
  }

  /** Stops renewing an attempt; when its lease runs out, another agent gets it. */
  release(trajectoryId: string): void {
    this.held.delete(trajectoryId);
  }

  /** Ends the attempt's waits, but keeps its lease: it can still be closed. */
  cancel(trajectoryId: string, reason: Error): void {
    this.held.get(trajectoryId)?.controller.abort(reason);
  }

  /** Takes no more attempts, and iteration ends; those already leased are renewed until `close`. */
  stopLeasing(): void {
    this.receiving.abort();
    for (const { trajectory } of this.ready) this.release(trajectory.trajectoryId);
    this.ready = [];
    this.ended ??= {};
    this.tell();
  }

  /** Closes the stream; attempts still held go back when their leases run out. */
  close(): void {
    this.stopLeasing();
    this.renewing.abort();
    this.held.clear();
  }

  private start(): void {
    if (this.started) return;
    this.started = true;
    for (const [work, signal] of [
      [this.receive(), this.receiving.signal],
      [this.renewHeld(), this.renewing.signal],
    ] as const) {
      work.catch((error: unknown) => {
        if (signal.aborted) return;
        this.ended = { error };
        this.tell();
      });
    }
  }

  private async receive(): Promise<void> {
    const { signal } = this.receiving;
    const backoff = new Backoff(Infinity);
    for (;;) {
      try {
        await this.calls.getServerInfo({ endless: true, signal });
        if (this.lost) await this.renew();
        for await (const lease of this.calls.leaseTasks(this.request, signal)) {
          backoff.reset();
          this.sayBack();
          await this.offer(lease);
        }
        this.sayLost(new ServerUnavailable("the server ended the lease stream"));
      } catch (error) {
        if (!(error instanceof ServerUnavailable || error instanceof Overloaded)) throw error;
        this.sayLost(error);
      }
      await backoff.wait(0, signal);
    }
  }

  private async offer(lease: LeaseTasksResponse): Promise<void> {
    const { trajectoryId, groupId, sampleIndex, retryCount } = lease;
    const task = readTask(lease.task!);
    const controller = new AbortController();
    const { signal } = controller;
    const { resumeAborted = false } = this.options;
    const options = { groupId, sampleIndex, groupSize: task.groupSize, resumeAborted, signal };
    const trajectory = new Trajectory(this.calls, trajectoryId, options, task, (id) => this.release(id));
    const leaseMs = milliseconds(lease.lease);
    // A server from before this field names no limit.
    const endsAt = Date.now() + (milliseconds(lease.timeLimit) || Infinity);
    if (leaseMs > 0 && leaseMs / 3 < this.renewMs) {
      this.renewMs = leaseMs / 3;
      this.sooner.abort();
    }
    this.held.set(trajectoryId, { trajectory, controller });
    this.ready.push({ task, trajectory, groupId, sampleIndex, retryCount, endsAt, signal });
    this.tell();
    // Bounded: after a loss, the new stream leases attempts while old ones are still held.
    while (this.ready.length > this.concurrency && !this.ended) await this.news();
  }

  private async renewHeld(): Promise<void> {
    const { signal } = this.renewing;
    for (;;) {
      this.sooner = new AbortController();
      try {
        await sleep(this.renewMs, AbortSignal.any([signal, this.sooner.signal]));
      } catch {
        signal.throwIfAborted();
        continue;
      }
      await this.renew();
    }
  }

  /** Renews all leases in one call, and drops those that are lost. */
  private async renew(): Promise<void> {
    if (this.held.size === 0) return;
    let response;
    try {
      response = await this.calls.renewLease([...this.held.keys()], { signal: this.renewing.signal });
    } catch (error) {
      // The receiver notices a lost server by its stream, and renews when the server is back.
      if (isUnreachable(error)) return;
      throw error;
    }
    for (const id of response.expiredTrajectoryIds) {
      const found = this.held.get(id);
      // An attempt that is being closed has no lease any more, because its close was accepted.
      if (!found || found.trajectory.outcome !== undefined) continue;
      this.release(id);
      this.ready = this.ready.filter(({ trajectory }) => trajectory.trajectoryId !== id);
      found.controller.abort(new LeaseLost(id));
    }
    this.tell();
  }

  private sayLost(error: PenstockError): void {
    if (!this.lost) this.options.onServerLost?.(error);
    this.lost = true;
  }

  private sayBack(): void {
    if (this.lost) this.options.onServerBack?.();
    this.lost = false;
  }

  private news(): Promise<void> {
    return new Promise((resolve) => this.wake.push(resolve));
  }

  private tell(): void {
    for (const resolve of this.wake.splice(0)) resolve();
  }
}

/** The reason of an attempt's signal if its lease ran out: another agent has the attempt now. */
export class LeaseLost extends Error {
  override name = "LeaseLost";

  constructor(readonly trajectoryId: string) {
    super(`the lease of ${trajectoryId} ran out`);
  }
}

function milliseconds(duration?: { seconds: bigint; nanos: number }): number {
  return duration ? Number(duration.seconds) * 1000 + duration.nanos / 1e6 : 0;
}
