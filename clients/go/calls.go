package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	penstockv1 "penstock/v1"
)

// Patience is how long a client waits in different situations.
type Patience struct {
	// Deadline of a unary call.
	Call time.Duration
	// How long to wait for a lost server before the turn or the close that needs it fails.
	Reconnect time.Duration
	// How long to retry at a full server that says when to come back.
	Overload time.Duration
}

var defaultPatience = Patience{30 * time.Second, 60 * time.Second, 120 * time.Second}

// How long a call waits for a lost server.
type waiting int

const (
	// Only gRPC's own retries.
	impatient waiting = iota
	// Within Patience.Reconnect.
	patient
	// Without a limit.
	endless
)

// backOff makes growing, jittered waits, within a bound that starts with the first wait; zero means no bound.
type backOff struct {
	limit    time.Duration
	delay    time.Duration
	giveUpAt time.Time
}

const (
	firstDelay   = 100 * time.Millisecond
	longestDelay = 5 * time.Second
)

// reset starts over after progress.
func (b *backOff) reset() { b.delay, b.giveUpAt = 0, time.Time{} }

// wait waits once. It returns false immediately if the wait would exceed the bound, or when ctx ends.
func (b *backOff) wait(ctx context.Context, atLeast time.Duration) bool {
	now := time.Now()
	if b.giveUpAt.IsZero() {
		b.giveUpAt = now.Add(b.limit)
	}
	b.delay = max(b.delay, firstDelay)
	wait := max(atLeast, time.Duration(float64(b.delay)*(0.5+rand.Float64()/2)))
	if b.limit > 0 && now.Add(wait).After(b.giveUpAt) {
		return false
	}
	b.delay = min(b.delay*2, longestDelay)
	return sleep(ctx, wait)
}

