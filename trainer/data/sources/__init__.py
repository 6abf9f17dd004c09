"""Where prompts come from: a source returns problem number i of an endless sequence.

Uses `config` and `core`; `data` stands above it. Begin with `problem.py`, the interface of a source.
"""
