package penstock

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	penstockv1 "penstock/v1"
)

// Number of aborts of a trajectory's turns after which its close is refused: another caller keeps taking turns.
const closingAborts = 8

// TurnOption says how to take a turn. Sampling options apply to this turn and all later ones.
type TurnOption func(*turnOptions)

type turnOptions struct {
	sampling   *penstockv1.SamplingParams
	overridden bool
	tools      []Tool
	stream     *penstockv1.StreamOptions
}

func sampling(set func(*penstockv1.SamplingParams)) TurnOption {
	return func(o *turnOptions) { set(o.sampling); o.overridden = true }
}

// Temperature defaults to 1; zero means greedy.
func Temperature(value float32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Temperature = &value })
}

// TopP defaults to 1.
func TopP(value float32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.TopP = &value })
}

// TopK of zero means no limit.
func TopK(value int) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.TopK = int32(value) })
}

// MaxTokens limits the policy's tokens in one turn, including its resumed parts.
func MaxTokens(value int) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.MaxTokens = int32(value) })
}

// StopTokens end a turn after any of these tokens.
func StopTokens(values ...int32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.StopTokenIds = values })
}

// StopTexts end a turn after any of these texts.
func StopTexts(values ...string) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Stop = values })
}

// Seed defaults to a random one.
func Seed(value int64) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Seed = &value })
}

// IgnoreEOS continues after the end-of-sequence token.
func IgnoreEOS(value bool) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.IgnoreEos = value })
}

// WithTools offers tools to the policy; only on the first turn.
func WithTools(tools ...Tool) TurnOption { return func(o *turnOptions) { o.tools = tools } }

// Detach lets the server continue the turn when the connection is lost.
func Detach() TurnOption { return func(o *turnOptions) { o.stream.Detach = true } }

// FinalOnly makes Stream yield only whole segments, one per weight version, when the turn ends.
func FinalOnly() TurnOption { return func(o *turnOptions) { o.stream.FinalOnly = true } }

// FlushEvery limits how long tokens wait on the server.
func FlushEvery(interval time.Duration) TurnOption {
	return func(o *turnOptions) { o.stream.FlushInterval = durationpb.New(interval) }
}

// sampled applies a turn's options to the sampling parameters in force.
func sampled(inForce *penstockv1.SamplingParams, options []TurnOption) *turnOptions {
	chosen := &turnOptions{sampling: &penstockv1.SamplingParams{}, stream: &penstockv1.StreamOptions{}}
	if inForce != nil {
		chosen.sampling = proto.Clone(inForce).(*penstockv1.SamplingParams)
	}
	for _, option := range options {
		option(chosen)
	}
	return chosen
}

// TrajectoryOptions say what a trajectory without a lease belongs to.
type TrajectoryOptions struct {
	GroupID     string
	GroupSize   int
	SampleIndex int
	// Lower values run earlier.
	Priority int
	// The server refuses a turn under another version; zero accepts any.
	RequiredWeightVersion int64
}

// Trajectory is one episode, made by Client.Trajectory or by a lease; its first turn opens it. It must not be used by
// several goroutines at a time, except for Abort.
type Trajectory struct {
	TrajectoryID string
	// Turns so far; an aborted turn is the last until it is resumed.
	Turns []*Turn
	// Set when its close begins.
	Outcome *Outcome
	// Set when its close was confirmed.
	Closed bool
	// Whether a turn that was aborted from outside, such as by a weight update, resumes automatically.
	ResumeAborted bool

	calls    *calls
	task     *Task
	parent   string
	options  TrajectoryOptions
	sampling *penstockv1.SamplingParams
	chat     bool
	progress *turnProgress
	branches []*Trajectory
	// Called when a close begins, and when it was confirmed.
	onClose func(confirmed bool)
}

// LastTurn returns the last turn; nil before the first.
func (t *Trajectory) LastTurn() *Turn {
	if len(t.Turns) == 0 {
		return nil
	}
	return t.Turns[len(t.Turns)-1]
}

// Turn takes one turn: trajectory.Turn(ctx, penstock.Text("What is 2 + 3?"), penstock.MaxTokens(16)). With a nil
// observation it begins with the task's prompt. If ctx ends, the turn can be resumed.
func (t *Trajectory) Turn(ctx context.Context, shown Observation, options ...TurnOption) (*Turn, error) {
	for _, err := range t.Stream(ctx, shown, append(options, FinalOnly())...) {
		if err != nil {
			return nil, err
		}
	}
	return t.LastTurn(), nil
}

