"""vLLM in this process, as the server's engine.

With `vllm.worker` it is the only room of the server that imports vllm. Uses `vllm.worker`, `weights` and
the rooms below them. Begin with `engine.py`.
"""
