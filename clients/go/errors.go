package penstock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Error is a refused or failed call:
//
//	var refused *penstock.Error
//	if errors.As(err, &refused) && refused.Reason == "LEASE_EXPIRED" { ... }
type Error struct {
	// Status of the call.
	Code codes.Code
	// Machine-readable, of the table in proto/README.md; empty where the server named none.
	Reason string
	// For a person.
	Message string
	// The values the message speaks of, from google.rpc.ErrorInfo.
	Metadata map[string]string
	// When the server expects that asking again helps; zero where it does not say.
	RetryAfter time.Duration

	cause error
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s: %s: %s", e.Code, e.Reason, e.Message)
}

// Unwrap returns what gRPC said.
func (e *Error) Unwrap() error { return e.cause }

// Unavailable says that the server cannot be reached, was lost, or does not serve now. UNKNOWN no server
// answers: gRPC itself does where a connection breaks in a way that it has no code for.
func (e *Error) Unavailable() bool {
	return e.Code == codes.Unavailable || e.Code == codes.Canceled || e.Code == codes.Unknown
}

// full says that a bound of the server's is reached for now, and that the same call may succeed later. Where gRPC
// itself has no room for a call it names no reason; a message that is too large stays so.
func (e *Error) full() bool {
	if e.Code != codes.ResourceExhausted {
		return false
	}
	if e.RetryAfter != 0 {
		return true
	}
	tooLarge := strings.Contains(e.Message, "larger than max") || strings.Contains(e.Message, "metadata size exceeds")
	return e.Reason == "" && !tooLarge
}

// notAllowedNow says that the state of the trajectory, the lease or the weights forbids it.
func (e *Error) notAllowedNow() bool {
	return e.Code == codes.FailedPrecondition || e.Code == codes.AlreadyExists || e.Code == codes.Aborted
}

// Reason is the reason of the first Error in err's chain; empty where there is none.
func Reason(err error) string {
	var refused *Error
	if errors.As(err, &refused) {
		return refused.Reason
	}
	return ""
}

// fromStatus reads the error of a call, with what its details say. The end of ctx is ctx's own error.
func fromStatus(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	answered, ok := status.FromError(err)
	if !ok {
		return err
	}
	refused := &Error{Code: answered.Code(), Message: answered.Message(), Metadata: map[string]string{}, cause: err}
	for _, detail := range answered.Details() {
		switch known := detail.(type) {
		case *errdetails.ErrorInfo:
			refused.Reason = known.GetReason()
			if known.GetMetadata() != nil {
				refused.Metadata = known.GetMetadata()
			}
		case *errdetails.RetryInfo:
			delay := known.GetRetryDelay()
			refused.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return refused
}

func isCode(err error, code codes.Code) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Code == code
}

func isUnavailable(err error) bool {
	var refused *Error
	return errors.As(err, &refused) && refused.Unavailable()
}

// Failed is an episode that could not be scored: an agent returns it as its error, and the server has the
// attempt made again, up to a bound.
type Failed struct {
	// Machine-readable, UPPER_SNAKE_CASE; a server is told at most 256 characters of it.
	Reason string
	// For a person.
	Message string
}

func (f *Failed) Error() string { return f.Reason + ": " + f.Message }

// asFailed is what an agent's error says, as data.
func asFailed(err error) *Failed {
	var failed *Failed
	if errors.As(err, &failed) {
		return failed
	}
	reason := Reason(err)
	if reason == "" {
		reason = "AGENT_ERROR"
	}
	return &Failed{reason, shortened(err.Error(), 1000)}
}

// shortened is the beginning of a text, in so many characters, as UTF-8.
func shortened(text string, longest int) string {
	characters := []rune(strings.ToValidUTF8(text, "\ufffd"))
	return string(characters[:min(len(characters), longest)])
}
