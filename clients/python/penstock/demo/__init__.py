"""`penstock demo`: server, worker and trainer on this machine, on one small task, with one command.

It starts the three as separate processes and uses only their public interfaces; it imports neither
the server nor the trainer.
"""
