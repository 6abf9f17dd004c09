/**
 * Makes the calls of `penstock.v1` for one client, with deadlines and retries. What is retried, and where:
 *
 * - UNAVAILABLE of an idempotent unary call: gRPC itself retries for a few seconds, by the service config. After
 *   that, a `patient` call is retried here until the server is back or `reconnectMs` are over.
 * - RESOURCE_EXHAUSTED with RetryInfo: retried here after the server's delay, within a bound.
 * - A lost stream: its owner (`turnStream`, `leases`) opens it again, because only the owner knows its position.
 */

import { setTimeout as delay } from "node:timers/promises";
import { Client, type ServiceError, status } from "@grpc/grpc-js";
import { type Security, TokenSource, channelCredentials, channelOptions } from "./channel.js";
import { Overloaded, PenstockError, ServerUnavailable, fromService, isServiceError } from "./errors.js";
import {
  type AbortRequest,
  type AbortResponse,
  type ContinueRequest,
  type ContinueResponse,
  type GenerateRequest,
  type GenerateResponse,
  type GetServerInfoResponse,
  type GetTrajectoryResponse,
  RolloutServiceService as Rollout,
} from "./gen/penstock/v1/rollout_service.js";
import {
  type CompleteTrajectoryRequest,
  type CompleteTrajectoryResponse,
  type LeaseTasksRequest,
  type LeaseTasksResponse,
  type RenewLeaseResponse,
  type SubmitTasksRequest,
  type SubmitTasksResponse,
  TaskServiceService as Tasks,
} from "./gen/penstock/v1/task_service.js";

/** How long a client waits in different situations. */
export interface Patience {
  /** Deadline of a unary call. */
  callMs: number;
  /** How long to wait for a lost server before the turn or the close that needs it fails. */
  reconnectMs: number;
  /** How long to retry at a full server that says when to come back. */
  overloadMs: number;
}

export const PATIENCE: Patience = { callMs: 30_000, reconnectMs: 60_000, overloadMs: 120_000 };

/** A request that starts or continues a turn. */
export type TurnRequest =
  | { $case: "generate"; value: GenerateRequest }
  | { $case: "continue"; value: ContinueRequest };
export type TurnEvent = GenerateResponse | ContinueResponse;

interface Method<Q, R> {
  path: string;
  requestSerialize: (request: Q) => Buffer;
  responseDeserialize: (bytes: Buffer) => R;
}

interface Waiting {
  /** Whether the call waits for a lost server, within the bound. */
  patient?: boolean;
  /** Whether it waits without a limit. */
  endless?: boolean;
  signal?: AbortSignal;
}

/** Growing, jittered waits, within a bound that starts with the first wait. */
export class Backoff {
  private delayMs: number;
  private giveUpAt: number | undefined;

  constructor(
    private readonly limitMs: number,
    private readonly firstMs = 100,
    private readonly longestMs = 5_000,
  ) {
    this.delayMs = firstMs;
  }

  /** Starts over after progress. */
  reset(): void {
    this.delayMs = this.firstMs;
    this.giveUpAt = undefined;
  }

  /** Waits once; returns false immediately if the wait would exceed the bound. Throws the reason of `signal`. */
  async wait(atLeastMs = 0, signal?: AbortSignal): Promise<boolean> {
    const now = performance.now();
    this.giveUpAt ??= now + this.limitMs;
    const waitMs = Math.max(atLeastMs, this.delayMs * (0.5 + Math.random() / 2));
    if (now + waitMs > this.giveUpAt) return false;
    this.delayMs = Math.min(this.delayMs * 2, this.longestMs);
    await sleep(waitMs, signal);
    return true;
  }
}

/** Waits. Throws the reason of `signal` if that is aborted first. */
export async function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  try {
    await delay(ms, undefined, { signal });
  } catch {
    throw signal?.reason;
  }
}

/** Waits as long as a full server asked; returns false if it did not ask, or if patience has run out. */
export async function outlasts(overload: Backoff, error: unknown, signal?: AbortSignal): Promise<boolean> {
  if (!(error instanceof Overloaded) || error.retryAfterMs === undefined) return false;
  return overload.wait(error.retryAfterMs, signal);
}

/** One channel to one server; nothing is sent before the first call. */
export class Calls {
  private readonly client: Client;
  private readonly tokens: TokenSource;

  constructor(
    readonly address: string,
    readonly patience: Patience,
    security: Security,
  ) {
    this.tokens = new TokenSource(security);
    this.client = new Client(address, channelCredentials(address, security), channelOptions(security));
    // Read the files now, so that an error appears at set-up, not in an agent's first turn.
    this.tokens.metadata();
  }

  /** Closes the connection; calls in progress are cancelled. */
  close(): void {
    this.client.close();
  }

  getServerInfo(waiting: Waiting = {}): Promise<GetServerInfoResponse> {
    return this.unary(Rollout.getServerInfo, { withTensors: false, withProgress: false }, waiting);
  }

