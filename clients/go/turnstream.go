package penstock

// One turn over as many streams, and servers, as it takes.
//
// A stream that is lost is taken up again. The order: wait for the server, longer each time and within a bound
// -> abort, because it may still be sampling for the lost caller -> GetTrajectory -> by what it holds:
//
//	the turn, ended otherwise than ABORTED            it is finished
//	the turn, ABORTED                                 Continue without an observation: on at the exact token
//	the trajectory without the turn                   it never arrived: the same request again
//	no trajectory, and nothing of it had come         the same, unless its lease is gone: LEASE_EXPIRED
//	no trajectory, and something of it had come       TRAJECTORY_UNKNOWN
//	fewer tokens of earlier turns than were finished  DATA_LOSS
//	the trajectory, closed                            TRAJECTORY_CLOSED
//
// What the server holds is the turn: what was streamed and is not in its record was never durable, is discarded
// here and sampled again. Where a turn ends with another number of tokens than arrived the server is asked anew:
// between the answer to GetTrajectory and the Continue that follows from it it may be killed, too, and go on from
// fewer tokens than it had told.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"

	penstockv1 "penstock/v1"
)

// Resumes in a row that brought no token, after which an aborted turn is given to the caller.
const fruitlessResumes = 8

// What a request is refused with whose first copy, though its stream was lost, did arrive.
var arrivedAfterAll = []string{"TRAJECTORY_EXISTS", "TURN_IN_FLIGHT", "NOTHING_TO_RESUME"}

// errStopped ends a stream whose reader has enough.
var errStopped = errors.New("its reader has enough")

// turnRun is a turn and what it needs.
type turnRun struct {
	calls        *calls
	trajectoryID string
	progress     *turnProgress
	// Continue without an observation.
	resume turnRequest
	// Whether an aborted turn goes on by itself.
	resumeAborted bool
	// Whether the trajectory is a lease's own.
	leased bool
	// Tokens of the turns before this one.
	policyCountBefore int
	// Given each segment; false where its reader has enough.
	yield func(Segment) bool
}

// stand is where the server stands with a turn.
type stand struct {
	// Tokens that it holds and that did not arrive.
	missing []Segment
	// What to ask next; nil where the turn has ended.
	request *turnRequest
	// How the turn ended, where it did while nobody heard it.
	ended *penstockv1.TurnFinished
}

// run takes the turn to its end, over lost streams, full servers and, where asked to, aborts. Unless it is
// known where the turn stands, the server is asked first.
func (r *turnRun) run(ctx context.Context, known bool) error {
	lost, overload := &backOff{limit: r.calls.patience.Reconnect}, &backOff{limit: r.calls.patience.Overload}
	var request *turnRequest
	if known {
		request = &r.progress.request
	}
	fruitless, asked := 0, false
	for {
		before := r.progress.tokenCount
		err := error(nil)
		if request == nil {
			request, err = r.catchUp(ctx)
			asked = asked || err == nil
		}
		if err == nil && request != nil {
			err = r.follow(ctx, *request, lost)
		}
		var refused *Error
		switch {
		case err == nil:
		case !errors.As(err, &refused):
			return err
		case refused.Unavailable():
			if !lost.wait(ctx, 0) {
				return orCause(ctx, err)
			}
			request = nil
			continue
		case refused.notAllowedNow():
			again := asked && slices.Contains(arrivedAfterAll, refused.Reason)
			if !again || !lost.wait(ctx, 0) {
				return orCause(ctx, err)
			}
			request = nil
			continue
		default:
			if !outlasts(ctx, overload, err) {
				return orCause(ctx, err)
			}
			if r.progress.started {
				request = nil
			}
			continue
		}
		fruitless++
		if r.progress.tokenCount > before {
			fruitless = 0
		}
		turn := r.progress.finished
		if turn == nil || !turn.Aborted() || !r.resumeAborted || fruitless >= fruitlessResumes {
			return nil
		}
		r.progress.finished = nil
		request = &r.resume
	}
}

func orCause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// catchUp asks where the turn stands, and hands over what is missing; what to ask next, nil where it has ended.
func (r *turnRun) catchUp(ctx context.Context) (*turnRequest, error) {
	stand, err := r.whereItStands(ctx)
	if err != nil {
		return nil, err
	}
	for _, segment := range stand.missing {
		if !r.yield(segment) {
			return nil, errStopped
		}
	}
	if stand.ended != nil {
		return nil, r.progress.finish(stand.ended)
	}
	return stand.request, nil
}

