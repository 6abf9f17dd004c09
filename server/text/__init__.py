"""Text and messages to tokens and back: chat templates, tool calls, stop strings.

Uses `core`, `config` and `engine`. Begin with `renderer.py`.
"""
