"""What every room of the server may need: errors with their reasons, the memory budget, asyncio helpers.

Uses no other room of the server. Begin with `errors.py`, the table from domain errors to statuses.
"""
