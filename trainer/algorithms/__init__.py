"""The mathematics of a step: pure functions over frozen batches, composed by `objective`.

docs/concepts/algorithms.md has every formula, its source, and when to choose it. This package knows nothing
about models, optimizers or servers. Uses `config` and `core`. Begin with `objective.py`.
"""
