"""The commands beside `penstock train`, such as `penstock eval`.

Uses every room of the trainer, and `client` and `cli`. Begin with `evaluate.py`.
"""
