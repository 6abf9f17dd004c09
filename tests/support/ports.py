"""Reserved ports on 127.0.0.1 for servers that are killed and restarted on the same port.

While nothing listens, the kernel may give the port to an outgoing connection. The next start then
fails with "address already in use". The kernel never hands out a port that a socket is bound to. A
server may still listen on that port if both sockets set SO_REUSEADDR, as gRPC and Go do, and the
other socket never listens.
"""

from __future__ import annotations

import socket
import weakref


class HeldPort:
    """A free port, reserved for as long as this object lives."""

    def __init__(self) -> None:
        held = socket.socket()
        weakref.finalize(self, held.close)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self.number = int(held.getsockname()[1])
