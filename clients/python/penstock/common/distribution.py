"""The distribution's name on a package index. The packages it installs are `penstock.*`."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "penstock-rl"
"""`penstock` on PyPI is another project."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Has torch's CPU build, which the CPU engine requires and PyPI lacks."""


def installed_version() -> str:
    """Raises PackageNotFoundError if the packages are on the path without being installed."""
    return metadata.version(DISTRIBUTION)


def pip_install(extras: str) -> str:
    """The command that installs extras: `pip_install("server,cpu")`."""
    index = f" --extra-index-url {CPU_INDEX}" if "cpu" in extras.split(",") else ""
    return f"pip install '{DISTRIBUTION}[{extras}]'{index}"
