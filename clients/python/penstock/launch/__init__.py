"""`penstock train --model`: from a model, data and a reward to the file of `penstock up`, and its run.

Uses `up`, `demo.model`, `client` and `common`; of the trainer, only its configuration and its sources of
data. Begin with `command.py`.
"""
