"""Code shared by client, server and trainer: codec, channel settings, reasons, tracing.

Dependencies: `penstock.v1 <- penstock.wire <- {client, server, trainer}`. Only `arithmetic` and
`gloo_group` import torch, and nothing here imports vllm.
"""
