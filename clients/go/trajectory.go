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

// Aborts of one trajectory's turns, after which its close is refused: somebody goes on taking turns.
const closingAborts = 8

// TurnOption says how to take a turn. What samples holds for this turn and those after it.
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

// Temperature is 1 where it is not given; zero is greedy.
func Temperature(value float32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Temperature = &value })
}

// TopP is 1 where it is not given.
func TopP(value float32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.TopP = &value })
}

// TopK of zero means no limit.
func TopK(value int) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.TopK = int32(value) })
}

// MaxTokens bounds the policy's tokens in one turn, over all its attempts.
func MaxTokens(value int) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.MaxTokens = int32(value) })
}

// StopTokens stop after any of these tokens.
func StopTokens(values ...int32) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.StopTokenIds = values })
}

// StopTexts stop after any of these texts.
func StopTexts(values ...string) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Stop = values })
}

// Seed is a fresh one where it is not given.
func Seed(value int64) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.Seed = &value })
}

// IgnoreEOS goes on after the end-of-sequence token.
func IgnoreEOS(value bool) TurnOption {
	return sampling(func(p *penstockv1.SamplingParams) { p.IgnoreEos = value })
}

// WithTools offers tools; only on the first turn.
func WithTools(tools ...Tool) TurnOption { return func(o *turnOptions) { o.tools = tools } }

// Detach lets the server go on with the turn when the connection is lost.
func Detach() TurnOption { return func(o *turnOptions) { o.stream.Detach = true } }

// FinalOnly has Stream yield one segment per weight version, when the turn ends.
func FinalOnly() TurnOption { return func(o *turnOptions) { o.stream.FinalOnly = true } }

// FlushEvery bounds how long tokens wait on the server.
func FlushEvery(interval time.Duration) TurnOption {
	return func(o *turnOptions) { o.stream.FlushInterval = durationpb.New(interval) }
}

// sampled are the options of a turn, on top of the sampling in force.
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

// TrajectoryOptions say where a trajectory without a lease belongs.
type TrajectoryOptions struct {
	GroupID     string
	GroupSize   int
	SampleIndex int
	// Lower runs earlier.
	Priority int
	// A turn under another version is refused; zero takes any.
	RequiredWeightVersion int64
}

// Trajectory is one episode, made by Client.Trajectory or by a lease; the first turn opens it. It is not for
// several goroutines at a time, but for Abort.
type Trajectory struct {
	TrajectoryID string
	// Turns so far; an aborted one is the last until it is resumed.
	Turns []*Turn
	// Set when its close begins.
	Outcome *Outcome
	// Set when its close was confirmed.
	Closed bool
	// Whether a turn that was aborted from outside, as by a weight update, goes on by itself.
	ResumeAborted bool

	calls    *calls
	task     *Task
	parent   string
	options  TrajectoryOptions
	sampling *penstockv1.SamplingParams
	chat     bool
	progress *turnProgress
	branches []*Trajectory
	// Told when a close begins, and when it was confirmed.
	onClose func(confirmed bool)
}

// LastTurn is the last turn; nil before the first.
func (t *Trajectory) LastTurn() *Turn {
	if len(t.Turns) == 0 {
		return nil
	}
	return t.Turns[len(t.Turns)-1]
}

// Turn takes one turn: trajectory.Turn(ctx, penstock.Text("What is 2 + 3?"), penstock.MaxTokens(16)). It begins
// with the task's prompt where shown is nil. After the end of ctx it can be resumed.
func (t *Trajectory) Turn(ctx context.Context, shown Observation, options ...TurnOption) (*Turn, error) {
	for _, err := range t.Stream(ctx, shown, append(options, FinalOnly())...) {
		if err != nil {
			return nil, err
		}
	}
	return t.LastTurn(), nil
}

// Stream takes one turn and yields its tokens as they come; LastTurn is the turn afterwards.
//
// Until then they are provisional: where the server was lost and came back with less than it had streamed, a
// segment whose Position is before the end of the last one takes the place of what followed there. Leaving the
// loop early aborts the turn.
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

// Resume goes on with an aborted or broken-off turn, at the exact token; returns the whole turn.
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

// Abort stops the turn in flight; returns the tokens it keeps. Nothing in flight: zero.
func (t *Trajectory) Abort(ctx context.Context, reason string) (int, error) {
	return t.calls.abortTurn(ctx, impatient, t.TrajectoryID, reason)
}

// Fail closes it as failed: the server has the attempt made again, up to a bound.
func (t *Trajectory) Fail(ctx context.Context, reason, message string) (Closed, error) {
	return t.Complete(ctx, Outcome{Failure: &Failed{reason, message}})
}

// Complete closes it, and its branches; durable when answered. Their turns that are still in flight are aborted
// first.
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

// Get returns the trajectory as the server holds it, context included.
func (t *Trajectory) Get(ctx context.Context) (*TrajectoryRecord, error) {
	held, err := t.calls.getTrajectory(ctx, patient, t.TrajectoryID)
	if err != nil {
		return nil, err
	}
	return readTrajectory(held)
}

// Branch is a trajectory of the same attempt, such as a sub-agent's; it is closed with this one.
func (t *Trajectory) Branch(trajectoryID string) *Trajectory {
	branch := &Trajectory{
		TrajectoryID: trajectoryID, calls: t.calls, parent: t.TrajectoryID, ResumeAborted: t.ResumeAborted,
	}
	t.branches = append(t.branches, branch)
	return branch
}

// abortUnfinished: the server closes nothing of which a turn is in flight.
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

// complete sends its close. A request for a turn may have been on its way when its abort overtook it.
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

// take runs a turn and notes what became of it, however it ends.
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
		// The server never began it.
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
		// A lease and a parent each say themselves which group it is.
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
