// Package penstock is the client of penstock.v1: sample from a policy, lease tasks, score what it did.
//
//	client, err := penstock.Connect("127.0.0.1:50051", penstock.Options{})
//	statistics, err := client.Work(ctx, penstock.WorkOptions{}, func(
//		ctx context.Context, attempt *penstock.Attempt,
//	) (penstock.Outcome, error) {
//		turn, err := attempt.Turn(ctx, nil)
//		if err != nil {
//			return penstock.Outcome{}, err
//		}
//		return penstock.Reward(score(attempt.Task, turn.Text)), nil
//	})
package penstock

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"

	penstockv1 "penstock/v1"
)

// Options say whom a client trusts, what it shows, and how long it waits. Without any: plaintext, and nobody is
// asked.
type Options struct {
	// Encrypts the connection; LoadTLS makes one of PEM files.
	TLS *tls.Config
	// A bearer token.
	Token string
	// A file with one, read for each call, so that one that is replaced is used from then on.
	TokenFile string
	// Zeros are 30 s, 60 s and 120 s.
	Patience Patience
}

// Client is everything an agent's process asks of one server. It is for any number of goroutines.
type Client struct{ calls *calls }

// Connect makes a client of the server at address, "host:port"; nothing is sent before the first call.
func Connect(address string, options Options) (*Client, error) {
	calls, err := newCalls(address, options)
	if err != nil {
		return nil, err
	}
	return &Client{calls}, nil
}

// Close closes the connection; calls in flight are cancelled.
func (c *Client) Close() error { return c.calls.connection.Close() }

// Work leases attempts and runs agent on each, Concurrency at a time. It returns after Attempts, at the end of ctx,
// or with the error of a server that refuses to lease.
func (c *Client) Work(ctx context.Context, options WorkOptions, agent Agent) (Statistics, error) {
	return work(ctx, c.calls, options, agent)
}

// LeaseTasks leases attempts, to be closed by the caller.
func (c *Client) LeaseTasks(options LeaseOptions) *Leases { return newLeases(c.calls, options) }

// Trajectory is one without a lease; the first turn opens it. Without a group it is never delivered. An empty id is
// replaced by a fresh one.
func (c *Client) Trajectory(trajectoryID string, options TrajectoryOptions) *Trajectory {
	if trajectoryID == "" {
		var random [16]byte
		rand.Read(random[:]) // It never fails.
		trajectoryID = hex.EncodeToString(random[:])
	}
	return &Trajectory{TrajectoryID: trajectoryID, calls: c.calls, options: options}
}

// Submission is what became of submitted tasks.
type Submission struct{ Accepted, Duplicates, Pending int }

// SubmitTasks adds tasks; a known id changes nothing. It waits, within a bound, for a full queue.
func (c *Client) SubmitTasks(ctx context.Context, tasks ...Task) (Submission, error) {
	request := &penstockv1.SubmitTasksRequest{}
	for _, task := range tasks {
		written, err := writeTask(task)
		if err != nil {
			return Submission{}, err
		}
		request.Tasks = append(request.Tasks, written)
	}
	answer, err := unary(ctx, c.calls, impatient, c.calls.tasks.SubmitTasks, request)
	return Submission{
		int(answer.GetAcceptedCount()), int(answer.GetDuplicateCount()), int(answer.GetPendingCount()),
	}, err
}

// ServerInfo has model, versions, limits and load.
func (c *Client) ServerInfo(ctx context.Context) (*penstockv1.GetServerInfoResponse, error) {
	return c.calls.serverInfo(ctx, impatient)
}

// GetTrajectory returns a trajectory as the server holds it, open or closed.
func (c *Client) GetTrajectory(ctx context.Context, trajectoryID string) (*TrajectoryRecord, error) {
	held, err := c.calls.getTrajectory(ctx, impatient, trajectoryID)
	if err != nil {
		return nil, err
	}
	return readTrajectory(held)
}

// Abort stops turns in flight: request selects trajectories, groups, or all. It returns, once the engine is done
// with them, what is kept of each.
func (c *Client) Abort(ctx context.Context, request *penstockv1.AbortRequest) (map[string]int, error) {
	answer, err := unary(ctx, c.calls, impatient, c.calls.rollout.Abort, request)
	kept := map[string]int{}
	for _, turn := range answer.GetAbortedTurns() {
		kept[turn.TrajectoryId] = int(turn.PolicyTokenCount)
	}
	return kept, err
}
