"""What client, server and trainer share of the wire: codec, channel settings, reasons, lag.

Uses `v1` and `common`. Imports neither torch nor vllm. Begin with `codec.py`.
"""
