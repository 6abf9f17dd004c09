package penstock

import (
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"

	penstockv1 "penstock/v1"
)

// FinishReason is why generation stopped.
type FinishReason string

const (
	// Stop is a stop token or stop text.
	Stop FinishReason = "stop"
	// Length: the budget or the context ran out.
	Length FinishReason = "length"
	// Aborted: stopped from outside; Resume goes on at the exact token.
	Aborted FinishReason = "aborted"
)

var finishReasons = map[penstockv1.FinishReason]FinishReason{
	penstockv1.FinishReason_FINISH_REASON_STOP:    Stop,
	penstockv1.FinishReason_FINISH_REASON_LENGTH:  Length,
	penstockv1.FinishReason_FINISH_REASON_ABORTED: Aborted,
}

// Segment is a run of tokens with one author and, for the policy, one weight version.
type Segment struct {
	TokenIDs []int32
	// Of each token under the distribution it was sampled from; empty for context.
	Logprobs []float32
	// Weights that sampled the tokens; zero for context.
	WeightVersion int64
	// From zero.
	TurnIndex int
	// Temperature the tokens were sampled at; zero for context.
	Temperature float32
	// Whether the policy wrote them, or the environment did.
	FromPolicy bool
	// Of one that Stream yields: tokens of the turn before it.
	Position int
}

// Turn is one turn of the policy, over all its attempts.
type Turn struct {
	// From zero.
	Index int
	// The policy's tokens, one segment per weight version.
	Segments     []Segment
	FinishReason FinishReason
	// What the policy wrote; empty where the trajectory was opened with tokens.
	Text string
	// The same with tool calls, where the trajectory was opened with messages.
	Message *Message
	// Tokens the policy saw before it wrote.
	ContextTokenCount int
	// Those of them that the engine took from its cache.
	CachedTokenCount int
	// Why what begins as a tool call is none, for the policy to be told: its text is in the message's content. Empty
	// where there is no such thing.
	ToolCallError string
}

// Aborted says whether Resume can go on with it.
func (t *Turn) Aborted() bool { return t.FinishReason == Aborted }

// TrajectoryRecord is a trajectory as the server holds it.
type TrajectoryRecord struct {
	TrajectoryID string
	// Context and policy; their tokens, concatenated, are the sequence the model saw.
	Segments []Segment
	// Why the last policy segment stopped; empty while a turn runs.
	FinishReason FinishReason
	TurnCount    int
	// Nil until it is closed.
	Outcome *Outcome
	// Whether it can still be extended.
	Open bool
}

// turnRequest begins a turn, or goes on with one: exactly one is set.
type turnRequest struct {
	generate  *penstockv1.GenerateRequest
	continue_ *penstockv1.ContinueRequest
}

// turnProgress is a turn under way: what has arrived of it so far, over streams and attempts.
type turnProgress struct {
	index int
	// What began it.
	request turnRequest
	// Whether the server is known to have begun it.
	started           bool
	segments          []Segment
	tokenCount        int
	contextTokenCount int
	finished          *Turn
}

// start: the server has begun it.
func (p *turnProgress) start(event *penstockv1.TurnStarted) {
	p.started = true
	// A resumed attempt counts what was written before as context; the turn's own is the first.
	p.contextTokenCount = orElse(p.contextTokenCount, int(event.ContextTokenCount))
}

// add appends tokens that arrived; returns them with their position.
func (p *turnProgress) add(segment Segment) Segment {
	segment.Position = p.tokenCount
	p.segments = append(p.segments, segment)
	p.tokenCount += len(segment.TokenIDs)
	return segment
}

// forget: the server never began it, or does not know that it did: it begins anew.
func (p *turnProgress) forget() {
	p.started, p.segments, p.tokenCount, p.contextTokenCount = false, nil, 0, 0
}

// catchUp: the server has begun it, and what the record holds is the turn so far. Returns what the caller was
// not given yet. What it was given and the record does not have never became durable; then the first segment,
// or the next that arrives, has a position before that.
func (p *turnProgress) catchUp(record *TrajectoryRecord) []Segment {
	p.started = true
	written := policySegments(record, func(turn int) bool { return turn == p.index })
	p.contextTokenCount = orElse(p.contextTokenCount, countOf(record.Segments)-countOf(written))
	known := commonCount(tokensOf(p.segments), tokensOf(written))
	p.segments, p.tokenCount = nil, 0
	var missing []Segment
	for _, segment := range written {
		placed := p.add(segment)
		taken := min(max(0, known-placed.Position), len(placed.TokenIDs))
		if taken < len(placed.TokenIDs) {
			placed.TokenIDs, placed.Logprobs = placed.TokenIDs[taken:], placed.Logprobs[taken:]
			placed.Position += taken
			missing = append(missing, placed)
		}
	}
	return missing
}

