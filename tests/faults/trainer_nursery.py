"""The imports of the processes from which trainers are forked: `trainer_processes`, `rank_nursery`."""

from __future__ import annotations

import json
import sys
from typing import Any


def load(model: str) -> None:
    """Import everything slow that starts no thread and reads no environment."""
    import grpc.aio
    import peft
    import tensorboard.summary
    import torch
    import torch.utils.tensorboard
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    AutoModelForCausalLM.from_pretrained(model)
    AutoTokenizer.from_pretrained(model)
    import penstock.trainer.metrics.metrics
    import penstock.trainer.policy.fsdp
    import penstock.trainer.weights.payload

    assert grpc.aio and peft and tensorboard.summary and penstock.trainer.weights.payload
    # Failpoints are read when their module is imported.
    assert "penstock.common.failpoints" not in sys.modules


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
