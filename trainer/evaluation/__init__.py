"""Evaluation during a run: prompts apart from training, measured and recorded.

Uses `metrics`, `exchange` and the rooms below them. `commands` evaluates without a trainer.
Begin with `evaluation.py`.
"""
