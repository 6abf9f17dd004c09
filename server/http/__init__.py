"""The OpenAI and Anthropic endpoints: the same turns over HTTP.

Uses `security`, `rpc`, `rollouts` and the rooms below them. Begin with `app.py`.
"""
