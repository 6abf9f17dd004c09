"""`penstock demo`: server, worker and trainer on this machine, on one small task.

Starts the three as processes and imports neither the server nor the trainer. Uses `up` for that, and
`client`, `common`, `machine`, `wire` and `v1`. Begin with `run.py`.
"""
