"""From groups to batches: which sequences count, and how they are packed and divided over ranks.

Uses `algorithms`, `data` and the rooms below them. Begin with `batching.py`.
"""
