"""What the server must not forget, and the seam between it and where that is stored.

`disk` stores the journal in a folder, `jetstream` in a stream of NATS. Uses `core`, `config`, `engine` and
`text`. `tools`, which shows and exports a journal, stands above every room that writes records.
Begin with `records.py`.
"""
