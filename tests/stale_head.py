"""A worker that can be told to forget what `vllm_weight_engine` puts right, as vLLM by itself does."""

from __future__ import annotations

from penstock.server import vllm_weight_engine


class WorkerExtension(vllm_weight_engine.WorkerExtension):
    """Loaded into vLLM's worker, in a process of its own."""

    def keep_stale_head(self) -> None:
        """From here on a tied `lm_head` computes with the weights it has, whatever is loaded."""
        vllm_weight_engine.StagedFileEngine._renew_tied_head = lambda self: None
