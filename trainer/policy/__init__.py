"""The model that is trained, behind the seam `Policy`: torch with FSDP2, or megatron.

Uses `batching`, `algorithms` and the rooms below them. Begin with `protocol.py`.
"""
