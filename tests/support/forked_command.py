"""`penstock COMMAND`, forked from a nursery instead of loading the libraries anew.

    python -m tests.support.forked_command COMMAND [ARGUMENT]...

The nursery is that of `tests.support.trainer_processes`; the variable NURSERY has its socket. This process
hands on the signals that ask it to stop, and ends as the command does. If this process is killed, so is the
command.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

NURSERY = "PENSTOCK_TEST_NURSERY"


def main() -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[NURSERY])
    order = {"command": sys.argv[1:], "env": dict(os.environ), "folder": str(Path.cwd())}
    data = json.dumps(order).encode()
    # Until the command's pid is known, a signal waits.
    asked = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    socket.send_fds(connection, [len(data).to_bytes(4, "little")], [1, 2])
    connection.sendall(data)
    answers = connection.makefile("rb")
    pid = int(answers.readline())

    def hand_on(number: int, _: Any) -> None:
        os.kill(pid, number)

    for number in asked:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked)
    code = int(answers.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
