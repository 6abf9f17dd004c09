"""The policy on megatron-core. The only room that imports megatron.

Uses `policy` and the rooms below it. Begin with `policy.py`.
"""
