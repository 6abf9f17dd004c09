"""What several sides share that is not about the wire: settings, secrets, files, the allocator.

Uses `v1` at the most. Imports neither torch nor vllm.
"""
