"""Trainers at the price of a fork: `trainer_nursery.py MODEL`.

A trainer spends seconds on loading libraries. This process has loaded them, and forks one for each
line of JSON that comes in:

    {"config": "trainer.toml", "resume": true, "failpoints": "train.noted=kill", "log": "trainer.log"}

It answers with {"pid": 7}, and with {"code": 0} when that one has ended, negative where a signal ended
it. One runs at a time. What runs in the fork is `penstock train`, from its configuration to its exit
code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def load(model: str) -> None:
    """Everything that takes long, and nothing that begins a thread or reads the environment."""
    import grpc.aio
    import peft
    import tensorboard.summary
    import torch
    import torch.utils.tensorboard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)
    import penstock.trainer.fsdp_policy
    import penstock.trainer.metrics
    import penstock.trainer.payload

    assert grpc.aio and peft and tensorboard.summary and penstock.trainer.payload
    # Failpoints are read as the module is loaded.
    assert "penstock.wire.failpoints" not in sys.modules


def become_trainer(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ["PENSTOCK_FAILPOINTS"] = order["failpoints"]
    from penstock.trainer.__main__ import train

    code = train(Path(order["config"]), [], order["resume"], False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    load(sys.argv[1])
    say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                become_trainer(order)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(70)
        say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        say({"code": os.waitstatus_to_exitcode(status)})


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
