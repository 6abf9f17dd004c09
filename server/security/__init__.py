"""Who may call what: TLS, tokens, roles, and the limits of each caller.

Uses `rpc` and the rooms below it. Begin with `gate.py`.
"""
