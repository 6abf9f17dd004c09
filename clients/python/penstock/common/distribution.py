"""The distribution's name on a package index. The packages it installs are `penstock.*`."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "penstock-rl"
"""`penstock` on PyPI is another project."""


def installed_version() -> str:
    """Raises PackageNotFoundError if the packages are on the path without being installed."""
    return metadata.version(DISTRIBUTION)


def pip_install(extras: str) -> str:
    """The command that installs extras: `pip_install("server,cpu")`."""
    return f"pip install '{DISTRIBUTION}[{extras}]'"
