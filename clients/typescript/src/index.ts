/**
 * The client of `penstock.v1`: sample from a policy, lease tasks, score attempts.
 *
 *     const penstock = connect("127.0.0.1:50051");
 *     await penstock.worker({ concurrency: 8 }, async ({ task, trajectory }) => {
 *       const turn = await trajectory.turn();
 *       return Number(turn.text.includes(task.metadata.answer));
 *     });
 */

export type { Patience } from "./calls.js";
export { CredentialsUnusable, type Security, type Tls } from "./channel.js";
export { type AbortSelector, Client, type ConnectOptions, connect } from "./client.js";
export {
  AccessDenied,
  DeadlineExceeded,
  InvalidRequest,
  NotAllowedNow,
  NotFound,
  Overloaded,
  PenstockError,
  type Refusal,
  ServerUnavailable,
} from "./errors.js";
export { type Attempt, LeaseLost, type LeaseOptions, Leases } from "./leases.js";
export { type Closed, Failed, type Outcome, type Score } from "./outcome.js";
export type { Message, Observation, Purpose, Sampling, Task, Tool, ToolCall } from "./prompt.js";
export {
  type StreamingOptions,
  Trajectory,
  type TrajectoryOptions,
  type TurnOptions,
} from "./trajectory.js";
export { type FinishReason, type Segment, type TrajectoryRecord, type Turn, tokensOf } from "./turns.js";
export type { Agent, Statistics, WorkerOptions } from "./worker.js";
