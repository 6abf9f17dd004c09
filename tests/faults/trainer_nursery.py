"""What processes begin with that trainers are forked from: `trainer_processes`, `rank_nursery`."""

from __future__ import annotations

import json
import sys
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
    import penstock.trainer.metrics.metrics
    import penstock.trainer.policy.fsdp
    import penstock.trainer.weights.payload

    assert grpc.aio and peft and tensorboard.summary and penstock.trainer.weights.payload
    # Failpoints are read as the module is loaded.
    assert "penstock.common.failpoints" not in sys.modules


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
