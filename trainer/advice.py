"""What a configuration may say and hardly anybody means: told when the run starts, and done as it was said.

What cannot be meant at all is refused where it is read (`config`, `algorithm_config`).
"""

from __future__ import annotations

from penstock.trainer.algorithm_config import Gspo, TokenMean
from penstock.trainer.config import TrainerConfig


def advise(config: TrainerConfig) -> list[str]:
    """A sentence or two for each such choice, naming the fields; docs/algorithms.md has the reasons."""
    algorithm, max_lag = config.algorithm, config.staleness.max_lag
    said: list[str] = []
    if max_lag > 0 and not algorithm.reads_behaviour:
        said.append(
            f"staleness.max_lag = {max_lag}, and nothing corrects for it: tokens of older versions are "
            "trained as if this policy had sampled them. Give algorithm.correction a level and a mode, or "
            "a loss whose ratio is to the behaviour policy"
        )
    if isinstance(algorithm.loss, Gspo) and isinstance(algorithm.aggregation, TokenMean):
        said.append(
            'algorithm.loss.kind = "gspo" with algorithm.aggregation.kind = "token_mean": a sequence then '
            'counts by its length. GSPO\'s objective has "sequence_mean"'
        )
    return said
