"""`penstock check`: what can be found out about a configuration before anything is started.

`penstock up` runs it first, as a process: a reward that is called may hang, or leave anything behind.

Uses `common`, `machine`, `client`, `up`, the settings of `server` and the data of `trainer`. Begin with
`command.py`.
"""
