/**
 * Takes one turn over as many streams and servers as necessary.
 *
 * A lost stream is recovered in this order: wait for the server, longer each time and within a bound -> abort,
 * because the server may still be sampling for the lost stream -> GetTrajectory -> by what the server holds:
 *
 * | the server has | then |
 * |---|---|
 * | the turn, with an end other than ABORTED | the turn is finished |
 * | the turn, ABORTED | `Continue` without an observation, at the exact token |
 * | the trajectory without the turn | the request never arrived; send it again |
 * | no trajectory, and no tokens had arrived | the same, unless its lease is gone: LEASE_EXPIRED |
 * | no trajectory, and some tokens had arrived | TRAJECTORY_UNKNOWN |
 * | fewer tokens of earlier turns than were finished | DATA_LOSS |
 * | the trajectory, closed | TRAJECTORY_CLOSED |
 *
 * The server's record is authoritative. Tokens that were streamed but are not in it were never durable; they are
 * discarded here and sampled again. If a turn ends with another number of tokens than arrived, the client asks the
 * server again. The server may have been killed between its answer to GetTrajectory and the following `Continue`,
 * and may have continued from fewer tokens than it had reported.
 */

import { status } from "@grpc/grpc-js";
import { Backoff, type Calls, type TurnEvent, type TurnRequest, outlasts } from "./calls.js";
import { NotAllowedNow, NotFound, PenstockError, ServerUnavailable } from "./errors.js";
import { AbortRequest, type TurnFinished } from "./gen/penstock/v1/rollout_service.js";
import { type Segment, type TrajectoryRecord, type TurnProgress, countOf, readFinishReason, readSegment, readTrajectory } from "./turns.js";

/** After this many resumptions in a row without a new token, an aborted turn is returned to the caller. */
const FRUITLESS_RESUMES = 8;
/** Reasons that mean the first copy of a request arrived, although its stream was lost. */
const ARRIVED_AFTER_ALL = ["TRAJECTORY_EXISTS", "TURN_IN_FLIGHT", "NOTHING_TO_RESUME"];

/** A turn in flight and its parameters. */
export interface TurnRun {
  calls: Calls;
  trajectoryId: string;
  progress: TurnProgress;
  /** A `Continue` without an observation. */
  resume: TurnRequest;
  /** Whether the aborted turn resumes automatically. */
  resumeAborted: () => boolean;
  /** Whether the trajectory belongs to a lease. */
  leased: boolean;
  /** Number of tokens of earlier turns. */
  policyCountBefore: number;
  signal?: AbortSignal;
}

/** A turn's state on the server. */
interface Stand {
  /** Tokens that the server holds and that have not arrived. */
  missing: Segment[];
  /** The next request; unset if the turn has ended. */
  request?: TurnRequest;
  /** How the turn ended, if it ended while the stream was lost. */
  ended?: TurnFinished;
}

/**
 * Runs a turn to its end, across lost streams, full servers and, if requested, aborts. It asks the server first,
 * unless the turn's state is `known`.
 */
export async function* turnStream(run: TurnRun, known: boolean): AsyncGenerator<Segment, void> {
  const { calls, progress, signal } = run;
  const lost = new Backoff(calls.patience.reconnectMs);
  const overload = new Backoff(calls.patience.overloadMs);
  let request = known ? progress.request : undefined;
  let fruitless = 0;
  let asked = false;
  for (;;) {
    const before = progress.tokenCount;
    try {
      if (request === undefined) {
        const stand = await whereItStands(run);
        request = stand.request;
        asked = true;
        yield* stand.missing;
        if (stand.ended) progress.finish(stand.ended);
      }
      if (request !== undefined) {
        for await (const segment of tokensFrom(calls.turnEvents(request, signal), progress)) {
          lost.reset();
          yield segment;
        }
      }
    } catch (error) {
      if (error instanceof ServerUnavailable) {
        if (!(await lost.wait(0, signal))) throw error;
        request = undefined;
      } else if (error instanceof NotAllowedNow) {
        const again = asked && ARRIVED_AFTER_ALL.includes(error.reason);
        if (!again || !(await lost.wait(0, signal))) throw error;
        request = undefined;
      } else {
        if (!(await outlasts(overload, error, signal))) throw error;
        if (progress.started) request = undefined;
      }
      continue;
    }
    fruitless = progress.tokenCount > before ? 0 : fruitless + 1;
    if (!progress.finished?.aborted || !run.resumeAborted() || fruitless >= FRUITLESS_RESUMES) return;
    progress.finished = undefined;
    request = run.resume;
  }
}

