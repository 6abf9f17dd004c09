"""From a source of problems to tasks on the servers.

Uses `data.sources`, which stands below it, and `state`, `config` and `core`. Begin with `feeder.py`.
"""