// sleep waits; it returns false if ctx ends first.
func sleep(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// outlasts waits as long as a full server asked; it returns false if it did not ask, or if patience has run out.
func outlasts(ctx context.Context, overload *backOff, err error) bool {
	var refused *Error
	if !errors.As(err, &refused) || !refused.full() {
		return false
	}
	return overload.wait(ctx, refused.RetryAfter)
}

// calls makes the calls of penstock.v1 for one client, with deadlines and retries. What is retried, and where:
//
//   - UNAVAILABLE of an idempotent unary call: gRPC itself retries for a few seconds, by the service config. After
//     that, a patient call is retried here until the server is back or Patience.Reconnect is over.
//   - RESOURCE_EXHAUSTED with RetryInfo: retried here after the server's delay, within a bound. The same applies if
//     gRPC itself reports it, without a reason.
//   - A lost stream: its owner (turnRun, Leases) opens it again, because only the owner knows its position.
type calls struct {
	address    string
	patience   Patience
	connection *grpc.ClientConn
	tokens     *tokenSource
	rollout    penstockv1.RolloutServiceClient
	tasks      penstockv1.TaskServiceClient
}

func newCalls(address string, options Options) (*calls, error) {
	tokens, err := newTokenSource(address, options)
	if err != nil {
		return nil, err
	}
	chosen, err := dialOptions(options)
	if err != nil {
		return nil, err
	}
	// Not NewClient, which grpc-go 1.33 lacks; without WithBlock, Dial does the same.
	connection, err := grpc.Dial(address, chosen...)
	if err != nil {
		return nil, err
	}
	return &calls{
		address, options.Patience.orDefault(), connection, tokens,
		penstockv1.NewRolloutServiceClient(connection), penstockv1.NewTaskServiceClient(connection),
	}, nil
}

func (p Patience) orDefault() Patience {
	return Patience{
		orElse(p.Call, defaultPatience.Call),
		orElse(p.Reconnect, defaultPatience.Reconnect),
		orElse(p.Overload, defaultPatience.Overload),
	}
}

func orElse[T comparable](value, otherwise T) T {
	var zero T
	if value == zero {
		return otherwise
	}
	return value
}

func (c *calls) serverInfo(ctx context.Context, wait waiting) (*penstockv1.GetServerInfoResponse, error) {
	return unary(ctx, c, wait, c.rollout.GetServerInfo, &penstockv1.GetServerInfoRequest{})
}

func (c *calls) getTrajectory(
	ctx context.Context, wait waiting, id string,
) (*penstockv1.GetTrajectoryResponse, error) {
	return unary(ctx, c, wait, c.rollout.GetTrajectory, &penstockv1.GetTrajectoryRequest{TrajectoryId: id})
}

// abortTurn stops a trajectory's turn; returns the number of tokens it keeps.
func (c *calls) abortTurn(ctx context.Context, wait waiting, id, reason string) (int, error) {
	selected := &penstockv1.TrajectorySelector{TrajectoryIds: []string{id}}
	answer, err := unary(ctx, c, wait, c.rollout.Abort, &penstockv1.AbortRequest{
		Selector: &penstockv1.AbortRequest_Trajectories{Trajectories: selected}, Reason: reason,
	})
	count := 0
	for _, turn := range answer.GetAbortedTurns() {
		count += int(turn.PolicyTokenCount)
	}
	return count, err
}

func (c *calls) renewLease(
	ctx context.Context, wait waiting, ids []string,
) (*penstockv1.RenewLeaseResponse, error) {
	return unary(ctx, c, wait, c.tasks.RenewLease, &penstockv1.RenewLeaseRequest{TrajectoryIds: ids})
}

// unary makes an idempotent call.
func unary[Q, R any](
	ctx context.Context, c *calls, wait waiting,
	call func(context.Context, *Q, ...grpc.CallOption) (*R, error), request *Q,
) (*R, error) {
	lost, overload := &backOff{limit: c.patience.Reconnect}, &backOff{limit: c.patience.Overload}
	giveUpAt := time.Now().Add(c.patience.Reconnect)
	for {
		timeout := c.patience.Call
		if wait == patient {
			timeout = time.Until(giveUpAt)
		}
		answer, err := once(ctx, c, wait, timeout, call, request)
		if err == nil {
			return answer, nil
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if wait == patient && isCode(err, codes.DeadlineExceeded) {
			message := fmt.Sprintf("no answer from %s for %s", c.address, c.patience.Reconnect)
			return nil, &Error{Code: codes.Unavailable, Message: message, cause: err}
		}
		if wait != impatient && isUnavailable(err) && lost.wait(ctx, 0) {
			continue
		}
		if !outlasts(ctx, overload, err) {
			return nil, err
		}
		// The server answered; a later loss gets a fresh wait.
		giveUpAt = time.Now().Add(c.patience.Reconnect)
		lost.reset()
	}
}

func once[Q, R any](
	ctx context.Context, c *calls, wait waiting, timeout time.Duration,
	call func(context.Context, *Q, ...grpc.CallOption) (*R, error), request *Q,
) (*R, error) {
	limited, err := c.tokens.outgoing(ctx)
	if err != nil {
		return nil, err
	}
	if wait != endless {
		var cancel context.CancelFunc
		limited, cancel = context.WithTimeout(limited, timeout)
		defer cancel()
	}
	answer, err := call(limited, request, grpc.WaitForReady(wait != impatient))
	return answer, fromStatus(ctx, err)
}

// received reads a stream to its end, io.EOF.
type received[R any] interface{ Recv() (*R, error) }

// stream opens a stream and passes each message to take, until take returns false or an error.
func stream[Q, R any, S received[R]](
	ctx context.Context, c *calls, open func(context.Context, *Q, ...grpc.CallOption) (S, error), request *Q,
	take func(*R) (bool, error),
) error {
	open_, cancel := context.WithCancel(ctx)
	defer cancel()
	carrying, err := c.tokens.outgoing(open_)
	if err != nil {
		return err
	}
	messages, err := open(carrying, request)
	if err != nil {
		return fromStatus(ctx, err)
	}
	for {
		message, err := messages.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fromStatus(ctx, err)
		}
		if more, err := take(message); err != nil || !more {
			return err
		}
	}
}
