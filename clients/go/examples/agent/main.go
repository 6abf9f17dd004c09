package main

import (
	"context"
	"log"
	"os"
	"strings"

	"penstock"
)

func agent(ctx context.Context, attempt *penstock.Attempt) (penstock.Outcome, error) {
	answer := attempt.Task.Metadata["answer"].(string)
	turn, err := attempt.Turn(ctx, nil)
	if err == nil && !strings.Contains(turn.Text, answer) {
		turn, err = attempt.Turn(ctx, penstock.Text("Look again: what is it?"))
	}
	if err == nil && strings.Contains(turn.Text, answer) {
		return penstock.Reward(1), nil
	}
	return penstock.Reward(0), err
}

func main() {
	client, err := penstock.Connect(append(os.Args, "127.0.0.1:50051")[1], penstock.Options{})
	if err == nil {
		_, err = client.Work(context.Background(), penstock.WorkOptions{}, agent)
	}
	log.Fatal(err)
}