// Stream takes one turn and yields its tokens as they arrive; afterwards LastTurn is the turn.
//
// Until then the tokens are provisional. If the server was lost and came back with fewer tokens than it had streamed,
// a segment may have a Position before the end of the last one; it replaces everything from there. Leaving the loop
// early aborts the turn.
func (t *Trajectory) Stream(ctx context.Context, shown Observation, options ...TurnOption) iter.Seq2[Segment, error] {
	return func(yield func(Segment, error) bool) {
		if t.progress != nil {
			yield(Segment{}, fmt.Errorf("a turn of %s is not finished: resume or abort it", t.TrajectoryID))
			return
		}
		chosen := sampled(t.sampling, options)
		request, err := t.writeTurn(shown, chosen)
		if err != nil {
			yield(Segment{}, err)
			return
		}
		t.progress = &turnProgress{index: len(t.Turns), request: request}
		t.take(ctx, true, chosen.stream, yield)
	}
}

// Resume continues an aborted or interrupted turn, at the exact token; returns the whole turn.
func (t *Trajectory) Resume(ctx context.Context) (*Turn, error) {
	stream := &penstockv1.StreamOptions{FinalOnly: true}
	known := t.progress == nil
	if known {
		turn := t.LastTurn()
		if turn == nil || !turn.Aborted() {
			return nil, fmt.Errorf("no turn of %s is aborted", t.TrajectoryID)
		}
		t.Turns = t.Turns[:len(t.Turns)-1]
		t.progress = &turnProgress{
			index: turn.Index, request: t.resumption(stream), started: true, segments: turn.Segments,
			tokenCount: countOf(turn.Segments), contextTokenCount: turn.ContextTokenCount,
		}
	}
	var failed error
	t.take(ctx, known, stream, func(_ Segment, err error) bool {
		failed = err
		return err == nil
	})
	if failed != nil {
		return nil, failed
	}
	return t.LastTurn(), nil
}

// Abort stops the turn in flight; returns the number of tokens it keeps, zero if no turn is in flight.
func (t *Trajectory) Abort(ctx context.Context, reason string) (int, error) {
	return t.calls.abortTurn(ctx, impatient, t.TrajectoryID, reason)
}

// Fail closes the trajectory as failed; the server repeats the attempt, up to a bound.
func (t *Trajectory) Fail(ctx context.Context, reason, message string) (Closed, error) {
	return t.Complete(ctx, Outcome{Failure: &Failed{reason, message}})
}

// Complete closes the trajectory and its branches; once it returns, the outcome is durable. It first aborts turns that
// are still in flight.
func (t *Trajectory) Complete(ctx context.Context, outcome Outcome) (Closed, error) {
	written, err := writeOutcome(outcome)
	if err != nil {
		return Closed{}, err
	}
	t.Outcome = &outcome
	if t.onClose != nil {
		t.onClose(false)
	}
	if err := t.abortUnfinished(ctx); err != nil {
		return Closed{}, err
	}
	request := &penstockv1.CompleteTrajectoryRequest{TrajectoryId: t.TrajectoryID, Outcome: written}
	answer, err := t.complete(ctx, request)
	if err != nil {
		return Closed{}, err
	}
	t.Closed = true
	if t.onClose != nil {
		t.onClose(true)
	}
	return Closed{answer.GroupCompleted, answer.Retried}, nil
}

// Get returns the trajectory as the server holds it, including context.
func (t *Trajectory) Get(ctx context.Context) (*TrajectoryRecord, error) {
	held, err := t.calls.getTrajectory(ctx, patient, t.TrajectoryID)
	if err != nil {
		return nil, err
	}
	return readTrajectory(held)
}

// Branch makes a trajectory of the same attempt, for example for a sub-agent; it is closed with this one.
func (t *Trajectory) Branch(trajectoryID string) *Trajectory {
	branch := &Trajectory{
		TrajectoryID: trajectoryID, calls: t.calls, parent: t.TrajectoryID, ResumeAborted: t.ResumeAborted,
	}
	t.branches = append(t.branches, branch)
	return branch
}

// abortUnfinished aborts turns in flight, because the server refuses to close a trajectory with one.
func (t *Trajectory) abortUnfinished(ctx context.Context) error {
	for _, branch := range t.branches {
		if err := branch.abortUnfinished(ctx); err != nil {
			return err
		}
	}
	if t.progress == nil {
		return nil
	}
	return t.abortClosing(ctx, t.TrajectoryID)
}

