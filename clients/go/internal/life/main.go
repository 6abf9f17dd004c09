// The agent of tests/system/test_languages.py: life ADDRESS ATTEMPTS. The task's metadata names what it does with an attempt.
// tests/support/life.py and clients/typescript/test/life.ts make exactly the same calls.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"penstock"
)

var agents = map[string]penstock.Agent{
	"text": text, "conversation": conversation, "chat": chat, "aborted": aborted,
	"malformed": malformed, "lost": lost, "failure": failure,
}

func text(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	first, err := attempt.Turn(ctx, nil, penstock.MaxTokens(12))
	if err != nil {
		return penstock.Outcome{}, err
	}
	more := penstock.Text(fmt.Sprintf(" and %d more", len(first.Text)))
	second, err := attempt.Turn(ctx, more, penstock.MaxTokens(8), penstock.Temperature(0.5))
	if err != nil {
		return penstock.Outcome{}, err
	}
	reward := float64(len(first.Text)+len(second.Text)) / 8
	return penstock.Outcome{Reward: reward, TurnRewards: []float64{0.25, 0.75}}, nil
}

func conversation(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	parameters := map[string]any{"type": "object", "required": []any{"a", "b"}}
	add := penstock.WithTools(penstock.Tool{Name: "add", Description: "Adds.", Parameters: parameters})
	asked := penstock.Messages{{Role: "user", Content: "What is 2 + 3?"}}
	_, err := attempt.Turn(ctx, asked, penstock.MaxTokens(10), add)
	if err != nil {
		return penstock.Outcome{}, err
	}
	answer := penstock.Messages{{Role: "tool", Content: `{"sum": 5}`, ToolCallID: "call-1"}}
	if _, err = attempt.Turn(ctx, answer); err != nil {
		return penstock.Outcome{}, err
	}
	_, err = attempt.Turn(ctx, penstock.Text("Is that so?"))
	return judged(len(attempt.Turns)), err
}

func chat(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	asked := penstock.Messages{{Role: "system", Content: "Be brief."}, {Role: "user", Content: "What is 2 + 3?"}}
	if _, err := attempt.Turn(ctx, asked, penstock.MaxTokens(10)); err != nil {
		return penstock.Outcome{}, err
	}
	_, err := attempt.Turn(ctx, penstock.Text("Is that so?"))
	return judged(len(attempt.Turns)), err
}

func aborted(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	// A worker's trajectories resume automatically; here the agent resumes them.
	attempt.ResumeAborted = false
	tokens := attempt.Stream(ctx, nil, penstock.MaxTokens(24), penstock.FlushEvery(time.Millisecond))
	for segment, err := range tokens {
		if err == nil && segment.Position == 0 {
			_, err = attempt.Abort(ctx, "the test asks for it")
		}
		if err != nil {
			return penstock.Outcome{}, err
		}
	}
	if !attempt.LastTurn().Aborted() {
		return penstock.Outcome{}, &penstock.Failed{Reason: "NOT_ABORTED"}
	}
	turn, err := attempt.Resume(ctx)
	if err != nil {
		return penstock.Outcome{}, err
	}
	return judged(len(turn.Segments)), nil
}

func malformed(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	add := penstock.Tool{Name: "add", Description: "Adds.", Parameters: map[string]any{"type": "object"}}
	asked := penstock.Messages{{Role: "user", Content: "Add."}}
	turn, err := attempt.Turn(ctx, asked, penstock.MaxTokens(4), penstock.WithTools(add))
	if err != nil {
		return penstock.Outcome{}, err
	}
	return penstock.Outcome{}, &penstock.Failed{Reason: "TOOL_CALL", Message: turn.ToolCallError}
}

func lost(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	_, err := attempt.Turn(ctx, nil, penstock.MaxTokens(24))
	return penstock.Reward(float64(len(attempt.Turns))), err
}

func failure(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	if _, err := attempt.Turn(ctx, nil, penstock.MaxTokens(4)); err != nil {
		return penstock.Outcome{}, err
	}
	return penstock.Outcome{}, &penstock.Failed{Reason: "TOOL_TIMEOUT", Message: "the sandbox was silent"}
}

func judged(count int) penstock.Outcome {
	return penstock.Outcome{
		Reward:  float64(count) / 4,
		Metrics: map[string]float64{"turns": float64(count), "half": 0.5},
		Metadata: map[string]any{
			"note": "é", "list": []any{1, true, nil, "two"},
			"nested": map[string]any{"deep": map[string]any{"number": 1.5}},
		},
	}
}

func main() {
	attempts, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	client, err := penstock.Connect(os.Args[1], penstock.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	options := penstock.WorkOptions{Attempts: attempts, LeaseOptions: penstock.LeaseOptions{Concurrency: 1}}
	statistics, err := client.Work(context.Background(), options, func(
		ctx context.Context, attempt *penstock.Attempt,
	) (penstock.Outcome, error) {
		return agents[attempt.Task.Metadata["agent"].(string)](ctx, attempt)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%+v\n", statistics)
}
