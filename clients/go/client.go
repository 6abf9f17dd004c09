// Package penstock is the client of penstock.v1: sample from a policy, lease tasks, score attempts.
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

// Options are the client's credentials and patience. The zero value means plaintext without authentication.
type Options struct {
	// Encrypts the connection; LoadTLS makes it from PEM files.
	TLS *tls.Config
	// A bearer token.
	Token string
	// A file with a bearer token. It is read for each call, so a replaced token is used from the next call on.
	TokenFile string
	// Zero values mean 30 s, 60 s and 120 s.
	Patience Patience
}

// Client makes an agent's calls to one server. It may be used by several goroutines.
type Client struct{ calls *calls }

// Connect makes a client of the server at address, "host:port". It sends nothing before the first call.
func Connect(address string, options Options) (*Client, error) {
	calls, err := newCalls(address, options)
	if err != nil {
		return nil, err
	}
	return &Client{calls}, nil
}

// Close closes the connection; calls in progress are cancelled.
func (c *Client) Close() error { return c.calls.connection.Close() }

// Work leases attempts and runs agent on each, Concurrency at a time. It returns after Attempts attempts, when ctx
// ends, or with an error if the server refuses to lease.
func (c *Client) Work(ctx context.Context, options WorkOptions, agent Agent) (Statistics, error) {
	return work(ctx, c.calls, options, agent)
}

// LeaseTasks leases attempts; the caller closes them.
func (c *Client) LeaseTasks(options LeaseOptions) *Leases { return newLeases(c.calls, options) }

// Trajectory makes a trajectory without a lease; its first turn opens it. Without a group it is never delivered. An
// empty id is replaced by a random one.
func (c *Client) Trajectory(trajectoryID string, options TrajectoryOptions) *Trajectory {
	if trajectoryID == "" {
		var random [16]byte
		rand.Read(random[:]) // Never fails.
		trajectoryID = hex.EncodeToString(random[:])
	}
	return &Trajectory{TrajectoryID: trajectoryID, calls: c.calls, options: options}
}

// Submission is the result of submitting tasks.
type Submission struct{ Accepted, Duplicates, Pending int }

// SubmitTasks adds tasks; a known id changes nothing. If the queue is full, it waits within a bound.
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

// ServerInfo returns model, versions, limits and load.
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

// Abort stops turns in flight; request selects trajectories, groups, or all turns. It returns once the engine has
// stopped them, with the number of tokens kept of each.
func (c *Client) Abort(ctx context.Context, request *penstockv1.AbortRequest) (map[string]int, error) {
	answer, err := unary(ctx, c.calls, impatient, c.calls.rollout.Abort, request)
	kept := map[string]int{}
	for _, turn := range answer.GetAbortedTurns() {
		kept[turn.TrajectoryId] = int(turn.PolicyTokenCount)
	}
	return kept, err
}
