"""The three gRPC services of penstock.v1, and the boundary that turns errors into statuses.

Uses `rollouts`, `pool`, `weights` and the rooms below them. Begin with `boundary.py`.
"""
