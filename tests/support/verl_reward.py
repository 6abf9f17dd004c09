"""A reward function of verl, in a module that a process loads at once."""

from __future__ import annotations

from typing import Any


def score_row(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Has the signature that verl calls."""
    return {"rows": 1.0, "rows-alone": 1.0, "held-out": 1.0, "named": 3.0}[data_source]
