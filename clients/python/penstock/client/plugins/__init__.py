"""Runs functions that were written for other systems, unchanged: `penstock rollout --style`.

The module `styles` loads them. docs/moving.md explains how each system's functions map to Penstock.
"""
