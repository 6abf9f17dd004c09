"""The journal in a folder: segments that are appended to, and a snapshot that lets old ones go.

Uses `journal` and the rooms below it. Begin with `journal.py`.
"""
