"""The program of `mathematics.Verifier`.

Each line of stdin has two expressions and a time limit in seconds, each line of stdout whether they are
equal. Beyond the limit the kernel ends the process, which works for long computations in C too.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, cast

from math_verify import parse, verify

MEMORY_BYTES = 4 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # It warns that its own limit is off, which works by a signal that computations in C do not notice.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Whatever the libraries print is not an answer.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(word: str) -> None:
        replies.write(f"{word}\n")
        replies.flush()

    reply("ready")
    for line in sys.stdin:
        right, given, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        equal = verify(read(right), read(given), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        reply(json.dumps(bool(equal)))


def read(expression: str) -> Any:
    # Without a limit, whose type does not say that there may be none.
    return cast("Any", parse)(f"\\boxed{{{expression}}}", parsing_timeout=None)


if __name__ == "__main__":
    main()
