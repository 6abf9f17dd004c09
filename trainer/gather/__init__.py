"""From deliveries to the batch of a step: which groups it takes, and which are left out.

Uses `evaluation`, `metrics`, `exchange` and the rooms below them, and `client.plugins`.
"""
