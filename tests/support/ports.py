"""Ports of 127.0.0.1 that nobody else is given, for what listens there, is killed, and listens there again.

While nobody listens the kernel may hand the port to any connection that goes out, and the next start then
fails with "address already in use". It hands out none that a socket is bound to; a server may listen on
that one all the same, as long as both said SO_REUSEADDR, which gRPC and Go do, and the other only holds it.
"""

from __future__ import annotations

import socket
import weakref


class HeldPort:
    """A free port, kept as long as this is."""

    def __init__(self) -> None:
        held = socket.socket()
        weakref.finalize(self, held.close)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self.number = int(held.getsockname()[1])
