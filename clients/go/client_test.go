// Tests of the client against a server that tests/system/test_client_packages.py starts: PENSTOCK_TEST_ADDRESS and, with TLS
// and tokens, PENSTOCK_TEST_SECURE_ADDRESS, PENSTOCK_TEST_CA, PENSTOCK_TEST_TOKEN_FILE. Its leases last one second, and
// each token takes a few milliseconds.
package penstock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"penstock"
)

func environment(t *testing.T, name string) string {
	t.Helper()
	value := os.Getenv("PENSTOCK_TEST_" + name)
	if value == "" {
		t.Fatalf("PENSTOCK_TEST_%s is not set: run `make clients`", name)
	}
	return value
}

func connect(t *testing.T, address string, options penstock.Options) *penstock.Client {
	t.Helper()
	client, err := penstock.Connect(address, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// try runs an agent on one task; returns the outcome that the server got. It closes leftovers of earlier workers.
func try(t *testing.T, options penstock.WorkOptions, agent penstock.Agent) *penstock.Outcome {
	t.Helper()
	client := connect(t, environment(t, "ADDRESS"), penstock.Options{})
	sampling := []penstock.TurnOption{penstock.MaxTokens(4)}
	task := penstock.Task{TaskID: t.Name(), Prompt: penstock.Text("A task."), Sampling: sampling}
	if _, err := client.SubmitTasks(context.Background(), task); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var told *penstock.Outcome
	options.Concurrency = 1
	options.Ended = func(attempt *penstock.Attempt) {
		if attempt.Task.TaskID == task.TaskID && attempt.Closed && told == nil {
			told = attempt.Outcome
			stop()
		}
	}
	_, err := client.Work(context.WithValue(ctx, stopKey{}, stop), options, func(
		ctx context.Context, attempt *penstock.Attempt,
	) (penstock.Outcome, error) {
		if attempt.Task.TaskID != task.TaskID || told != nil {
			return penstock.Reward(0), nil
		}
		return agent(ctx, attempt)
	})
	if err != nil || told == nil {
		t.Fatalf("the attempt was not closed: %v", err)
	}
	return told
}

type stopKey struct{}

func refusedWith(t *testing.T, err error, code codes.Code, reason string) *penstock.Error {
	t.Helper()
	var refused *penstock.Error
	if !errors.As(err, &refused) || refused.Code != code || refused.Reason != reason {
		t.Fatalf("%v is not %s / %s", err, code, reason)
	}
	return refused
}

func TestARefusalSaysWhichOfWhatAndHow(t *testing.T) {
	client := connect(t, environment(t, "ADDRESS"), penstock.Options{})
	_, err := client.GetTrajectory(context.Background(), "nobody")
	refused := refusedWith(t, err, codes.NotFound, "TRAJECTORY_UNKNOWN")
	if refused.Metadata["trajectory_id"] != "nobody" {
		t.Fatal(refused.Metadata)
	}
}

func TestARequestThatIsWrongLeavesNothingBehind(t *testing.T) {
	ctx := context.Background()
	trajectory := connect(t, environment(t, "ADDRESS"), penstock.Options{}).Trajectory("", penstock.TrajectoryOptions{})
	_, err := trajectory.Turn(ctx, penstock.Text(strings.Repeat("x", 600)))
	refusedWith(t, err, codes.InvalidArgument, "PROMPT_TOO_LONG")
	turn, err := trajectory.Turn(ctx, penstock.Text("x"), penstock.MaxTokens(3), penstock.IgnoreEOS(true))
	if err != nil || turn.Index != 0 || len(turn.Segments[0].TokenIDs) != 3 {
		t.Fatal(turn, err)
	}
}

func TestTokensComeAsTheyAreSampled(t *testing.T) {
	ctx := context.Background()
	trajectory := connect(t, environment(t, "ADDRESS"), penstock.Options{}).Trajectory("", penstock.TrajectoryOptions{})
	shown := penstock.Tokens{1, 2, 299}
	position := 0
	for segment, err := range trajectory.Stream(ctx, shown, penstock.MaxTokens(40), penstock.IgnoreEOS(true),
		penstock.FlushEvery(time.Millisecond), penstock.Seed(1<<62)) {
		if err != nil || segment.Position != position || len(segment.Logprobs) != len(segment.TokenIDs) {
			t.Fatal(segment, err)
		}
		position += len(segment.TokenIDs)
	}
	held, err := trajectory.Get(ctx)
	if err != nil || position != 40 || held.FinishReason != penstock.Length {
		t.Fatal(held, err, position)
	}
	if !slices.Equal(held.Segments[0].TokenIDs, shown) ||
		!slices.Equal(held.Segments[1].TokenIDs, trajectory.LastTurn().Segments[0].TokenIDs) {
		t.Fatal(held)
	}
}

func TestATurnThatWasCancelledGoesOnAtTheExactToken(t *testing.T) {
	client := connect(t, environment(t, "ADDRESS"), penstock.Options{})
	trajectory := client.Trajectory("", penstock.TrajectoryOptions{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	options := []penstock.TurnOption{penstock.MaxTokens(200), penstock.IgnoreEOS(true)}
	var failed error
	for _, err := range trajectory.Stream(ctx, penstock.Text("x"), append(options, penstock.FlushEvery(time.Millisecond))...) {
		cancel()
		failed = err
	}
	if !errors.Is(failed, context.Canceled) {
		t.Fatal(failed)
	}
	if _, err := trajectory.Turn(context.Background(), penstock.Text("y")); err == nil {
		t.Fatal("a turn began while another is not finished")
	}
	turn, err := trajectory.Resume(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	whole, err := client.Trajectory("", penstock.TrajectoryOptions{}).Turn(context.Background(), penstock.Text("x"), options...)
	if err != nil || !slices.Equal(turn.Segments[0].TokenIDs, whole.Segments[0].TokenIDs) || len(turn.Segments) != 1 {
		t.Fatal(turn, whole, err)
	}
}

func TestALeaseIsKeptWhileItsAgentWorksWithoutTheServer(t *testing.T) {
	outcome := try(t, penstock.WorkOptions{}, func(
		ctx context.Context, attempt *penstock.Attempt,
	) (penstock.Outcome, error) {
		_, err := attempt.Turn(ctx, nil)
		time.Sleep(2500 * time.Millisecond)
		return penstock.Reward(0.5), errors.Join(err, context.Cause(ctx))
	})
	if outcome.Failure != nil || outcome.Reward != 0.5 {
		t.Fatal(outcome)
	}
}

func TestAnAttemptIsItsAgentsOwnToClose(t *testing.T) {
	outcome := try(t, penstock.WorkOptions{}, func(
		ctx context.Context, attempt *penstock.Attempt,
	) (penstock.Outcome, error) {
		_, err := attempt.Turn(ctx, nil)
		if err == nil {
			_, err = attempt.Complete(ctx, penstock.Reward(0.25))
		}
		return penstock.Reward(1), err
	})
	if outcome.Reward != 0.25 {
		t.Fatal(outcome)
	}
}

func TestWhatAnAgentReturnsAsAnErrorIsItsAttemptsFailure(t *testing.T) {
	for reason, result := range map[string]func() (penstock.Outcome, error){
		"AGENT_ERROR":     func() (penstock.Outcome, error) { return penstock.Outcome{}, errors.New("it broke") },
		"NO_SANDBOX":      func() (penstock.Outcome, error) { return penstock.Outcome{}, &penstock.Failed{Reason: "NO_SANDBOX"} },
		"OUTCOME_INVALID": func() (penstock.Outcome, error) { return penstock.Reward(math.NaN()), nil },
		"PANIC":           func() (penstock.Outcome, error) { panic("it did") },
	} {
		t.Run(reason, func(t *testing.T) {
			outcome := try(t, penstock.WorkOptions{}, func(context.Context, *penstock.Attempt) (penstock.Outcome, error) {
				return result()
			})
			if outcome.Failure == nil || outcome.Failure.Reason != reason {
				t.Fatal(outcome)
			}
		})
	}
}

func TestAFailureIsToldInAsManyCharactersAsAServerTakes(t *testing.T) {
	ctx := context.Background()
	trajectory := connect(t, environment(t, "ADDRESS"), penstock.Options{}).Trajectory("", penstock.TrajectoryOptions{})
	if _, err := trajectory.Turn(ctx, penstock.Text("x"), penstock.MaxTokens(2)); err != nil {
		t.Fatal(err)
	}
	if _, err := trajectory.Fail(ctx, strings.Repeat("é", 300), "cut \xc3"); err != nil {
		t.Fatal(err)
	}
	held, err := trajectory.Get(ctx)
	if err != nil || held.Outcome == nil || held.Outcome.Failure == nil {
		t.Fatal(held, err)
	}
	if told := held.Outcome.Failure; told.Reason != strings.Repeat("é", 256) || told.Message != "cut \ufffd" {
		t.Fatal(told)
	}
}

func TestACloseAbortsATurnOfWhichItDoesNotKnow(t *testing.T) {
	ctx := context.Background()
	client := connect(t, environment(t, "ADDRESS"), penstock.Options{})
	trajectory := client.Trajectory("", penstock.TrajectoryOptions{})
	begun, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		first := sync.OnceFunc(func() { close(begun) })
		for _, err := range trajectory.Stream(ctx, penstock.Text("x"), penstock.MaxTokens(400),
			penstock.IgnoreEOS(true), penstock.FlushEvery(time.Millisecond)) {
			if err != nil {
				ended <- err
				return
			}
			first()
		}
		ended <- nil
	}()
	<-begun
	other := client.Trajectory(trajectory.TrajectoryID, penstock.TrajectoryOptions{})
	if _, err := other.Complete(ctx, penstock.Reward(1)); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil || !trajectory.LastTurn().Aborted() {
		t.Fatal(err, trajectory.LastTurn())
	}
}

func TestAnAttemptHasItsTime(t *testing.T) {
	options := penstock.WorkOptions{AttemptTime: 300 * time.Millisecond}
	outcome := try(t, options, func(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
		_, err := attempt.Turn(ctx, nil, penstock.MaxTokens(400), penstock.IgnoreEOS(true))
		return penstock.Reward(1), err
	})
	if outcome.Failure == nil || outcome.Failure.Reason != "ATTEMPT_TIMEOUT" {
		t.Fatal(outcome)
	}
}

func TestTheServersLimitIsTheLeasesAlsoForAnAgentThatReactsToNothing(t *testing.T) {
	var left time.Duration
	options := penstock.WorkOptions{AttemptTime: 300 * time.Millisecond}
	outcome := try(t, options, func(_ context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
		left = time.Until(attempt.EndsAt)
		select {}
	})
	if outcome.Failure == nil || outcome.Failure.Reason != "ATTEMPT_TIMEOUT" {
		t.Fatal(outcome)
	}
	if left > time.Hour || left < 58*time.Minute {
		t.Fatal(left)
	}
}

func TestAWorkerThatIsStoppedGivesBackWhatRuns(t *testing.T) {
	options := penstock.WorkOptions{Drain: 50 * time.Millisecond}
	outcome := try(t, options, func(ctx context.Context, _ *penstock.Attempt) (penstock.Outcome, error) {
		ctx.Value(stopKey{}).(context.CancelFunc)()
		<-ctx.Done()
		return penstock.Outcome{}, fmt.Errorf("ended: %w", ctx.Err())
	})
	if outcome.Failure == nil || outcome.Failure.Reason != "WORKER_STOPPED" {
		t.Fatal(outcome)
	}
}

func TestAServerThatIsNotThereIsUnavailable(t *testing.T) {
	client := connect(t, "127.0.0.1:1", penstock.Options{Patience: penstock.Patience{Call: 2 * time.Second}})
	_, err := client.ServerInfo(context.Background())
	var refused *penstock.Error
	if !errors.As(err, &refused) || !refused.Unavailable() && refused.Code != codes.DeadlineExceeded {
		t.Fatal(err)
	}
}

func TestWhoCallsIsShownOverTLSAndToNobodyInPlaintext(t *testing.T) {
	address := environment(t, "SECURE_ADDRESS")
	trusting, err := penstock.LoadTLS(environment(t, "CA"), "", "")
	if err != nil {
		t.Fatal(err)
	}
	_, err = connect(t, address, penstock.Options{TLS: trusting}).ServerInfo(context.Background())
	refusedWith(t, err, codes.Unauthenticated, "TOKEN_MISSING")
	agent := connect(t, address, penstock.Options{TLS: trusting, TokenFile: environment(t, "TOKEN_FILE")})
	if info, err := agent.ServerInfo(context.Background()); err != nil || info.VocabSize != 300 {
		t.Fatal(info, err)
	}
	turn, err := agent.Trajectory("", penstock.TrajectoryOptions{}).Turn(
		context.Background(), penstock.Text("x"), penstock.MaxTokens(2), penstock.IgnoreEOS(true))
	if err != nil || len(turn.Segments[0].TokenIDs) != 2 {
		t.Fatal(turn, err)
	}
	if _, err := penstock.Connect("example.org:1", penstock.Options{Token: "secret"}); err == nil {
		t.Fatal("a token would go out in plaintext")
	}
	if _, err := penstock.Connect(address, penstock.Options{TLS: trusting, Token: "two words"}); err == nil {
		t.Fatal("a token of two words was taken")
	}
}