  getTrajectory(trajectoryId: string, waiting: Waiting = {}): Promise<GetTrajectoryResponse> {
    return this.unary(Rollout.getTrajectory, { trajectoryId }, waiting);
  }

  abort(request: AbortRequest, waiting: Waiting = {}): Promise<AbortResponse> {
    return this.unary(Rollout.abort, request, waiting);
  }

  submitTasks(request: SubmitTasksRequest, waiting: Waiting = {}): Promise<SubmitTasksResponse> {
    return this.unary(Tasks.submitTasks, request, waiting);
  }

  renewLease(trajectoryIds: string[], waiting: Waiting = {}): Promise<RenewLeaseResponse> {
    return this.unary(Tasks.renewLease, { trajectoryIds }, waiting);
  }

  completeTrajectory(
    request: CompleteTrajectoryRequest,
    waiting: Waiting = {},
  ): Promise<CompleteTrajectoryResponse> {
    return this.unary(Tasks.completeTrajectory, request, { ...waiting, patient: true });
  }

  /** Opens a turn's stream; leaving the loop cancels the call. Throws PenstockError. */
  turnEvents(request: TurnRequest, signal?: AbortSignal): AsyncGenerator<TurnEvent, void> {
    return request.$case === "generate"
      ? this.stream(Rollout.generate, request.value, signal)
      : this.stream(Rollout.continue, request.value, signal);
  }

  /** Opens a lease stream; leaving the loop ends it. Throws PenstockError. */
  leaseTasks(request: LeaseTasksRequest, signal?: AbortSignal): AsyncGenerator<LeaseTasksResponse, void> {
    return this.stream(Tasks.leaseTasks, request, signal);
  }

  private async unary<Q, R>(method: Method<Q, R>, request: Q, waiting: Waiting): Promise<R> {
    const { patient = false, endless = false, signal } = waiting;
    const { callMs, reconnectMs, overloadMs } = this.patience;
    const lost = new Backoff(reconnectMs);
    const overload = new Backoff(overloadMs);
    let giveUpAt = performance.now() + reconnectMs;
    for (;;) {
      const timeoutMs = patient ? Math.max(0, giveUpAt - performance.now()) : callMs;
      try {
        return await this.once(method, request, endless ? Infinity : timeoutMs, patient || endless, signal);
      } catch (error) {
        signal?.throwIfAborted();
        if (!isServiceError(error)) throw error;
        if (patient && error.code === status.DEADLINE_EXCEEDED) {
          throw new ServerUnavailable(
            `no answer from ${this.address} for ${reconnectMs / 1000} s`,
            { code: status.UNAVAILABLE },
            { cause: error },
          );
        }
        const failed = fromService(error);
        if (patient && failed instanceof ServerUnavailable && (await lost.wait(0, signal))) continue;
        if (!(await outlasts(overload, failed, signal))) throw failed;
        // The server answered; a later loss gets a fresh wait.
        giveUpAt = performance.now() + reconnectMs;
        lost.reset();
      }
    }
  }

  private once<Q, R>(
    method: Method<Q, R>,
    request: Q,
    timeoutMs: number,
    waitForReady: boolean,
    signal?: AbortSignal,
  ): Promise<R> {
    signal?.throwIfAborted();
    const metadata = this.tokens.metadata();
    metadata.setOptions({ waitForReady });
    return new Promise<R>((resolve, reject) => {
      const stop = () => call.cancel();
      const done = (error: ServiceError | null, response?: R) => {
        signal?.removeEventListener("abort", stop);
        if (error) reject(error);
        else resolve(response as R);
      };
      const options = timeoutMs === Infinity ? {} : { deadline: Date.now() + timeoutMs };
      const { path, requestSerialize, responseDeserialize } = method;
      const call = this.client.makeUnaryRequest(
        path, requestSerialize, responseDeserialize, request, metadata, options, done,
      );
      signal?.addEventListener("abort", stop, { once: true });
    });
  }

  private async *stream<Q, R>(method: Method<Q, R>, request: Q, signal?: AbortSignal): AsyncGenerator<R, void> {
    signal?.throwIfAborted();
    const { path, requestSerialize, responseDeserialize } = method;
    const call = this.client.makeServerStreamRequest(
      path, requestSerialize, responseDeserialize, request, this.tokens.metadata(), {},
    );
    // The loop throws the error; without this handler, a cancelled call would report an unhandled one.
    call.on("error", () => undefined);
    const stop = () => call.cancel();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      for await (const message of call) yield message as R;
    } catch (error) {
      signal?.throwIfAborted();
      throw isServiceError(error) ? fromService(error) : error;
    } finally {
      signal?.removeEventListener("abort", stop);
      call.cancel();
    }
    signal?.throwIfAborted();
  }
}

/** Whether an error leaves it unknown if the call took effect. */
export function isUnreachable(error: unknown): error is PenstockError {
  return (
    error instanceof PenstockError &&
    [status.UNAVAILABLE, status.CANCELLED, status.UNKNOWN, status.RESOURCE_EXHAUSTED, status.DEADLINE_EXCEEDED].includes(
      error.code,
    )
  );
}
