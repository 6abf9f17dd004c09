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

// A server takes the leases of a lost stream back after a grace of some ten seconds, and may notice the loss
// later than this side did; so even a long lease is renewed this often.
const longestRenewal = 3 * time.Second

// ErrLeaseLost is the cause of an attempt's context whose lease ran out: its work belongs to another agent.
var ErrLeaseLost = errors.New("the lease ran out")

// Attempt is one attempt at a task, and the trajectory to make it with.
type Attempt struct {
	*Trajectory
	Task    *Task
	GroupID string
	// Position in the group, from zero.
	SampleIndex int
	// Attempts made before this one.
	RetryCount int
	// Closed when its lease is lost: work that goes on is for nobody.
	Lost <-chan struct{}
}

// LeaseOptions say what to lease.
type LeaseOptions struct {
	// Attempts held at a time; zero is one.
	Concurrency int
	// Names this process, for metrics and traces.
	AgentID string
	// Only tasks of this purpose; unspecified takes any.
	Purpose penstockv1.Purpose
	// Lease every attempt of a group here; a group larger than Concurrency then never comes.
	WholeGroups bool
	// Whether a turn that a weight update ended goes on by itself.
	ResumeAborted bool
	// Told when the server cannot be reached or does not lease now; it is asked again until it does.
	ServerLost func(error)
	// Told when it leases again.
	ServerBack func()
}

// Leases are attempts as they are leased. The server leases another when one is closed.
//
// One goroutine consumes lease streams, one after another, and waits for the server and for room; another renews
// all that is held in one call, every third of a lease and every 3 s at the latest.
type Leases struct {
	calls   *calls
	options LeaseOptions
	request *penstockv1.LeaseTasksRequest
	ready   chan *Attempt
	// Ends leasing, and renewing.
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

// Next waits for an attempt. Nil without an error once leasing was stopped.
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

// All yields attempts until leasing is stopped, or ctx ends.
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

// Release stops renewing an attempt: it goes to another agent when its lease has run out.
func (l *Leases) Release(trajectoryID string) {
	l.lock.Lock()
	defer l.lock.Unlock()
	delete(l.held, trajectoryID)
}

// StopLeasing takes no more attempts; those taken are renewed until Close.
func (l *Leases) StopLeasing() {
	l.stop()
	l.receiving.Wait()
	for attempt := range l.ready {
		l.Release(attempt.TrajectoryID)
	}
}

// Close gives the stream up; what is still held goes back when its lease has run out.
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

// offer waits for room: after a loss the new stream leases while attempts of the old are still held.
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
	attempt := &Attempt{
		trajectory, task, lease.GroupId, int(lease.SampleIndex), int(lease.RetryCount), lost,
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

// renewAll renews everything in one call, and lets go of what is lost. An error is left to receive, which notices
// a lost server by its stream, and renews when it is back.
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
		// One that is being closed has no lease any more, because its close was accepted.
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
