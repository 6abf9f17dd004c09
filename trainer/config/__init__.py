"""The trainer's configuration: the sections of its TOML file, checked and explained.

Uses `core`. Begin with `trainer.py`, which has the whole file.
"""
