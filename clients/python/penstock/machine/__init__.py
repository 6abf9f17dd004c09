"""What this machine has: processor, GPUs, memory, disk, ports, packages and models, for `penstock doctor`.

Uses `common` only, and imports nothing that an extra installs: the command has to run without them. Begin
with `examine.py`.
"""
