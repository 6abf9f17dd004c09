/** A trajectory: turns with text, messages or tokens; abort, resume, outcome. */

import type { Calls, TurnRequest } from "./calls.js";
import { NotAllowedNow, NotFound } from "./errors.js";
import { ContinueRequest, GenerateRequest, StreamOptions } from "./gen/penstock/v1/rollout_service.js";
import type { CompleteTrajectoryRequest } from "./gen/penstock/v1/task_service.js";
import { type Closed, type Failed as Failure, Failed, type Outcome, writeOutcome } from "./outcome.js";
import { type Observation, type Sampling, type Task, type Tool, writePrompt, writeSampling } from "./prompt.js";
import { abortTurn, turnStream } from "./turnStream.js";
import { type Segment, type TrajectoryRecord, type Turn, TurnProgress, countOf, readTrajectory } from "./turns.js";

/** Aborts of a trajectory's turns after which its close is refused: another caller keeps taking turns. */
const CLOSING_ABORTS = 8;

/** How to take a turn. Sampling options apply to this turn and all later ones. */
export interface TurnOptions extends Sampling {
  /** Tools that the policy may call; only on the first turn. */
  tools?: Tool[];
  /** Lets the server continue the turn when the connection is lost. */
  detach?: boolean;
  /** Ends the wait and interrupts the turn, which can be resumed: `AbortSignal.timeout(5000)`. */
  signal?: AbortSignal;
}

/** How to stream a turn. */
export interface StreamingOptions extends TurnOptions {
  /** Yield only whole segments, one per weight version, when the turn ends. */
  finalOnly?: boolean;
  /** Maximum time that tokens wait on the server. */
  flushMs?: number;
}

/** What a trajectory belongs to. */
export interface TrajectoryOptions {
  groupId?: string;
  groupSize?: number;
  sampleIndex?: number;
  /** Trajectory it branches from. */
  parentTrajectoryId?: string;
  /** Lower values run earlier. */
  priority?: number;
  /** The server refuses a turn under another version; 0n accepts any. */
  requiredWeightVersion?: bigint;
  /** See Trajectory. */
  resumeAborted?: boolean;
  /** Ends every wait of this trajectory. */
  signal?: AbortSignal;
}

/**
 * One episode, made by `Client.trajectory` or by a lease; its first turn opens it.
 *
 * The first `turn` begins with the task's prompt or with the given observation; later turns append theirs. In a
 * conversation a plain string is a user's message; otherwise it is text, encoded without a template.
 */
export class Trajectory {
  /** Turns so far; an aborted turn is the last until it is resumed. */
  readonly turns: Turn[] = [];
  /** Set when its close begins. */
  outcome: Outcome | Failed | undefined;
  /** Set when its close was confirmed. */
  closed = false;
  /** Whether a turn aborted from outside, such as by a weight update, resumes automatically; a close ends that. */
  resumeAborted: boolean;
  private sampling: Sampling;
  private chat: boolean;
  private progress: TurnProgress | undefined;
  private readonly branches: Trajectory[] = [];

  constructor(
    private readonly calls: Calls,
    readonly trajectoryId: string,
    readonly options: TrajectoryOptions = {},
    readonly task?: Task,
    private readonly onClosed?: (trajectoryId: string) => void,
  ) {
    this.resumeAborted = options.resumeAborted ?? false;
    this.sampling = task?.sampling ?? {};
    this.chat = Boolean(task?.tools?.length) || isChat(task?.prompt);
  }

  /** Takes one turn: `await trajectory.turn("What is 2 + 3?", { maxTokens: 16 })`. Throws PenstockError. */
  async turn(observation?: Observation, options: TurnOptions = {}): Promise<Turn> {
    return this.last(this.stream(observation, { ...options, finalOnly: true }));
  }

  /**
   * Takes one turn and yields its tokens as they arrive; afterwards `turns.at(-1)` is the turn.
   *
   * Until then the tokens are provisional. If the server was lost and came back with fewer tokens than it had
   * streamed, a segment may have a `position` before the end of the last one; it replaces everything from there.
   * Leaving the loop early aborts the turn.
   */
  async *stream(observation?: Observation, options: StreamingOptions = {}): AsyncGenerator<Segment, void> {
    if (this.progress) throw new Error(`a turn of ${this.trajectoryId} is not finished: resume or abort it`);
    const { tools = [], detach = false, finalOnly = false, flushMs, signal, ...sampling } = options;
    const streamOptions = StreamOptions.fromPartial({
      finalOnly,
      detach,
      ...(flushMs === undefined ? {} : { flushInterval: duration(flushMs) }),
    });
    const request = this.writeTurn(observation, tools, streamOptions, sampling);
    this.progress = new TurnProgress(this.turns.length, request);
    yield* this.take(this.progress, true, streamOptions, signal);
  }

  /** Continues an aborted or interrupted turn, at the exact token; returns the whole turn. */
  async resume(options: { signal?: AbortSignal } = {}): Promise<Turn> {
    const streamOptions = StreamOptions.fromPartial({ finalOnly: true });
    const known = this.progress === undefined;
    if (!this.progress) {
      const turn = this.turns.at(-1);
      if (!turn?.aborted) throw new Error(`no turn of ${this.trajectoryId} is aborted`);
      this.turns.pop();
      this.progress = TurnProgress.of(turn, this.resumption(streamOptions));
    }
    return this.last(this.take(this.progress, known, streamOptions, options.signal));
  }

  /** Stops the turn in flight; returns the number of tokens it keeps, zero if no turn is in flight. */
  async abort(reason = ""): Promise<number> {
    return abortTurn(this.calls, this.trajectoryId, reason);
  }