async function* tokensFrom(events: AsyncGenerator<TurnEvent>, progress: TurnProgress): AsyncGenerator<Segment, void> {
  for await (const { event } of events) {
    switch (event?.$case) {
      case "started":
        progress.start(event.value);
        break;
      case "segment":
        yield progress.add(readSegment(event.value));
        break;
      case "finished":
        if (event.value.policyTokenCount !== progress.tokenCount) {
          const message = `${progress.tokenCount} of ${event.value.policyTokenCount} tokens of a turn arrived`;
          throw new ServerUnavailable(message, { code: status.UNAVAILABLE });
        }
        progress.finish(event.value);
        break;
    }
  }
  if (!progress.finished) {
    throw new ServerUnavailable("the stream ended before its turn", { code: status.UNAVAILABLE });
  }
}

/** Determines the state of a turn whose stream was lost; the module comment has the cases. */
async function whereItStands(run: TurnRun): Promise<Stand> {
  const { calls, trajectoryId, progress, signal } = run;
  let held;
  try {
    await abortTurn(calls, trajectoryId, "stream lost", { patient: true, signal });
    held = await calls.getTrajectory(trajectoryId, { patient: true, signal });
  } catch (error) {
    if (!(error instanceof NotFound) || progress.index > 0 || progress.tokenCount > 0) throw error;
    await checkLease(run);
    progress.forget();
    return { missing: [], request: progress.request };
  }
  const record = readTrajectory(held.trajectory!, held.open);
  checkExtensible(run, record);
  if (record.turnCount <= progress.index) {
    progress.forget();
    return { missing: [], request: progress.request };
  }
  if (!held.lastTurn) {
    // The abort overtook the request, which arrives later.
    throw new ServerUnavailable(`turn ${progress.index} of ${trajectoryId} is still in flight`, {
      code: status.UNAVAILABLE,
    });
  }
  const missing = progress.catchUp(record);
  if (readFinishReason(held.lastTurn.finishReason) === "aborted") return { missing, request: run.resume };
  return { missing, ended: held.lastTurn };
}

/** Throws NotAllowedNow if the current server never leased this attempt, or no longer does. It would take the request
 * for an unleased trajectory. */
async function checkLease({ calls, trajectoryId, leased, signal }: TurnRun): Promise<void> {
  if (!leased) return;
  const { expiredTrajectoryIds } = await calls.renewLease([trajectoryId], { patient: true, signal });
  if (expiredTrajectoryIds.includes(trajectoryId)) {
    throw notAllowed(`the lease of ${trajectoryId} is gone`, "LEASE_EXPIRED", trajectoryId);
  }
}

/** Throws if the record cannot be continued. */
function checkExtensible(run: TurnRun, record: TrajectoryRecord): void {
  const { trajectoryId, progress, policyCountBefore } = run;
  if (!record.open) throw notAllowed(`trajectory ${trajectoryId} is closed`, "TRAJECTORY_CLOSED", trajectoryId);
  const held = countOf(record.segments.filter((s) => s.fromPolicy && s.turnIndex < progress.index));
  if (held < policyCountBefore) {
    throw new PenstockError(
      `the server came back with ${held} of ${policyCountBefore} tokens of the turns of ${trajectoryId} ` +
        "that were finished: it keeps no journal, or lost part of it",
      { code: status.DATA_LOSS, metadata: { trajectory_id: trajectoryId } },
    );
  }
}

function notAllowed(message: string, reason: string, trajectoryId: string): NotAllowedNow {
  const metadata = { trajectory_id: trajectoryId };
  return new NotAllowedNow(message, { code: status.FAILED_PRECONDITION, reason, metadata });
}

/** Stops a trajectory's turn; returns the number of tokens it keeps. */
export async function abortTurn(
  calls: Calls,
  trajectoryId: string,
  reason: string,
  waiting: { patient?: boolean; signal?: AbortSignal } = {},
): Promise<number> {
  const value = { trajectoryIds: [trajectoryId] };
  const request = AbortRequest.fromPartial({ selector: { $case: "trajectories", value }, reason });
  const { abortedTurns } = await calls.abort(request, waiting);
  return abortedTurns.reduce((count, turn) => count + turn.policyTokenCount, 0);
}
