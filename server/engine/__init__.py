"""The seam between the server and what samples.

vLLM (`vllm`), a pool of servers (`pool`) and the tests' fakes stand behind it. Uses `core` and `config`.
Begin with `protocol.py`, what an engine offers.
"""
