package penstock

// Takes one turn over as many streams and servers as necessary.
//
// A lost stream is recovered in this order: wait for the server, longer each time and within a bound -> abort, because
// the server may still be sampling for the lost stream -> GetTrajectory -> by what the server holds:
//
//	the turn, with an end other than ABORTED          the turn is finished
//	the turn, ABORTED                                 Continue without an observation, at the exact token
//	the trajectory without the turn                   the request never arrived; send it again
//	no trajectory, and no tokens had arrived          the same, unless its lease is gone: LEASE_EXPIRED
//	no trajectory, and some tokens had arrived        TRAJECTORY_UNKNOWN
//	fewer tokens of earlier turns than were finished  DATA_LOSS
//	the trajectory, closed                            TRAJECTORY_CLOSED
//
// The server's record is authoritative. Tokens that were streamed but are not in it were never durable; they are
// discarded here and sampled again. If a turn ends with another number of tokens than arrived, the client asks the
// server again. The server may have been killed between its answer to GetTrajectory and the following Continue, and
// may have continued from fewer tokens than it had reported.

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"

	penstockv1 "penstock/v1"
)

// After this many resumptions in a row without a new token, an aborted turn is returned to the caller.
const fruitlessResumes = 8

// Reasons that mean the first copy of a request arrived, although its stream was lost.
var arrivedAfterAll = []string{"TRAJECTORY_EXISTS", "TURN_IN_FLIGHT", "NOTHING_TO_RESUME"}

// errStopped ends a stream whose reader has left the loop.
var errStopped = errors.New("its reader has enough")

// turnRun is a turn in flight and its parameters.
type turnRun struct {
	calls        *calls
	trajectoryID string
	progress     *turnProgress
	// A Continue without an observation.
	resume turnRequest
	// Whether an aborted turn resumes automatically.
	resumeAborted bool
	// Whether the trajectory belongs to a lease.
	leased bool
	// Number of tokens of earlier turns.
	policyCountBefore int
	// Called with each segment; returns false if the reader has left the loop.
	yield func(Segment) bool
}

// stand is a turn's state on the server.
type stand struct {
	// Tokens that the server holds and that have not arrived.
	missing []Segment
	// The next request; nil if the turn has ended.
	request *turnRequest
	// How the turn ended, if it ended while the stream was lost.
	ended *penstockv1.TurnFinished
}

// run takes the turn to its end, across lost streams, full servers and, if requested, aborts. It asks the server first,
// unless the turn's state is known.
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

// catchUp asks for the turn's state and hands over missing tokens; returns the next request, nil if it has ended.
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

// follow reads one stream to its end.
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
			// Ask for its state again.
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

// whereItStands determines the state of a turn whose stream was lost; the comment at the top has the cases.
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
		// The abort overtook the request, which arrives later.
		message := fmt.Sprintf("turn %d of %s is still in flight", r.progress.index, r.trajectoryID)
		return nil, &Error{Code: codes.Unavailable, Message: message}
	}
	missing := r.progress.catchUp(record)
	if held.LastTurn.FinishReason == penstockv1.FinishReason_FINISH_REASON_ABORTED {
		return &stand{missing: missing, request: &r.resume}, nil
	}
	return &stand{missing: missing, ended: held.LastTurn}, nil
}

// checkLease returns an error if the current server never leased this attempt, or no longer does. It would take the
// request for an unleased trajectory.
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

// checkExtensible returns an error if the record cannot be continued.
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
