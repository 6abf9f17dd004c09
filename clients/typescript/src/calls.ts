/**
 * The calls of `penstock.v1` as one client makes them: deadlines, retries, and who waits for what.
 *
 * - UNAVAILABLE of an idempotent unary call: gRPC itself, by the service config; a few seconds long. Where
 *   the call is `patient`, here beyond that, until the server is back or `reconnectMs` are over.
 * - RESOURCE_EXHAUSTED with RetryInfo: here, after the delay the server names, within a bound.
 * - A lost stream: its owner (`turnStream`, `leases`), which alone knows where it stood.
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

/** How long a client waits, and for what. */
export interface Patience {
  /** Deadline of a unary call. */
  callMs: number;
  /** How long a lost server is waited for before the turn or the close that needs it fails. */
  reconnectMs: number;
  /** How long a server that is full, and says when to come back, is asked again. */
  overloadMs: number;
}

export const PATIENCE: Patience = { callMs: 30_000, reconnectMs: 60_000, overloadMs: 120_000 };

/** What begins a turn, or goes on with one. */
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
  /** Whether a lost server is waited for, within the bound. */
  patient?: boolean;
  /** Whether it is waited for as long as it takes. */
  endless?: boolean;
  signal?: AbortSignal;
}

/** Growing, jittered waits, within a bound that starts with the first of them. */
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

  /** There was progress: begin anew. */
  reset(): void {
    this.delayMs = this.firstMs;
    this.giveUpAt = undefined;
  }

  /** Waits once; false, at once, where the bound would be passed. Throws the reason of `signal`. */
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

/** Waits. Throws the reason of `signal` where that is aborted first. */
export async function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  try {
    await delay(ms, undefined, { signal });
  } catch {
    throw signal?.reason;
  }
}

/** Waits as a full server asked; false where it did not ask, or where patience has run out. */
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
    // Now, so that whoever sets it up hears of it, and not an agent in its first turn.
    this.tokens.metadata();
  }

  /** Closes the connection; calls in flight are cancelled. */
  close(): void {
    this.client.close();
  }

  getServerInfo(waiting: Waiting = {}): Promise<GetServerInfoResponse> {
    return this.unary(Rollout.getServerInfo, { withTensors: false }, waiting);
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

  /** Opens a lease stream; leaving the loop gives it up. Throws PenstockError. */
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
        // It answers: what is waited for from here on is another loss.
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
    // The one that is thrown comes out of the loop; another, of a call that is cancelled, has no reader.
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

/** Whether an error leaves open what became of the call. */
export function isUnreachable(error: unknown): error is PenstockError {
  return (
    error instanceof PenstockError &&
    [status.UNAVAILABLE, status.CANCELLED, status.UNKNOWN, status.RESOURCE_EXHAUSTED, status.DEADLINE_EXCEEDED].includes(
      error.code,
    )
  );
}
