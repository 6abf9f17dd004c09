"""Starts ranks by fork: `rank_nursery.py MODEL` loads all libraries once. Each input line is JSON:

    {"function": "tests.support.rank_work:train", "arguments": {...}, "ranks": 2, "log": "trainer.log"}

The nursery answers {"pids": [7, 8]} and, when all ranks have ended, {"codes": [0, 0]}. A code is
negative if a signal ended the rank. Each rank finds its place in the environment, as under
torchrun. A single rank gets no such variables.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from typing import Any

from tests.faults.trainer_nursery import load, say
from tests.support.trainer_processes import ENVIRONMENT


def main() -> None:
    os.environ |= ENVIRONMENT
    load(sys.argv[1])
    import accelerate
    import torch.distributed.tensor

    import penstock.trainer.policy.ranked

    assert accelerate and torch.distributed.tensor and penstock.trainer.policy.ranked
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pids = [fork(order, rank, port) for rank in range(order["ranks"])]
        say({"pids": pids})
        ended = dict(os.waitpid(-1, 0) for _ in pids)
        say({"codes": [os.waitstatus_to_exitcode(ended[pid]) for pid in pids]})


def fork(order: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        if order["ranks"] > 1:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(order["ranks"]),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        module, _, name = order["function"].partition(":")
        code = getattr(importlib.import_module(module), name)(**order["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(70)


if __name__ == "__main__":
    main()