  /** Closes it with a reward, durably. Throws RangeError unless the reward is finite. */
  async complete(reward: number | Outcome): Promise<Closed> {
    return this.close(typeof reward === "number" ? { reward } : reward);
  }

  /** Closes it as failed; the server repeats the attempt, up to a bound. */
  async fail(reason: string, message = ""): Promise<Closed> {
    return this.close(new Failed(reason, message));
  }

  /** Closes it and its branches. It first aborts turns that are still in flight. */
  async close(outcome: Outcome | Failure): Promise<Closed> {
    const written = writeOutcome(outcome);
    this.outcome = outcome;
    await this.abortUnfinished();
    const closed = await this.completed({ trajectoryId: this.trajectoryId, outcome: written });
    this.closed = true;
    this.onClosed?.(this.trajectoryId);
    return closed;
  }

  /** Returns the trajectory as the server holds it, including context. */
  async get(): Promise<TrajectoryRecord> {
    const held = await this.calls.getTrajectory(this.trajectoryId, { patient: true, signal: this.options.signal });
    return readTrajectory(held.trajectory!, held.open);
  }

  /** A trajectory of the same attempt, for example for a sub-agent; it is closed with this one. */
  branch(trajectoryId: string): Trajectory {
    const options = { ...this.options, parentTrajectoryId: this.trajectoryId };
    const branch = new Trajectory(this.calls, trajectoryId, options);
    this.branches.push(branch);
    return branch;
  }

  /** Sends the close. The abort may have overtaken a turn's request, which then arrives after it. */
  private async completed(request: CompleteTrajectoryRequest): Promise<Closed> {
    const aborted = new Map<string, number>();
    for (;;) {
      try {
        return await this.calls.completeTrajectory(request);
      } catch (error) {
        if (!(error instanceof NotAllowedNow) || error.reason !== "TURN_IN_FLIGHT") throw error;
        const busy = error.metadata.trajectory_id || this.trajectoryId;
        const count = aborted.get(busy) ?? 0;
        if (count === CLOSING_ABORTS) throw error;
        aborted.set(busy, count + 1);
        await this.abortClosing(busy);
      }
    }
  }

  /** Aborts turns in flight, because the server refuses to close a trajectory with one. */
  private async abortUnfinished(): Promise<void> {
    this.resumeAborted = false;
    for (const branch of this.branches) await branch.abortUnfinished();
    if (this.progress) await this.abortClosing(this.trajectoryId);
  }

  private async abortClosing(trajectoryId: string): Promise<void> {
    try {
      await abortTurn(this.calls, trajectoryId, "closing", { patient: true });
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
    }
  }

  private async last(stream: AsyncGenerator<Segment, void>): Promise<Turn> {
    for await (const _ of stream);
    return this.turns.at(-1)!;
  }

  /** Runs a turn and records its result, however it ends. */
  private async *take(
    progress: TurnProgress,
    known: boolean,
    streamOptions: StreamOptions,
    signal: AbortSignal | undefined,
  ): AsyncGenerator<Segment, void> {
    const signals = [this.options.signal, signal].filter((each) => each !== undefined);
    const run = {
      calls: this.calls,
      trajectoryId: this.trajectoryId,
      progress,
      resume: this.resumption(streamOptions),
      resumeAborted: () => this.resumeAborted,
      leased: this.task !== undefined,
      policyCountBefore: this.turns.reduce((count, turn) => count + countOf(turn.segments), 0),
      ...(signals.length ? { signal: AbortSignal.any(signals) } : {}),
    };
    try {
      yield* turnStream(run, known);
    } catch (error) {
      if (progress.refused(error)) this.progress = undefined;
      throw error;
    } finally {
      if (progress.finished) {
        this.turns.push(progress.finished);
        this.progress = undefined;
      }
    }
  }

  private resumption(streamOptions: StreamOptions): TurnRequest {
    const { trajectoryId } = this;
    return { $case: "continue", value: ContinueRequest.fromPartial({ trajectoryId, streamOptions }) };
  }

  private writeTurn(
    observation: Observation | undefined,
    tools: Tool[],
    streamOptions: StreamOptions,
    sampling: Sampling,
  ): TurnRequest {
    const { trajectoryId, options } = this;
    const first = this.turns.length === 0;
    if (!first && observation === undefined) {
      throw new TypeError("a later turn needs an observation; an aborted one is resumed");
    }
    const prompt = writePrompt(observation, tools, this.chat && !first);
    if (first && prompt) this.chat = prompt.$case === "conversation";
    this.sampling = { ...this.sampling, ...sampling };
    const samplingParams = writeSampling(this.sampling);
    if (!first) {
      const overridden = Object.keys(sampling).length ? { samplingParams } : {};
      const value = { trajectoryId, streamOptions, ...(prompt ? { observation: prompt } : {}), ...overridden };
      return { $case: "continue", value: ContinueRequest.fromPartial(value) };
    }
    const { groupId, groupSize, sampleIndex, parentTrajectoryId, priority, requiredWeightVersion } = options;
    // A lease or a parent determines the group itself.
    const group = this.task || parentTrajectoryId ? {} : { groupId, groupSize, sampleIndex };
    return {
      $case: "generate",
      value: GenerateRequest.fromPartial({
        trajectoryId,
        streamOptions,
        samplingParams,
        priority,
        requiredWeightVersion,
        parentTrajectoryId,
        ...group,
        ...(prompt ? { prompt } : {}),
      }),
    };
  }
}

function isChat(prompt: Observation | undefined): boolean {
  return typeof prompt === "object" && !(prompt instanceof Int32Array);
}

function duration(ms: number): { seconds: bigint; nanos: number } {
  return { seconds: BigInt(Math.floor(ms / 1000)), nanos: Math.round((ms % 1000) * 1e6) };
}
