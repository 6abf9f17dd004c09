"""The mathematics of a step: pure functions over frozen batches, composed by `objective`.

docs/algorithms.md has every formula, its source, and when to choose it. Nothing here knows of a model, an
optimizer or a server.
"""
