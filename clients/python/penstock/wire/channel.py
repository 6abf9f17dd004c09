"""One place for the settings of both ends of a channel; the figures are explained in proto/README.md."""

from __future__ import annotations

import ipaddress
import json

LAST_PORT = 65_535
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_METADATA_BYTES = 16 * 1024
# Where gRPC itself cuts a caller off, without a reason: past what the server refuses with one.
MOST_METADATA_BYTES = 2 * MAX_METADATA_BYTES
KEEPALIVE_INTERVAL_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_MS = 5_000
# What one end lets the other send at a time, over gRPC's own 16 KiB in a frame and 64 KiB ahead at first.
# Uploads gain up to 5 %; a finished group costs both ends a tenth less. Ahead only towards a server: a
# caller that reads nothing should be found out soon.
BULK_FRAME_BYTES = 1024 * 1024
BULK_WINDOW_BYTES = 16 * 1024 * 1024

Options = list[tuple[str, int | str]]

URI_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "xds:")
"""Of targets that gRPC resolves in another way than HOST:PORT."""

# Safe to send twice: they change nothing, or are idempotent by id.
IDEMPOTENT_UNARY = {
    "penstock.v1.RolloutService": ("GetServerInfo", "GetTrajectory", "Abort"),
    "penstock.v1.TaskService": ("SubmitTasks", "RenewLease", "CompleteTrajectory"),
}


def split_address(address: str) -> tuple[str, int]:
    """HOST:PORT as a pair, an IPv6 host in brackets. Raises ValueError, naming what it got."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > LAST_PORT:
        raise ValueError(f"an address reads HOST:PORT, got {address!r}")
    return host, int(port)


def check_target(address: str) -> None:
    """Raises ValueError where an address to connect to is neither HOST:PORT nor a URI that gRPC resolves.

    gRPC itself takes port 443 where there is none, and what is left of one that is too large.
    """
    if not address.startswith(URI_SCHEMES):
        split_address(address)


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT can only be of this host. A name that is not "localhost" may be any host's."""
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
        # Where data waits to be acknowledged, this is the one that counts; gRPC's own is a minute.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_frame_size", BULK_FRAME_BYTES),
    ]


def server_options(waiting_calls: int = 32_768) -> Options:
    """Channel arguments of a server, where so many calls may wait until its process looks at them."""
    return [
        *_both_ends(),
        # Between the two gRPC would cancel calls at random, which is from 1,000 to 3,000 on by itself: a
        # process that is busy for a moment finds as many where it has thousands of agents.
        ("grpc.server.max_pending_requests", waiting_calls),
        ("grpc.server.max_pending_requests_hard_limit", waiting_calls),
        # How long is too long the caller's deadline says; gRPC would cancel after 30 seconds.
        ("grpc.server_max_unrequested_time_in_server", 24 * 3600),
        # Between the two gRPC would refuse at random.
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

    `own_connection` gives the channel a connection that no other channel of the process shares, so
    that bulk (weights) never delays tokens.
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
    options = _both_ends()
    options.append(("grpc.max_metadata_size", MAX_METADATA_BYTES))
    options.append(
        (
            "grpc.service_config",
            json.dumps({"methodConfig": [{"name": names, "retryPolicy": retry}]}),
        )
    )
    # A server that comes back should be found again in seconds, not after gRPC's two minutes.
    options += [
        ("grpc.initial_reconnect_backoff_ms", 200),
        # No wait, but how long an attempt may take: by TLS three times there and back.
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    return options
