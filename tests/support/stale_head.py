"""A worker extension that reports its state and can keep a stale `lm_head`."""

from __future__ import annotations

from penstock.server.vllm.worker import weight_engine as vllm_weight_engine


class WorkerExtension(vllm_weight_engine.WorkerExtension):
    """Loaded into vLLM's worker, in a separate process."""

    def is_ready(self) -> bool:
        """Whether a version is prepared but not yet put in place."""
        preparation = self.weight_transfer_engine._preparation
        return preparation is not None and preparation.ready

    def keep_stale_head(self) -> None:
        """From now on a tied `lm_head` keeps its current weights, whatever is loaded."""
        vllm_weight_engine.why_not = lambda model, config: "it is to be loaded as vLLM does it"
        vllm_weight_engine.WeightEngine._renew_tied_head = lambda self: None
