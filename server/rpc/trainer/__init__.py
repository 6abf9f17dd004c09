"""TrainerService: a trainer's session, the groups it gets, its receipts and its switches.

May use groups, journal, turns, weights and below. Begin with `servicer`.
"""
