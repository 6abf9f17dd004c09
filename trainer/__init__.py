"""The trainer: it takes finished groups from servers, makes optimizer steps and sends the weights back.

Begin with `loop.py`, one step after another, and with `weights/publisher.py`, the way of a version out.

Uses every room below trainer/ but `commands`, and of the shared rooms `v1`, `common`, `machine`, `wire` and
`client`. Never uses the server. A room below uses only those before it in `ROOMS` of
tests/project/test_arrows.py.
"""
