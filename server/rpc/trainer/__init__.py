"""TrainerService: a trainer's session, the groups it gets, its receipts and its switches.

Uses `groups`, `journal`, `turns`, `weights` and the rooms below them. Begin with `servicer.py`.
"""
