"""A worker that says what it has, and can be told to forget what `weight_engine` puts right."""

from __future__ import annotations

from penstock.server.vllm.worker import weight_engine as vllm_weight_engine


class WorkerExtension(vllm_weight_engine.WorkerExtension):
    """Loaded into vLLM's worker, in a process of its own."""

    def is_ready(self) -> bool:
        """Whether a version was made ready, and not put in its place yet."""
        preparation = self.weight_transfer_engine._preparation
        return preparation is not None and preparation.ready

    def keep_stale_head(self) -> None:
        """From here on a tied `lm_head` computes with the weights it has, whatever is loaded."""
        vllm_weight_engine.why_not = lambda model, config: "it is to be loaded as vLLM does it"
        vllm_weight_engine.StagedFileEngine._renew_tied_head = lambda self: None
