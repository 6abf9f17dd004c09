"""What outlives the trainer: checkpoints, the ledger of trained groups, the id of the run.

Uses `core` and `config`. Begin with `checkpoint.py`.
"""
