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
	// Machine-readable, from the table in proto/README.md; empty if the server gave no reason.
	Reason string
	// Human-readable.
	Message string
	// Values that the message refers to, from google.rpc.ErrorInfo.
	Metadata map[string]string
	// When the server suggests to retry; zero if it does not.
	RetryAfter time.Duration

	cause error
}

func (e *Error) Error() string {
	if e.Reason == "" {
		return fmt.Sprintf("%s: %s", e.Code, e.Message)
	}
	return fmt.Sprintf("%s: %s: %s", e.Code, e.Reason, e.Message)
}

// Unwrap returns gRPC's error.
func (e *Error) Unwrap() error { return e.cause }

// Unavailable reports whether the server cannot be reached, was lost, or does not serve now. No server sends
// UNKNOWN: gRPC uses it if a connection breaks in a way that has no code.
func (e *Error) Unavailable() bool {
	return e.Code == codes.Unavailable || e.Code == codes.Canceled || e.Code == codes.Unknown
}

// full reports whether the server has reached a limit for now, so that the same call may succeed later. gRPC's own
// limits have no reason; a message that is too large stays too large.
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

// notAllowedNow reports whether the state of the trajectory, the lease or the weights forbids the call.
func (e *Error) notAllowedNow() bool {
	return e.Code == codes.FailedPrecondition || e.Code == codes.AlreadyExists || e.Code == codes.Aborted
}

// Reason returns the reason of the first Error in err's chain; empty if there is none.
func Reason(err error) string {
	var refused *Error
	if errors.As(err, &refused) {
		return refused.Reason
	}
	return ""
}

// fromStatus reads the error of a call, including its details. If ctx has ended, it returns ctx's own error.
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

// Failed is an attempt that could not be scored. An agent returns it as its error; the server then repeats the
// attempt, up to a bound.
type Failed struct {
	// Machine-readable, UPPER_SNAKE_CASE; cut after 256 characters.
	Reason string
	// Human-readable.
	Message string
}

func (f *Failed) Error() string { return f.Reason + ": " + f.Message }

// asFailed converts an agent's error into a failure.
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

// shortened returns the first characters of a text, as valid UTF-8.
func shortened(text string, longest int) string {
	characters := []rune(strings.ToValidUTF8(text, "\ufffd"))
	return string(characters[:min(len(characters), longest)])
}
