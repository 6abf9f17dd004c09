"""Configuration of `penstock serve`: one class for each table of the TOML file.

May use core. Begin with `settings`.
"""
