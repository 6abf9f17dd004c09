package penstock

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

const (
	maxMessageBytes = 64 * 1024 * 1024
	maxMetadata     = 16 * 1024
)

// The settings of proto/README.md. Before grpc-go 1.40, retries need GRPC_GO_RETRY=on; `calls` also retries itself.
func dialOptions(options Options) ([]grpc.DialOption, error) {
	config, err := json.Marshal(map[string]any{"methodConfig": []any{map[string]any{
		"name": idempotent(),
		"retryPolicy": map[string]any{
			"maxAttempts": 5, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
			"retryableStatusCodes": []string{"UNAVAILABLE"},
		},
	}}})
	if err != nil {
		return nil, err
	}
	reconnect := backoff.DefaultConfig
	reconnect.BaseDelay, reconnect.MaxDelay = 200*time.Millisecond, 2*time.Second
	chosen := []grpc.DialOption{
		grpc.WithDefaultServiceConfig(string(config)),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes),
		),
		grpc.WithMaxHeaderListSize(maxMetadata),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 5 * time.Second}),
	}
	if options.TLS != nil {
		return append(chosen, grpc.WithTransportCredentials(credentials.NewTLS(options.TLS))), nil
	}
	// With a proxy from the environment, the token would leave this host.
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	// Not credentials/insecure, which Debian's grpc-go 1.33 lacks; this function is supported in all of 1.x.
	return append(chosen, grpc.WithInsecure(), grpc.WithContextDialer(dial)), nil
}

func idempotent() []map[string]string {
	var names []map[string]string
	for service, methods := range map[string][]string{
		"penstock.v1.RolloutService": {"GetServerInfo", "GetTrajectory", "Abort"},
		"penstock.v1.TaskService":    {"SubmitTasks", "RenewLease", "CompleteTrajectory"},
	} {
		for _, method := range methods {
			names = append(names, map[string]string{"service": service, "method": method})
		}
	}
	return names
}

// LoadTLS reads PEM files: the certificate authority of the server's certificate ("" trusts the system's roots),
// and the client's own certificate and key, for mutual TLS ("" for none).
func LoadTLS(ca, certificate, key string) (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s: it holds no certificate", ca)
		}
	}
	if (certificate == "") != (key == "") {
		return nil, errors.New("a client's certificate and its key are given together")
	}
	if certificate != "" {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// tokenSource provides the token for each call, from its file if there is one.
type tokenSource struct {
	path string
	lock sync.Mutex
	last string
}

func newTokenSource(address string, options Options) (*tokenSource, error) {
	if options.Token == "" && options.TokenFile == "" {
		return &tokenSource{}, nil
	}
	if options.TLS == nil && !isLoopback(address) {
		return nil, fmt.Errorf(
			"a token is not sent in plaintext to %s: give TLS, or use an address of this host's loopback", address)
	}
	source := &tokenSource{path: options.TokenFile}
	if source.path == "" {
		source.last = options.Token
		return source, checkToken(options.Token, "the token")
	}
	_, err := source.token()
	return source, err
}

func (s *tokenSource) token() (string, error) {
	s.lock.Lock()
	defer s.lock.Unlock()
	if s.path == "" {
		return s.last, nil
	}
	read, err := os.ReadFile(s.path)
	token := strings.TrimSpace(string(read))
	if err == nil {
		err = checkToken(token, s.path)
	}
	if err == nil {
		s.last = token
	} else if s.last != "" {
		// The file may be in the middle of a replacement; use the last token read.
		err = nil
	}
	return s.last, err
}

// outgoing adds the token to a call's metadata.
func (s *tokenSource) outgoing(ctx context.Context) (context.Context, error) {
	token, err := s.token()
	if token == "" || err != nil {
		return ctx, err
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), nil
}

func checkToken(token, what string) error {
	for _, character := range token {
		if character < '!' || character > '~' {
			token = ""
		}
	}
	if token == "" {
		return fmt.Errorf("%s: it does not hold a token", what)
	}
	return nil
}

func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
