"""The trainer's end of the `Exchange` streams, one for each server: demand, deliveries, receipts.

Uses `policy`, `batching` and the rooms below them. Begin with `stream.py`.
"""
