"""Several engine servers behind one server, a hub. To the rooms above, a pool is an engine.

Uses `weights`, `groups` and the rooms below them, never `vllm`. Begin with `engine.py`. `routing.py` and
`placing.py` decide which engine server takes a turn.
"""
