"""From the policy's tensors to a version on every server.

Uses `exchange`, `policy` and the rooms below them. Begin with `publisher.py`.
"""
