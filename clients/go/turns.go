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
	// Stop: a stop token or stop text was sampled.
	Stop FinishReason = "stop"
	// Length: the token budget or the context was used up.
	Length FinishReason = "length"
	// Aborted: stopped from outside; Resume goes on at the exact token.
	Aborted FinishReason = "aborted"
)

var finishReasons = map[penstockv1.FinishReason]FinishReason{
	penstockv1.FinishReason_FINISH_REASON_STOP:    Stop,
	penstockv1.FinishReason_FINISH_REASON_LENGTH:  Length,
	penstockv1.FinishReason_FINISH_REASON_ABORTED: Aborted,
}

// Segment is a run of tokens with one author; the policy's also has one weight version.
type Segment struct {
	TokenIDs []int32
	// Log-probability of each token under the distribution it was sampled from; empty for context.
	Logprobs []float32
	// Version of the weights that sampled the tokens; zero for context.
	WeightVersion int64
	// Index of the turn, from zero.
	TurnIndex int
	// Temperature at which the tokens were sampled; zero for context.
	Temperature float32
	// Whether the policy wrote the tokens; otherwise the environment did.
	FromPolicy bool
	// In a segment from Stream: number of the turn's tokens before it.
	Position int
}

// Turn is one turn of the policy, including its resumed parts.
type Turn struct {
	// Index of the turn, from zero.
	Index int
	// The policy's tokens, one segment per weight version.
	Segments     []Segment
	FinishReason FinishReason
	// The policy's text; empty if the trajectory was opened with tokens.
	Text string
	// The same as a message with tool calls, if the trajectory was opened with messages.
	Message *Message
	// Number of tokens the policy saw before it wrote.
	ContextTokenCount int
	// How many of them the engine took from its prefix cache.
	CachedTokenCount int
	// Why text that looks like a tool call is not one; an error message for the policy. The text itself is in the
	// message's content. Empty if there is no such text.
	ToolCallError string
}

// Aborted reports whether Resume can continue the turn.
func (t *Turn) Aborted() bool { return t.FinishReason == Aborted }

// TrajectoryRecord is a trajectory as the server holds it.
type TrajectoryRecord struct {
	TrajectoryID string
	// Segments of context and policy; their tokens, concatenated, are the sequence that the model saw.
	Segments []Segment
	// Why the last policy segment stopped; empty while a turn is in flight.
	FinishReason FinishReason
	TurnCount    int
	// Nil until it is closed.
	Outcome *Outcome
	// Whether it can still be extended.
	Open bool
}

// turnRequest starts or continues a turn; exactly one field is set.
type turnRequest struct {
	generate  *penstockv1.GenerateRequest
	continue_ *penstockv1.ContinueRequest
}

// turnProgress is a turn in flight: what has arrived so far, over several streams and resumptions.
type turnProgress struct {
	index int
	// The request that started it.
	request turnRequest
	// Whether the server is known to have started it.
	started           bool
	segments          []Segment
	tokenCount        int
	contextTokenCount int
	finished          *Turn
}

// start records that the server has started the turn.
func (p *turnProgress) start(event *penstockv1.TurnStarted) {
	p.started = true
	// A resumed turn reports its earlier tokens as context, so only the first report counts.
	p.contextTokenCount = orElse(p.contextTokenCount, int(event.ContextTokenCount))
}

// add appends tokens that arrived; returns them with their position.
func (p *turnProgress) add(segment Segment) Segment {
	segment.Position = p.tokenCount
	p.segments = append(p.segments, segment)
	p.tokenCount += len(segment.TokenIDs)
	return segment
}

// forget resets the turn, which the server never started or does not know: it starts again.
func (p *turnProgress) forget() {
	p.started, p.segments, p.tokenCount, p.contextTokenCount = false, nil, 0, 0
}

// catchUp takes the record's tokens as the turn so far, which the server has started. It returns what the caller has
// not been given yet. Tokens that the caller was given but the record lacks never became durable. In that case, the
// first segment, or the next to arrive, has a position before them.
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

// finish ends the turn; it returns an error if tokens are missing.
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

// readSegment reads a wire segment without copying; it returns an error if its arrays disagree.
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

// policySegments returns what the policy wrote in some turns.
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

// mergeRuns merges neighbouring segments of equal weight version and temperature.
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
		// A separate array, so that appending does not overwrite what the caller was given.
		segment.TokenIDs, segment.Logprobs = slices.Clip(segment.TokenIDs), slices.Clip(segment.Logprobs)
		runs = append(runs, segment)
	}
	return runs
}
