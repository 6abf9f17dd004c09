package penstock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
)

// Agent runs an attempt and returns its outcome. An error fails only its attempt, which the server then repeats; a
// *Failed gives the reason.
type Agent func(ctx context.Context, attempt *Attempt) (Outcome, error)

// WorkOptions configure a worker.
type WorkOptions struct {
	LeaseOptions
	// Return after this many attempts; zero continues until ctx ends.
	Attempts int
	// Time limit of one attempt, if less than the server's; after it, the attempt fails with ATTEMPT_TIMEOUT.
	AttemptTime time.Duration
	// How long attempts in flight may continue after ctx has ended; zero means 20 s.
	Drain time.Duration
	// Called for each attempt that has ended: closed with its outcome, or lost.
	Ended func(*Attempt)
}

// Statistics count a worker's attempts.
type Statistics struct {
	// Attempts that ended with a reward, and with a failure.
	Rewarded, Failed int
	// Attempts that lost their lease or server.
	Lost int
}

// Time limit for giving back unfinished attempts when the worker stops.
const giveBack = 5 * time.Second

// How long an agent may take to return after its context has ended.
const leaveAlone = 2 * time.Second

var (
	errStopping = &Failed{"WORKER_STOPPED", "the worker was stopped"}
	errTooLate  = &Failed{"ATTEMPT_TIMEOUT", "not done within its time"}
)

// worker runs a fixed number of attempts in flight, across training steps. Order of shutdown: stop leasing, so that
// no attempt starts -> let running attempts end, up to the drain bound -> fail the rest, so that the server repeats
// them -> close the lease stream.
type worker struct {
	leases     *Leases
	options    WorkOptions
	agent      Agent
	running    sync.WaitGroup
	lock       sync.Mutex
	statistics Statistics
}

func work(ctx context.Context, calls *calls, options WorkOptions, agent Agent) (Statistics, error) {
	options.Concurrency = orElse(options.Concurrency, 8)
	options.ResumeAborted = true
	w := &worker{leases: newLeases(calls, options.LeaseOptions), options: options, agent: agent}
	defer w.leases.Close()
	// Not derived from ctx: attempts in flight outlive it by the drain bound.
	attempts, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(errStopping)
	slots := make(chan struct{}, options.Concurrency)
	var failed error
	for begun := 0; options.Attempts == 0 || begun < options.Attempts; begun++ {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		attempt, err := w.leases.Next(ctx)
		if err != nil || attempt == nil {
			if ctx.Err() == nil {
				failed = err
			}
			break
		}
		w.running.Add(1)
		go func() {
			defer w.running.Done()
			w.attempt(attempts, attempt)
			<-slots
		}()
	}
	w.leases.StopLeasing()
	w.drain(ctx, cancel)
	w.lock.Lock()
	defer w.lock.Unlock()
	return w.statistics, failed
}

// drain returns when no attempt is running, or the drain bound is reached.
func (w *worker) drain(ctx context.Context, cancel context.CancelCauseFunc) {
	ended := make(chan struct{})
	go func() { w.running.Wait(); close(ended) }()
	select {
	case <-ended:
		return
	case <-ctx.Done():
	}
	for _, bound := range []time.Duration{orElse(w.options.Drain, 20*time.Second), giveBack} {
		timer := time.NewTimer(bound)
		defer timer.Stop()
		select {
		case <-ended:
			return
		case <-timer.C:
			cancel(errStopping)
		}
	}
}

// attempt runs one attempt, from its lease to its outcome.
func (w *worker) attempt(ctx context.Context, attempt *Attempt) {
	outcome, lost := w.judge(ctx, attempt)
	if !lost {
		lost = !w.close(context.WithoutCancel(ctx), attempt, outcome, false)
	}
	w.leases.Release(attempt.TrajectoryID)
	if w.options.Ended != nil {
		defer w.options.Ended(attempt)
	}
	w.lock.Lock()
	defer w.lock.Unlock()
	switch {
	case lost:
		w.statistics.Lost++
	case attempt.Outcome.Failure != nil:
		w.statistics.Failed++
	default:
		w.statistics.Rewarded++
	}
}

// judge runs the agent; its result or panic becomes the outcome. lost reports whether the lease was lost.
func (w *worker) judge(ctx context.Context, attempt *Attempt) (outcome Outcome, lost bool) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := w.options.AttemptTime
	if left := time.Until(attempt.EndsAt); !attempt.EndsAt.IsZero() && (limit <= 0 || left < limit) {
		limit = max(left, 0)
	}
	if limit > 0 || !attempt.EndsAt.IsZero() {
		timer := time.AfterFunc(limit, func() { cancel(errTooLate) })
		defer timer.Stop()
	}
	go func() {
		select {
		case <-attempt.Lost:
			cancel(ErrLeaseLost)
		case <-ctx.Done():
		}
	}()
	outcome, err := callUntil(ctx, w.agent, attempt)
	if errors.Is(context.Cause(ctx), ErrLeaseLost) {
		return outcome, true
	}
	if attempt.Closed {
		return *attempt.Outcome, false
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return Outcome{Failure: asFailed(err)}, false
	}
	return outcome, false
}

// callUntil leaves an agent alone that has not returned a while after ctx has ended. Its result is then ignored.
func callUntil(ctx context.Context, agent Agent, attempt *Attempt) (Outcome, error) {
	type result struct {
		outcome Outcome
		err     error
	}
	returned := make(chan result, 1)
	go func() {
		outcome, err := call(ctx, agent, attempt)
		returned <- result{outcome, err}
	}()
	select {
	case r := <-returned:
		return r.outcome, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-returned:
		return r.outcome, r.err
	case <-time.After(leaveAlone):
		return Outcome{}, context.Cause(ctx)
	}
}

func call(ctx context.Context, agent Agent, attempt *Attempt) (outcome Outcome, err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = &Failed{"PANIC", fmt.Sprint(panicked)}
		}
	}()
	return agent(ctx, attempt)
}

// close sends an outcome; it returns false if that is impossible, and the attempt is lost.
func (w *worker) close(ctx context.Context, attempt *Attempt, outcome Outcome, ownSent bool) bool {
	own := attempt.Outcome
	_, err := attempt.Complete(ctx, outcome)
	if err == nil {
		return true
	}
	var refused *Error
	known := errors.As(err, &refused)
	// The outcome itself may be impossible to send. If the server was full all the time, the outcome is still valid.
	tooLarge := known && refused.Code == codes.ResourceExhausted && !refused.full()
	unsent := !known || refused.Code == codes.InvalidArgument || tooLarge
	if unsent && outcome.Failure == nil {
		failed := asFailed(err)
		if !known {
			failed.Reason = "OUTCOME_INVALID"
		}
		return w.close(ctx, attempt, Outcome{Failure: failed}, ownSent)
	}
	if Reason(err) == "OUTCOME_DIFFERS" && own != nil && !ownSent {
		// The agent closed it itself, but did not receive the answer.
		return w.close(ctx, attempt, *own, true)
	}
	return false
}
