/**
 * Leases: attempts handed to this agent, kept while it works on them.
 *
 * - The receiver consumes lease streams, one after another; waits for the server and for room.
 * - The renewer renews what is held, all in one call, every third of a lease and every 3 s at the latest: a
 *   server takes the leases of a lost stream back after a grace of some ten seconds.
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
  /** To be opened by its first turn and closed by `complete` or `fail`; a worker closes it itself. */
  trajectory: Trajectory;
  groupId: string;
  /** Position in the group, from zero. */
  sampleIndex: number;
  /** Attempts made before this one. */
  retryCount: number;
  /** Aborted when its lease is lost, or its time is over: work that goes on is for nobody. */
  signal: AbortSignal;
}

/** What to lease. */
export interface LeaseOptions {
  /** Attempts held at a time. */
  concurrency?: number;
  /** Names this process, for metrics and traces. */
  agentId?: string;
  /** Only tasks of this purpose; unset takes any. */
  purpose?: Purpose;
  /** Lease every attempt of a group here; a group larger than `concurrency` then never comes. */
  wholeGroups?: boolean;
  /** Whether a turn that a weight update ended goes on by itself. */
  resumeAborted?: boolean;
  /** Told when the server cannot be reached or does not lease now; it is asked again until it does. */
  onServerLost?: (error: PenstockError) => void;
  /** Told when it leases again. */
  onServerBack?: () => void;
}

interface Held {
  trajectory: Trajectory;
  controller: AbortController;
}

/** Attempts as they are leased: `for await (const attempt of client.leaseTasks({ concurrency: 8 }))`. The
 * server leases another when one is closed. Leaving the loop gives back what is held. */
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

  /** Stops renewing an attempt: it goes to another agent when its lease has run out. */
  release(trajectoryId: string): void {
    this.held.delete(trajectoryId);
  }

  /** Ends what an attempt waits for, and leaves its lease: it can still be closed. */
  cancel(trajectoryId: string, reason: Error): void {
    this.held.get(trajectoryId)?.controller.abort(reason);
  }

  /** Takes no more attempts; iteration ends; those taken are renewed until `close`. */
  stopLeasing(): void {
    this.receiving.abort();
    for (const { trajectory } of this.ready) this.release(trajectory.trajectoryId);
    this.ready = [];
    this.ended ??= {};
    this.tell();
  }

  /** Gives the stream up; what is still held goes back when its lease has run out. */
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
    const leaseMs = lease.lease ? Number(lease.lease.seconds) * 1000 + lease.lease.nanos / 1e6 : 0;
    if (leaseMs > 0 && leaseMs / 3 < this.renewMs) {
      this.renewMs = leaseMs / 3;
      this.sooner.abort();
    }
    this.held.set(trajectoryId, { trajectory, controller });
    this.ready.push({ task, trajectory, groupId, sampleIndex, retryCount, signal });
    this.tell();
    // Bounded: after a loss the new stream leases while attempts of the old are still held.
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

  /** Renews everything in one call, and lets go of what is lost. */
  private async renew(): Promise<void> {
    if (this.held.size === 0) return;
    let response;
    try {
      response = await this.calls.renewLease([...this.held.keys()], { signal: this.renewing.signal });
    } catch (error) {
      // The receiver notices a lost server by its stream, and renews when it is back.
      if (isUnreachable(error)) return;
      throw error;
    }
    for (const id of response.expiredTrajectoryIds) {
      const found = this.held.get(id);
      // One that is being closed has no lease any more, because its close was accepted.
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

/** What the signal of an attempt ends with whose lease ran out: its work belongs to another agent. */
export class LeaseLost extends Error {
  override name = "LeaseLost";

  constructor(readonly trajectoryId: string) {
    super(`the lease of ${trajectoryId} ran out`);
  }
}
