package penstock

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	penstockv1 "penstock/v1"
)

// A server takes back the leases of a lost stream after a grace period of about ten seconds. It may notice the loss
// later than this side did. So even a long lease is renewed this often.
const longestRenewal = 3 * time.Second

// ErrLeaseLost is the cause of an attempt's context if its lease ran out: another agent has the attempt now.
var ErrLeaseLost = errors.New("the lease ran out")

// Attempt is one attempt at a task, with its trajectory.
type Attempt struct {
	*Trajectory
	Task    *Task
	GroupID string
	// Position in the group, from zero.
	SampleIndex int
	// Earlier attempts at this place in the group.
	RetryCount int
	// When it has to be closed. The server takes it back after that. Zero if the server names no limit.
	EndsAt time.Time
	// Closed when its lease is lost; further work on it is wasted.
	Lost <-chan struct{}
}

// LeaseOptions say which attempts to lease.
type LeaseOptions struct {
	// Attempts held at a time; zero is one.
	Concurrency int
	// Names this process, for metrics and traces.
	AgentID string
	// Only tasks of this purpose; unspecified takes any.
	Purpose penstockv1.Purpose
	// Lease all attempts of a group here. A group larger than Concurrency is then never leased.
	WholeGroups bool
	// Whether a turn that a weight update aborted resumes automatically.
	ResumeAborted bool
	// Called when the server cannot be reached or does not lease now; the client keeps retrying.
	ServerLost func(error)
	// Called when the server leases again.
	ServerBack func()
}

// Leases hands out attempts as they are leased. The server leases another attempt when one is closed.
//
// One goroutine reads lease streams, one after another, and waits for the server and for room. Another goroutine
// renews all held leases in one call, every third of a lease and at least every 3 s.
type Leases struct {
	calls   *calls
	options LeaseOptions
	request *penstockv1.LeaseTasksRequest
	ready   chan *Attempt
	// Stops leasing and renewing.
	stop, cancel context.CancelFunc
	receiving    sync.WaitGroup
	sooner       chan struct{}

	lock  sync.Mutex
	held  map[string]*held
	renew time.Duration
	lost  bool
	ended error
}

type held struct {
	attempt *Attempt
	lost    chan struct{}
	closing bool
}

func newLeases(calls *calls, options LeaseOptions) *Leases {
	options.Concurrency = max(options.Concurrency, 1)
	options.AgentID = orElse(options.AgentID, fmt.Sprintf("go-%d", os.Getpid()))
	leases := &Leases{
		calls: calls, options: options, held: map[string]*held{}, renew: longestRenewal,
		ready: make(chan *Attempt, options.Concurrency), sooner: make(chan struct{}, 1),
		request: &penstockv1.LeaseTasksRequest{
			AgentId: options.AgentID, Concurrency: int32(options.Concurrency), Purpose: options.Purpose,
			WholeGroups: options.WholeGroups,
		},
	}
	renewing, cancel := context.WithCancel(context.Background())
	leasing, stop := context.WithCancel(renewing)
	leases.stop, leases.cancel = stop, cancel
	leases.receiving.Add(1)
	go leases.receive(leasing)
	go leases.renewHeld(renewing)
	return leases
}

// Next waits for an attempt. It returns nil without an error once leasing has stopped.
func (l *Leases) Next(ctx context.Context) (*Attempt, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case attempt, ok := <-l.ready:
			if !ok {
				l.lock.Lock()
				defer l.lock.Unlock()
				return nil, l.ended
			}
			if l.holds(attempt.TrajectoryID) {
				return attempt, nil
			}
		}
	}
}

// All yields attempts until leasing stops or ctx ends.
func (l *Leases) All(ctx context.Context) func(yield func(*Attempt, error) bool) {
	return func(yield func(*Attempt, error) bool) {
		for {
			attempt, err := l.Next(ctx)
			if attempt == nil && err == nil || !yield(attempt, err) || err != nil {
				return
			}
		}
	}
}

// Release stops renewing an attempt; when its lease runs out, another agent gets it.
func (l *Leases) Release(trajectoryID string) {
	l.lock.Lock()
	defer l.lock.Unlock()
	delete(l.held, trajectoryID)
}

// StopLeasing takes no more attempts; those already leased are renewed until Close.
func (l *Leases) StopLeasing() {
	l.stop()
	l.receiving.Wait()
	for attempt := range l.ready {
		l.Release(attempt.TrajectoryID)
	}
}

// Close closes the stream; attempts still held go back when their leases run out.
func (l *Leases) Close() {
	l.StopLeasing()
	l.cancel()
}

