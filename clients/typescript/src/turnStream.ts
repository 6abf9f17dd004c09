/**
 * One turn over as many streams, and servers, as it takes.
 *
 * A stream that is lost is taken up again. The order: wait for the server, longer each time and within a
 * bound -> abort, because it may still be sampling for the lost caller -> GetTrajectory -> by what it holds:
 *
 * | the server has | then |
 * |---|---|
 * | the turn, ended otherwise than ABORTED | it is finished |
 * | the turn, ABORTED | `Continue` without an observation: on at the exact token |
 * | the trajectory without the turn | it never arrived: the same request again |
 * | no trajectory, and nothing of it had come | the same, unless its lease is gone: LEASE_EXPIRED |
 * | no trajectory, and something of it had come | TRAJECTORY_UNKNOWN |
 * | fewer tokens of earlier turns than it had finished | DATA_LOSS |
 * | the trajectory, closed | TRAJECTORY_CLOSED |
 *
 * What the server holds is the turn: what was streamed and is not in its record was never durable, is
 * discarded here and sampled again. Where a turn ends with another number of tokens than arrived the server is
 * asked anew: between the answer to GetTrajectory and the `Continue` that follows from it it may be killed, too,
 * and go on from fewer tokens than it had told.
 */

import { status } from "@grpc/grpc-js";
import { Backoff, type Calls, type TurnEvent, type TurnRequest, outlasts } from "./calls.js";
import { NotAllowedNow, NotFound, PenstockError, ServerUnavailable } from "./errors.js";
import { AbortRequest, type TurnFinished } from "./gen/penstock/v1/rollout_service.js";
import { type Segment, type TrajectoryRecord, type TurnProgress, countOf, readFinishReason, readSegment, readTrajectory } from "./turns.js";

/** Resumes in a row that brought no token, after which an aborted turn is given to the caller. */
const FRUITLESS_RESUMES = 8;
/** What a request is refused with whose first copy, though its stream was lost, did arrive. */
const ARRIVED_AFTER_ALL = ["TRAJECTORY_EXISTS", "TURN_IN_FLIGHT", "NOTHING_TO_RESUME"];

/** The turn that `turnStream` runs. */
export interface TurnRun {
  calls: Calls;
  trajectoryId: string;
  progress: TurnProgress;
  /** `Continue` without an observation. */
  resume: TurnRequest;
  /** Whether the turn, which was aborted, goes on by itself. */
  resumeAborted: () => boolean;
  /** Whether the trajectory is a lease's own. */
  leased: boolean;
  /** Tokens of the turns before this one. */
  policyCountBefore: number;
  signal?: AbortSignal;
}

/** Where the server stands with a turn. */
interface Stand {
  /** Tokens that it holds and that did not arrive. */
  missing: Segment[];
  /** What to ask next; unset where the turn has ended. */
  request?: TurnRequest;
  /** How the turn ended, where it did while nobody heard it. */
  ended?: TurnFinished;
}

/**
 * Runs a turn to its end, over lost streams, full servers and, where asked to, aborts. Unless it is `known`
 * where the turn stands, the server is asked first.
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

/** Where a turn stands whose stream was lost; the module says what follows. */
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
    // The request was still on its way when the abort overtook it.
    throw new ServerUnavailable(`turn ${progress.index} of ${trajectoryId} is still in flight`, {
      code: status.UNAVAILABLE,
    });
  }
  const missing = progress.catchUp(record);
  if (readFinishReason(held.lastTurn.finishReason) === "aborted") return { missing, request: run.resume };
  return { missing, ended: held.lastTurn };
}

/** Throws NotAllowedNow where the server that is there now never leased this attempt, or no longer does: it
 * would take the request for a trajectory of its own. */
async function checkLease({ calls, trajectoryId, leased, signal }: TurnRun): Promise<void> {
  if (!leased) return;
  const { expiredTrajectoryIds } = await calls.renewLease([trajectoryId], { patient: true, signal });
  if (expiredTrajectoryIds.includes(trajectoryId)) {
    throw notAllowed(`the lease of ${trajectoryId} is gone`, "LEASE_EXPIRED", trajectoryId);
  }
}

/** Throws where the record cannot be gone on with. */
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

/** Stops a trajectory's turn; returns the tokens it keeps. */
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
