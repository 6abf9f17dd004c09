"""The beginning and the end of a trajectory, where turns, groups and the journal meet.

Uses `weights`, `groups`, `turns` and the rooms below them.
"""
