"""Runs functions that were written for other systems, unchanged: `penstock rollout --style`.

docs/guides/migrate.md explains how each system's functions map to Penstock.
Uses `client`, `wire` and `common`. Begin with `styles.py`, which loads the functions.
"""
