"""What this machine has: processor, GPUs, memory, disk, ports, packages and models.

`penstock doctor` shows it (`examine.py`). Checks, launches, server and trainer choose by it (`devices.py`,
`models.py`). Uses `common` only, and imports what an extra installs only where it is asked for:
`penstock doctor` has to run without them.
"""
