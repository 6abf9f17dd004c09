"""External processes as agents: `penstock rollout --command "..."`, one process per attempt.

`keeper` is the process between the worker and the command: it ends the process tree if either dies.
`relay` has the endpoints of one attempt, which the process reaches with a key made for the attempt.
docs/guides/programs.md lists the effect of each failure.

Uses `client`, `wire` and `common`. Begin with `agent.py`: an attempt from its lease to its reward.
"""