func (l *Leases) receive(ctx context.Context) {
	defer l.receiving.Done()
	defer close(l.ready)
	backoff := &backOff{}
	for ctx.Err() == nil {
		_, err := l.calls.serverInfo(ctx, endless)
		if err == nil {
			l.renewAfterLoss(ctx)
			err = stream(ctx, l.calls, l.calls.tasks.LeaseTasks, l.request,
				func(lease *penstockv1.LeaseTasksResponse) (bool, error) {
					backoff.reset()
					l.sayBack()
					return l.offer(ctx, lease), nil
				})
		}
		if err == nil {
			err = &Error{Code: codes.Unavailable, Message: "the server ended the lease stream"}
		}
		if ctx.Err() != nil {
			return
		}
		if !isUnavailable(err) && !isCode(err, codes.ResourceExhausted) {
			l.lock.Lock()
			l.ended = err
			l.lock.Unlock()
			return
		}
		l.sayLost(err)
		backoff.wait(ctx, 0)
	}
}

// offer waits for room: after a loss, the new stream leases attempts while old ones are still held.
func (l *Leases) offer(ctx context.Context, lease *penstockv1.LeaseTasksResponse) bool {
	task := readTask(lease.GetTask())
	trajectory := &Trajectory{
		TrajectoryID: lease.TrajectoryId, ResumeAborted: l.options.ResumeAborted, calls: l.calls, task: task,
		sampling: task.sampling,
	}
	if _, chat := task.Prompt.(Messages); chat || len(task.Tools) > 0 {
		trajectory.chat = true
	}
	trajectory.onClose = func(confirmed bool) { l.closes(lease.TrajectoryId, confirmed) }
	lost := make(chan struct{})
	var endsAt time.Time
	if limit := lease.GetTimeLimit().AsDuration(); limit > 0 {
		endsAt = time.Now().Add(limit)
	}
	attempt := &Attempt{
		trajectory, task, lease.GroupId, int(lease.SampleIndex), int(lease.RetryCount), endsAt, lost,
	}
	l.lock.Lock()
	if third := lease.GetLease().AsDuration() / 3; third > 0 && third < l.renew {
		l.renew = third
		select {
		case l.sooner <- struct{}{}:
		default:
		}
	}
	l.held[lease.TrajectoryId] = &held{attempt: attempt, lost: lost}
	l.lock.Unlock()
	select {
	case l.ready <- attempt:
		return true
	case <-ctx.Done():
		l.Release(lease.TrajectoryId)
		return false
	}
}

func (l *Leases) renewHeld(ctx context.Context) {
	for ctx.Err() == nil {
		l.lock.Lock()
		timer := time.NewTimer(l.renew)
		l.lock.Unlock()
		select {
		case <-timer.C:
			l.renewAll(ctx)
		case <-l.sooner:
			timer.Stop()
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

func (l *Leases) renewAfterLoss(ctx context.Context) {
	l.lock.Lock()
	lost := l.lost
	l.lock.Unlock()
	if lost {
		l.renewAll(ctx)
	}
}

// renewAll renews all leases in one call, and drops those that are lost. An error is left to receive, which notices a
// lost server by its stream and renews when the server is back.
func (l *Leases) renewAll(ctx context.Context) {
	var ids []string
	l.lock.Lock()
	for id := range l.held {
		ids = append(ids, id)
	}
	l.lock.Unlock()
	if len(ids) == 0 {
		return
	}
	answer, err := l.calls.renewLease(ctx, impatient, ids)
	if err != nil {
		return
	}
	l.lock.Lock()
	defer l.lock.Unlock()
	for _, id := range answer.ExpiredTrajectoryIds {
		// An attempt that is being closed has no lease any more, because its close was accepted.
		if found := l.held[id]; found != nil && !found.closing {
			delete(l.held, id)
			close(found.lost)
		}
	}
}

func (l *Leases) holds(trajectoryID string) bool {
	l.lock.Lock()
	defer l.lock.Unlock()
	return l.held[trajectoryID] != nil
}

func (l *Leases) closes(trajectoryID string, confirmed bool) {
	l.lock.Lock()
	defer l.lock.Unlock()
	if found := l.held[trajectoryID]; found != nil {
		found.closing = true
	}
	if confirmed {
		delete(l.held, trajectoryID)
	}
}

func (l *Leases) sayLost(err error) {
	l.lock.Lock()
	first := !l.lost
	l.lost = true
	l.lock.Unlock()
	if first && l.options.ServerLost != nil {
		l.options.ServerLost(err)
	}
}

func (l *Leases) sayBack() {
	l.lock.Lock()
	was := l.lost
	l.lost = false
	l.lock.Unlock()
	if was && l.options.ServerBack != nil {
		l.options.ServerBack()
	}
}
