"""Weight versions: which are staged, which is active, and the switch from one to another.

Uses `weights.staging`, `groups` and the rooms below them. `weights.upload`, which takes versions over the
wire, stands above it. Begin with `switch.py`.
"""
