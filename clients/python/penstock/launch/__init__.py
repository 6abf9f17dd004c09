"""`penstock train --model`: from a model, data and a reward to the file of `penstock up`, and its run.
`penstock.train`: the same for a script or a notebook.

Uses `up`, `preflight`, `demo.model`, `client`, `machine` and `common`; of the trainer, its configuration,
its sources of data and, for a run by steps, its session. Begin with `command.py`, or `python.py`.
"""