// follow reads one stream.
func (r *turnRun) follow(ctx context.Context, request turnRequest, lost *backOff) error {
	var err error
	if request.generate != nil {
		err = stream(ctx, r.calls, r.calls.rollout.Generate, request.generate,
			func(event *penstockv1.GenerateResponse) (bool, error) {
				return r.take(lost, event.GetStarted(), event.GetSegment(), event.GetFinished())
			})
	} else {
		err = stream(ctx, r.calls, r.calls.rollout.Continue, request.continue_,
			func(event *penstockv1.ContinueResponse) (bool, error) {
				return r.take(lost, event.GetStarted(), event.GetSegment(), event.GetFinished())
			})
	}
	if err == nil && r.progress.finished == nil {
		return &Error{Code: codes.Unavailable, Message: "the stream ended before its turn"}
	}
	return err
}

func (r *turnRun) take(
	lost *backOff, started *penstockv1.TurnStarted, segment *penstockv1.Segment, finished *penstockv1.TurnFinished,
) (bool, error) {
	switch {
	case started != nil:
		r.progress.start(started)
	case finished != nil:
		err := r.progress.finish(finished)
		if err != nil {
			// Where it stands is asked anew.
			err = &Error{Code: codes.Unavailable, Message: err.Error()}
		}
		return true, err
	case segment != nil:
		read, err := readSegment(segment)
		if err != nil {
			return false, err
		}
		lost.reset()
		if !r.yield(r.progress.add(read)) {
			return false, errStopped
		}
	}
	return true, nil
}

// whereItStands asks for a turn whose stream was lost; the comment above says what follows.
func (r *turnRun) whereItStands(ctx context.Context) (*stand, error) {
	_, err := r.calls.abortTurn(ctx, patient, r.trajectoryID, "stream lost")
	var held *penstockv1.GetTrajectoryResponse
	if err == nil {
		held, err = r.calls.getTrajectory(ctx, patient, r.trajectoryID)
	}
	if isCode(err, codes.NotFound) && r.progress.index == 0 && r.progress.tokenCount == 0 {
		if err := r.checkLease(ctx); err != nil {
			return nil, err
		}
		r.progress.forget()
		return &stand{request: &r.progress.request}, nil
	}
	if err != nil {
		return nil, err
	}
	record, err := readTrajectory(held)
	if err == nil {
		err = r.checkExtensible(record)
	}
	if err != nil {
		return nil, err
	}
	if record.TurnCount <= r.progress.index {
		r.progress.forget()
		return &stand{request: &r.progress.request}, nil
	}
	if held.LastTurn == nil {
		// The request was still on its way when the abort overtook it.
		message := fmt.Sprintf("turn %d of %s is still in flight", r.progress.index, r.trajectoryID)
		return nil, &Error{Code: codes.Unavailable, Message: message}
	}
	missing := r.progress.catchUp(record)
	if held.LastTurn.FinishReason == penstockv1.FinishReason_FINISH_REASON_ABORTED {
		return &stand{missing: missing, request: &r.resume}, nil
	}
	return &stand{missing: missing, ended: held.LastTurn}, nil
}

// checkLease refuses where the server that is there now never leased this attempt, or no longer does: it would
// take the request for a trajectory of its own.
func (r *turnRun) checkLease(ctx context.Context) error {
	if !r.leased {
		return nil
	}
	answer, err := r.calls.renewLease(ctx, patient, []string{r.trajectoryID})
	if err == nil && slices.Contains(answer.ExpiredTrajectoryIds, r.trajectoryID) {
		return r.notAllowed("LEASE_EXPIRED", fmt.Sprintf("the lease of %s is gone", r.trajectoryID))
	}
	return err
}

// checkExtensible refuses where the record cannot be gone on with.
func (r *turnRun) checkExtensible(record *TrajectoryRecord) error {
	if !record.Open {
		return r.notAllowed("TRAJECTORY_CLOSED", fmt.Sprintf("trajectory %s is closed", r.trajectoryID))
	}
	held := countOf(policySegments(record, func(turn int) bool { return turn < r.progress.index }))
	if held < r.policyCountBefore {
		message := fmt.Sprintf("the server came back with %d of %d tokens of the turns of %s that were finished: "+
			"it keeps no journal, or lost part of it", held, r.policyCountBefore, r.trajectoryID)
		return &Error{
			Code: codes.DataLoss, Message: message, Metadata: map[string]string{"trajectory_id": r.trajectoryID},
		}
	}
	return nil
}

func (r *turnRun) notAllowed(reason, message string) error {
	return &Error{
		Code: codes.FailedPrecondition, Reason: reason, Message: message,
		Metadata: map[string]string{"trajectory_id": r.trajectoryID},
	}
}
