"""A version by a collective, straight into the engines, in a separate process.

Uses `weights` and the rooms below it. The only room of the trainer that imports vllm.
Begin with `transport.py`.
"""
