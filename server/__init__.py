"""The rollout server: it samples from the model, queues tasks, buffers finished groups and takes weights.

`__main__` reads the command line and `assembly` puts the parts together. Begin with `turns/runner.py`, the
life of a turn, and with `weights/switch.py`, the switch to a new weight version.

Uses every room below server/, and of the shared rooms `v1`, `common`, `machine` and `wire`. Never uses the
client or the trainer. A room below uses only those listed before it in `ROOMS` of
tests/project/test_arrows.py.
"""