// finish ends the turn; an error where tokens are missing.
func (p *turnProgress) finish(event *penstockv1.TurnFinished) error {
	if int(event.PolicyTokenCount) != p.tokenCount {
		message := fmt.Sprintf("%d of %d tokens of a turn arrived", p.tokenCount, event.PolicyTokenCount)
		return &Error{Code: codes.DataLoss, Message: message}
	}
	turn := &Turn{
		Index: p.index, Segments: mergeRuns(p.segments), Text: event.Text,
		FinishReason: orElse(finishReasons[event.FinishReason], Stop), Message: readMessage(event.Message),
		ContextTokenCount: p.contextTokenCount, CachedTokenCount: int(event.CachedTokenCount),
		ToolCallError: event.ToolCallError,
	}
	if turn.Message != nil {
		turn.Text = turn.Message.Content
	}
	p.finished = turn
	return nil
}

// readSegment reads a segment of the wire without a copy; an error where its arrays disagree.
func readSegment(segment *penstockv1.Segment) (Segment, error) {
	read := Segment{
		TokenIDs: segment.GetTokenIds(), Logprobs: segment.GetLogprobs(),
		WeightVersion: segment.GetWeightVersion(), TurnIndex: int(segment.GetTurnIndex()),
		Temperature: segment.GetTemperature(),
		FromPolicy:  segment.GetAuthor() == penstockv1.Author_AUTHOR_POLICY,
	}
	if read.FromPolicy && len(read.TokenIDs) != len(read.Logprobs) {
		message := fmt.Sprintf("%d tokens, %d log-probabilities", len(read.TokenIDs), len(read.Logprobs))
		return read, &Error{Code: codes.DataLoss, Reason: "MALFORMED_MESSAGE", Message: message}
	}
	return read, nil
}

func readTrajectory(held *penstockv1.GetTrajectoryResponse) (*TrajectoryRecord, error) {
	trajectory := held.GetTrajectory()
	record := &TrajectoryRecord{
		TrajectoryID: trajectory.GetTrajectoryId(), FinishReason: finishReasons[trajectory.GetFinishReason()],
		TurnCount: int(trajectory.GetTurnCount()), Outcome: readOutcome(trajectory.GetOutcome()), Open: held.GetOpen(),
	}
	for _, segment := range trajectory.GetSegments() {
		read, err := readSegment(segment)
		if err != nil {
			return nil, err
		}
		record.Segments = append(record.Segments, read)
	}
	return record, nil
}

// policySegments are what the policy wrote in some turns.
func policySegments(record *TrajectoryRecord, in func(turn int) bool) []Segment {
	var written []Segment
	for _, segment := range record.Segments {
		if segment.FromPolicy && in(segment.TurnIndex) {
			written = append(written, segment)
		}
	}
	return written
}

func countOf(segments []Segment) int {
	count := 0
	for _, segment := range segments {
		count += len(segment.TokenIDs)
	}
	return count
}

func tokensOf(segments []Segment) []int32 {
	tokens := make([]int32, 0, countOf(segments))
	for _, segment := range segments {
		tokens = append(tokens, segment.TokenIDs...)
	}
	return tokens
}

func commonCount(first, second []int32) int {
	length := min(len(first), len(second))
	for i := range length {
		if first[i] != second[i] {
			return i
		}
	}
	return length
}

// mergeRuns has one segment per run of equal weight version and temperature.
func mergeRuns(segments []Segment) []Segment {
	var runs []Segment
	for _, segment := range segments {
		if len(runs) > 0 {
			last := &runs[len(runs)-1]
			if last.WeightVersion == segment.WeightVersion && last.Temperature == segment.Temperature {
				last.TokenIDs = append(last.TokenIDs, segment.TokenIDs...)
				last.Logprobs = append(last.Logprobs, segment.Logprobs...)
				continue
			}
		}
		// Of its own, so that what is appended is not written behind what the caller was given.
		segment.TokenIDs, segment.Logprobs = slices.Clip(segment.TokenIDs), slices.Clip(segment.Logprobs)
		runs = append(runs, segment)
	}
	return runs
}
