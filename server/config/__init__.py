"""The server's configuration: the sections of its TOML file, `--set` and the command line.

Uses `core`. `penstock up` reads it too, so it imports no engine. Begin with `settings.py`.
"""
