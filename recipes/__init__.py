"""Recipes: files for `penstock up`, which `penstock init --recipe NAME` writes, and the agent of one.

Each file begins with a line that describes it, the commands, and what was measured. Uses `client`. Begin
with `default.toml`.
"""
