"""Turns and the trajectories that they extend, from the request to the stored tokens.

A turn is a task of the server's own, so a lost caller loses nothing. Uses `journal`, `text`, `engine` and
the rooms below them. Begin with `runner.py`.
"""
