/** Errors of calls: one root class, and one subclass for each way to react. */

import { Metadata, type ServiceError, status } from "@grpc/grpc-js";
import { ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details.js";
import { Status } from "./gen/google/rpc/status.js";

/** Details of a failed call. */
export interface Refusal {
  /** Status of the call. */
  code: status;
  /** Machine-readable, from the table in proto/README.md; empty if the server gave no reason. */
  reason: string;
  /** Values that the message refers to, from `google.rpc.ErrorInfo`. */
  metadata: Record<string, string>;
  /** When the server suggests to retry; zero if a retry is likely to help but the server names no time. */
  retryAfterMs?: number;
}

/** A failed call; the root of all errors about the server that this package throws. */
export class PenstockError extends Error implements Refusal {
  readonly code: status;
  readonly reason: string;
  readonly metadata: Record<string, string>;
  readonly retryAfterMs?: number;

  constructor(message: string, refusal: Partial<Refusal> = {}, options?: ErrorOptions) {
    super(refusal.reason ? `${refusal.reason}: ${message}` : message, options);
    this.name = new.target.name;
    this.code = refusal.code ?? status.UNKNOWN;
    this.reason = refusal.reason ?? "";
    this.metadata = refusal.metadata ?? {};
    if (refusal.retryAfterMs !== undefined) this.retryAfterMs = refusal.retryAfterMs;
  }
}

/** The server cannot be reached, was lost, or does not serve now (UNAVAILABLE). */
export class ServerUnavailable extends PenstockError {}

/** The request itself is invalid; a retry does not help (INVALID_ARGUMENT). */
export class InvalidRequest extends PenstockError {}

/** The trajectory or task is unknown to the server (NOT_FOUND). */
export class NotFound extends PenstockError {}

/** The state of the trajectory, the lease or the weights forbids the call (FAILED_PRECONDITION, ALREADY_EXISTS,
 * ABORTED). */
export class NotAllowedNow extends PenstockError {}

/** A limit of the server is reached, and waiting did not help (RESOURCE_EXHAUSTED). */
export class Overloaded extends PenstockError {}

/** A deadline ran out (DEADLINE_EXCEEDED). */
export class DeadlineExceeded extends PenstockError {}

/** The caller is unknown or not allowed to do this (UNAUTHENTICATED, PERMISSION_DENIED). */
export class AccessDenied extends PenstockError {}

const LEAVES: Partial<Record<status, typeof PenstockError>> = {
  [status.UNAVAILABLE]: ServerUnavailable,
  // Always from the server: a call that is cancelled here ends with the reason of its signal.
  [status.CANCELLED]: ServerUnavailable,
  // No server sends these two. gRPC uses them if a connection breaks in a way that has no code.
  [status.UNKNOWN]: ServerUnavailable,
  [status.INVALID_ARGUMENT]: InvalidRequest,
  [status.OUT_OF_RANGE]: InvalidRequest,
  [status.NOT_FOUND]: NotFound,
  [status.FAILED_PRECONDITION]: NotAllowedNow,
  [status.ALREADY_EXISTS]: NotAllowedNow,
  [status.ABORTED]: NotAllowedNow,
  [status.RESOURCE_EXHAUSTED]: Overloaded,
  [status.DEADLINE_EXCEEDED]: DeadlineExceeded,
  [status.UNAUTHENTICATED]: AccessDenied,
  [status.PERMISSION_DENIED]: AccessDenied,
};

/** How gRPC implementations report a message or metadata that is too large. */
const TOO_LARGE = /larger than|metadata size exceeds/;

/** The subclass for an error raised by gRPC, including its details. */
export function fromService(error: ServiceError): PenstockError {
  const refusal: Refusal = { code: error.code, reason: "", metadata: {} };
  for (const value of (error.metadata ?? new Metadata()).get("grpc-status-details-bin")) {
    if (typeof value === "string") continue;
    for (const detail of Status.decode(value).details) {
      if (detail.typeUrl.endsWith("/google.rpc.ErrorInfo")) {
        const info = ErrorInfo.decode(detail.value);
        refusal.reason = info.reason;
        refusal.metadata = { ...info.metadata };
      } else if (detail.typeUrl.endsWith("/google.rpc.RetryInfo")) {
        const delay = RetryInfo.decode(detail.value).retryDelay;
        if (delay) refusal.retryAfterMs = Number(delay.seconds) * 1000 + delay.nanos / 1e6;
      }
    }
  }
  // gRPC's own limits have no reason; a message that is too large stays too large.
  const bare = error.code === status.RESOURCE_EXHAUSTED && !refusal.reason && refusal.retryAfterMs === undefined;
  if (bare && !TOO_LARGE.test(error.details)) refusal.retryAfterMs = 0;
  const leaf = LEAVES[error.code] ?? PenstockError;
  return new leaf(error.details || status[error.code], refusal, { cause: error });
}

/** Whether a thrown value is an error of a gRPC call. */
export function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && "details" in error && "metadata" in error;
}
