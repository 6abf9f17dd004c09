"""`penstock check`: what can be found out about a configuration before anything is started.

`penstock up` runs it first, in a separate process, because a reward that is called may hang or end it.
Uses `common`, `machine`, `client`, `up`, the settings of `server` and the data of `trainer`. Begin with
`command.py`.
"""
