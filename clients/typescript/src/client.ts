/** `connect`: the client of one rollout server. */

import { randomUUID } from "node:crypto";
import { Calls, PATIENCE, type Patience } from "./calls.js";
import type { Security } from "./channel.js";
import { AbortRequest, type GetServerInfoResponse } from "./gen/penstock/v1/rollout_service.js";
import { SubmitTasksRequest, type SubmitTasksResponse } from "./gen/penstock/v1/task_service.js";
import { type LeaseOptions, Leases } from "./leases.js";
import { type Task, writeTask } from "./prompt.js";
import { Trajectory, type TrajectoryOptions } from "./trajectory.js";
import { type TrajectoryRecord, readTrajectory } from "./turns.js";
import { type Agent, type Statistics, type WorkerOptions, work } from "./worker.js";

/** A client's credentials, and how long it waits. */
export interface ConnectOptions extends Security {
  patience?: Partial<Patience>;
}

/** Turns to abort: of these trajectories, of these groups, or all. */
export type AbortSelector = { trajectoryIds: string[] } | { groupIds: string[] } | { all: true };

/** A client of the server at `address` ("host:port"). It sends nothing before the first call. Throws
 * CredentialsUnusable. */
export function connect(address: string, options: ConnectOptions = {}): Client {
  return new Client(address, options);
}

/** An agent's calls to one server. */
export class Client {
  private readonly calls: Calls;

  constructor(
    readonly address: string,
    { patience, ...security }: ConnectOptions = {},
  ) {
    this.calls = new Calls(address, { ...PATIENCE, ...patience }, security);
  }

  /** Closes the connection; calls in progress are cancelled. */
  close(): void {
    this.calls.close();
  }

  /** Leases attempts and runs `agent` on each, `concurrency` at a time. The agent returns the reward. An error fails
   * its attempt, which the server then repeats. Returns after `attempts`, or when stopped. */
  worker(options: WorkerOptions, agent: Agent): Promise<Statistics> {
    return work(this.calls, options, agent);
  }

  /** Attempts as they are leased; the caller closes them. */
  leaseTasks(options: LeaseOptions = {}): Leases {
    return new Leases(this.calls, options);
  }

  /** A trajectory without a lease; its first turn opens it. Without a group it is never delivered. */
  trajectory(trajectoryId: string = randomUUID(), options: TrajectoryOptions = {}): Trajectory {
    return new Trajectory(this.calls, trajectoryId, options);
  }

  /** Adds tasks; a known id changes nothing. If the queue is full, waits within a bound. */
  submitTasks(tasks: (Partial<Task> & { taskId: string })[]): Promise<SubmitTasksResponse> {
    return this.calls.submitTasks(SubmitTasksRequest.fromPartial({ tasks: tasks.map(writeTask) }));
  }

  /** Returns model, versions, limits and load. */
  serverInfo(): Promise<GetServerInfoResponse> {
    return this.calls.getServerInfo();
  }

  /** Returns a trajectory as the server holds it, open or closed. Throws NotFound. */
  async getTrajectory(trajectoryId: string): Promise<TrajectoryRecord> {
    const held = await this.calls.getTrajectory(trajectoryId);
    return readTrajectory(held.trajectory!, held.open);
  }

  /** Stops turns in flight. Returns, once the engine has stopped them, the number of tokens kept of each. */
  async abort(selector: AbortSelector, reason = ""): Promise<Map<string, number>> {
    const chosen =
      "trajectoryIds" in selector
        ? ({ $case: "trajectories", value: selector } as const)
        : "groupIds" in selector
          ? ({ $case: "groups", value: selector } as const)
          : ({ $case: "all", value: {} } as const);
    const { abortedTurns } = await this.calls.abort(AbortRequest.fromPartial({ selector: chosen, reason }));
    return new Map(abortedTurns.map((turn) => [turn.trajectoryId, turn.policyTokenCount]));
  }
}
