"""The journal in a stream of NATS JetStream, for several hubs. The only room that imports nats.

Uses `journal.disk`, `journal` and the rooms below them. Begin with `journal.py`.
"""
