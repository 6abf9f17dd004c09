package penstock

import (
	"fmt"
	"math"
	"strings"

	"google.golang.org/protobuf/types/known/structpb"

	penstockv1 "penstock/v1"
)

// Maximum length of a failure's reason that a server accepts, in characters.
const reasonLength = 256

// Outcome is how an attempt ended, as its agent judged it.
type Outcome struct {
	// The scalar return; finite.
	Reward float64
	// Set if the attempt could not be scored; all other fields are then ignored.
	Failure *Failed
	// Named parts of the reward, and any other number worth logging.
	Metrics map[string]float64
	// JSON values for later readers.
	Metadata map[string]any
	// Rewards of single turns, by index; empty if only the whole is scored.
	TurnRewards []float64
}

// Reward returns an Outcome with only a reward.
func Reward(reward float64) Outcome { return Outcome{Reward: reward} }

// Closed is the server's answer to a close.
type Closed struct {
	// Whether this close completed its group.
	GroupCompleted bool
	// Whether the attempt failed and will be repeated, under another trajectory id.
	Retried bool
}

func writeOutcome(outcome Outcome) (*penstockv1.Outcome, error) {
	if failed := outcome.Failure; failed != nil {
		failure := &penstockv1.Failure{
			Reason: shortened(failed.Reason, reasonLength), Message: strings.ToValidUTF8(failed.Message, "\ufffd"),
		}
		return &penstockv1.Outcome{Result: &penstockv1.Outcome_Failure{Failure: failure}}, nil
	}
	for _, number := range append([]float64{outcome.Reward}, outcome.TurnRewards...) {
		if math.IsNaN(number) || math.IsInf(number, 0) {
			return nil, fmt.Errorf("a reward must be finite, not %v", number)
		}
	}
	metadata, err := structpb.NewStruct(outcome.Metadata)
	if err != nil {
		return nil, fmt.Errorf("the outcome's metadata: %w", err)
	}
	return &penstockv1.Outcome{
		Result:  &penstockv1.Outcome_Reward{Reward: outcome.Reward},
		Metrics: outcome.Metrics, Metadata: metadata, TurnRewards: outcome.TurnRewards,
	}, nil
}

func readOutcome(outcome *penstockv1.Outcome) *Outcome {
	switch result := outcome.GetResult().(type) {
	case *penstockv1.Outcome_Reward:
		return &Outcome{
			Reward: result.Reward, Metrics: outcome.Metrics, Metadata: outcome.Metadata.AsMap(),
			TurnRewards: outcome.TurnRewards,
		}
	case *penstockv1.Outcome_Failure:
		return &Outcome{Failure: &Failed{result.Failure.GetReason(), result.Failure.GetMessage()}}
	}
	return nil
}
