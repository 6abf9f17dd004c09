"""gRPC settings of both ends of a channel; proto/README.md explains the figures."""

from __future__ import annotations

import ipaddress
import json
import re

LAST_PORT = 65_535
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024
# Limit at which gRPC itself ends a call without a reason; the server refuses with a reason before that.
MOST_METADATA_BYTES = 2 * MAX_METADATA_BYTES
KEEPALIVE_INTERVAL_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_MS = 5_000
# How much one end may send at a time. gRPC's defaults are 16 KiB per frame and an initial window of 64 KiB.
# Uploads gain up to 5 %; a finished group costs both ends a tenth less. The large window applies only
# towards a server: a client that stops reading should be noticed soon.
BULK_FRAME_BYTES = 1024 * 1024
BULK_WINDOW_BYTES = 16 * 1024 * 1024

Options = list[tuple[str, int | str]]

URI_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
"""Schemes of targets other than HOST:PORT, which gRPC resolves itself."""

# Safe to retry: these calls change nothing, or are idempotent by id.
IDEMPOTENT_UNARY = {
    "penstock.v1.RolloutService": ("GetServerInfo", "GetTrajectory", "Abort"),
    "penstock.v1.TaskService": ("SubmitTasks", "RenewLease", "CompleteTrajectory"),
}


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair; an IPv6 host keeps its brackets. Raises ValueError with the bad address."""
    host, separator, port = address.rpartition(":")
    if "/" in address or not (separator and host and port.isdecimal() and int(port) <= LAST_PORT):
        # The user of a URL may have a password.
        shown = re.sub(r"//[^/@]*@", "//***@", address)
        raise ValueError(f"an address reads HOST:PORT, got {shown!r}{_meant(address)}")
    return host, int(port)


def _meant(address: str) -> str:
    """The address in a URL, or that of a host without a port, as a suggestion."""
    host = re.sub(r"^[A-Za-z][\w+.-]*://|^//", "", address).partition("/")[0].rpartition("@")[2]
    if host == address:
        return ""
    port = host.rpartition(":")[2]
    return f"; without scheme and path it is {host if port.isdecimal() else f'{host}:PORT'}"


def check_target(address: str) -> None:
    """Raises ValueError if a target is neither HOST:PORT nor a URI that gRPC resolves.

    gRPC itself is too lenient: it assumes port 443 if there is none, and truncates a port that is too
    large.
    """
    if not address.startswith(URI_SCHEMES):
        split_address(address)


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is certain to be on this host. A name other than "localhost" counts as remote."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _both_ends() -> Options:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # This timeout applies while data waits to be acknowledged; gRPC's default is a minute.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_frame_size", BULK_FRAME_BYTES),
    ]


def server_options(waiting_calls: int = 32_768) -> Options:
    """Channel arguments of a server; `waiting_calls` may wait until its process accepts them."""
    return [
        *_both_ends(),
        # Between these two limits gRPC cancels calls at random. Its defaults are 1,000 and 3,000. With
        # thousands of agents, a process that is busy for a moment accumulates that many calls.
        ("grpc.server.max_pending_requests", waiting_calls),
        ("grpc.server.max_pending_requests_hard_limit", waiting_calls),
        # The caller's deadline decides how long is too long; gRPC would cancel after 30 seconds.
        ("grpc.server_max_unrequested_time_in_server", 24 * 3600),
        # Between these two limits gRPC would refuse calls at random.
        ("grpc.max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MOST_METADATA_BYTES),
        ("grpc.http2.lookahead_bytes", BULK_WINDOW_BYTES),
        # Two servers on one port must fail loudly, not share it.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ]


def client_options(*, own_connection: bool = False) -> Options:
    """Channel arguments of a client.

    `own_connection` gives the channel a connection that it shares with no other channel of the process.
    Bulk data (weights) then never delays tokens.
    """
    retry = {
        "maxAttempts": 5,
        "initialBackoff": "0.2s",
        "maxBackoff": "5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    names = [
        {"service": service, "method": method}
        for service, methods in IDEMPOTENT_UNARY.items()
        for method in methods
    ]
    config = {"methodConfig": [{"name": names, "retryPolicy": retry}]}
    options = [
        *_both_ends(),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.service_config", json.dumps(config)),
        # Reconnects to a restarted server within seconds; gRPC's default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        # Not a backoff, but the time limit of one attempt; TLS needs three round trips.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    return options