// complete sends the close. The abort may have overtaken a turn's request, which then arrives after it.
func (t *Trajectory) complete(
	ctx context.Context, request *penstockv1.CompleteTrajectoryRequest,
) (*penstockv1.CompleteTrajectoryResponse, error) {
	aborted := map[string]int{}
	for {
		answer, err := unary(ctx, t.calls, patient, t.calls.tasks.CompleteTrajectory, request)
		var refused *Error
		if !errors.As(err, &refused) || refused.Reason != "TURN_IN_FLIGHT" {
			return answer, err
		}
		busy := orElse(refused.Metadata["trajectory_id"], t.TrajectoryID)
		if aborted[busy] == closingAborts {
			return nil, err
		}
		aborted[busy]++
		if err := t.abortClosing(ctx, busy); err != nil {
			return nil, err
		}
	}
}

func (t *Trajectory) abortClosing(ctx context.Context, trajectoryID string) error {
	_, err := t.calls.abortTurn(ctx, patient, trajectoryID, "closing")
	if isCode(err, codes.NotFound) {
		return nil
	}
	return err
}

// take runs a turn and records its result, however it ends.
func (t *Trajectory) take(
	ctx context.Context, known bool, stream *penstockv1.StreamOptions, yield func(Segment, error) bool,
) {
	progress := t.progress
	before := 0
	for _, turn := range t.Turns {
		before += countOf(turn.Segments)
	}
	run := &turnRun{
		calls: t.calls, trajectoryID: t.TrajectoryID, progress: progress, resume: t.resumption(stream),
		resumeAborted: t.ResumeAborted, leased: t.task != nil, policyCountBefore: before,
		yield: func(segment Segment) bool { return yield(segment, nil) },
	}
	err := run.run(ctx, known)
	if progress.finished != nil {
		t.Turns = append(t.Turns, progress.finished)
		t.progress = nil
	}
	var refused *Error
	if errors.As(err, &refused) && !progress.started && !refused.Unavailable() &&
		refused.Code != codes.DeadlineExceeded {
		// The server never started it.
		t.progress = nil
	}
	if err != nil && !errors.Is(err, errStopped) {
		yield(Segment{}, err)
	}
}

func (t *Trajectory) resumption(stream *penstockv1.StreamOptions) turnRequest {
	return turnRequest{continue_: &penstockv1.ContinueRequest{TrajectoryId: t.TrajectoryID, StreamOptions: stream}}
}

func (t *Trajectory) writeTurn(shown Observation, chosen *turnOptions) (turnRequest, error) {
	first := len(t.Turns) == 0
	if !first && shown == nil {
		return turnRequest{}, errors.New("a later turn needs an observation; an aborted one is resumed")
	}
	written, err := writePrompt(shown, chosen.tools, t.chat && !first)
	if err != nil {
		return turnRequest{}, err
	}
	if first && (written != prompt{}) {
		t.chat = written.conversation != nil
	}
	t.sampling = chosen.sampling
	if first {
		return turnRequest{generate: t.generateRequest(written, chosen)}, nil
	}
	request := &penstockv1.ContinueRequest{TrajectoryId: t.TrajectoryID, StreamOptions: chosen.stream}
	if chosen.overridden {
		request.SamplingParams = chosen.sampling
	}
	switch {
	case written.text != nil:
		request.Observation = &penstockv1.ContinueRequest_Text{Text: *written.text}
	case written.tokens != nil:
		request.Observation = &penstockv1.ContinueRequest_Tokens{Tokens: written.tokens}
	case written.conversation != nil:
		request.Observation = &penstockv1.ContinueRequest_Conversation{Conversation: written.conversation}
	}
	return turnRequest{continue_: request}, nil
}

func (t *Trajectory) generateRequest(written prompt, chosen *turnOptions) *penstockv1.GenerateRequest {
	request := &penstockv1.GenerateRequest{
		TrajectoryId: t.TrajectoryID, SamplingParams: chosen.sampling, StreamOptions: chosen.stream,
		Priority: int32(t.options.Priority), RequiredWeightVersion: t.options.RequiredWeightVersion,
		ParentTrajectoryId: t.parent,
	}
	if t.task == nil && t.parent == "" {
		// A lease or a parent determines the group itself.
		request.GroupId, request.GroupSize = t.options.GroupID, int32(t.options.GroupSize)
		request.SampleIndex = int32(t.options.SampleIndex)
	}
	switch {
	case written.text != nil:
		request.Prompt = &penstockv1.GenerateRequest_Text{Text: *written.text}
	case written.tokens != nil:
		request.Prompt = &penstockv1.GenerateRequest_Tokens{Tokens: written.tokens}
	case written.conversation != nil:
		request.Prompt = &penstockv1.GenerateRequest_Conversation{Conversation: written.conversation}
	}
	return request
}
