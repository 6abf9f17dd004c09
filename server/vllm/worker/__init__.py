"""What runs inside vLLM's own worker process: new weights into the live model, adapters, sampling.

Uses `weights.staging` and the rooms below it. Begin with `weight_engine.py`.
"""
