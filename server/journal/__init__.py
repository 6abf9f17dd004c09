"""What the server must not forget, and the interface of the stores that keep it.

`disk` stores the journal in a folder, `jetstream` in a stream of NATS. Uses `core`, `config`, `engine` and
`text`. `tools`, which shows and exports a journal, is above every room that writes records. Begin with
`protocol.py`.
"""
