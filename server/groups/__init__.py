"""Tasks, leases, the staleness gate, and the buffer of finished groups.

Uses `turns` and the rooms below it. Begin with `task_queue.py`. `staleness_gate.py` is pure: it decides
which groups begin and which are delivered.
"""
