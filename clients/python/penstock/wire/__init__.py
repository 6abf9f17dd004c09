"""What client, server and trainer share of the wire: codec, channel settings, reasons, tracing.

Arrows: `penstock.v1 <- penstock.wire <- {client, server, trainer}`. Nothing here imports torch or vllm.
"""
