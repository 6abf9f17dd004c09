"""`penstock demo`: server, worker and trainer on this machine, on one small task, with one command.

It starts the three as processes of their own and talks to them as anyone would; it imports neither
the server nor the trainer.
"""
