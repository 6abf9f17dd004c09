"""`penstock journal`: shows, verifies and exports a journal in a folder, also while its server runs.

Uses every room below server/. Begin with `command.py`.
"""
