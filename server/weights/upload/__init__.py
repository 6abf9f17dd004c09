"""Uploads of versions: who may upload, from where the bytes come, and when a version is staged.

Uses `weights`, `weights.staging` and the rooms below them. Begin with `service.py`.
"""
