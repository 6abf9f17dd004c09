"""`penstock up`: server, engines, workers and trainer from one file, restarted when they die.

Uses `common`, `machine`, `wire`, `cli` and `server.config`; server and trainer themselves run as processes.
Begin with `up.py`, then `supervisor.py`.
"""
