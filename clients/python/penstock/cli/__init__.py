"""The command line: `penstock serve | train | rollout | eval | weights | journal | token | up | doctor`.

Each command imports what it needs only when it runs. Uses `client`, `wire`, `machine` and `common`; other
rooms are loaded by name. Begin with `__main__.py`.
"""
