"""A version that arrives: its manifest and bytes, verified before it can be switched to.

Uses `groups` and the rooms below it. `weights`, which switches to versions, stands above it.
"""
