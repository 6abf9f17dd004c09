"""What a run reports: the record of a step, the console, and the trackers.

Uses `weights`, `exchange` and the rooms below them. Begin with `metrics.py`.
"""
