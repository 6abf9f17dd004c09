"""Installs one extra of this project into `.venv`: `.venv/bin/python .ci/add_extra.py bench`.

It changes no installed package: pip is constrained to the installed versions, and fails if they conflict
with the extra. Takes a fraction of a second if there is nothing to add.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(extra: str) -> None:
    """Installs the missing packages, or exits with an error message of one line."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted: list[str] = project["optional-dependencies"][extra]
    missing = [requirement for requirement in wanted if not is_installed(requirement)]
    if not missing:
        return
    print(f"installing {', '.join(missing)}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(installed()))
        file.flush()
        command = ["-m", "pip", "install", "--quiet", "--constraint", file.name, *missing]
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if result.returncode:
        sys.exit(
            f"{result.stderr}\nthe extra {extra} cannot be installed: {', '.join(missing)}; "
            "save the wheels in a folder and name it: PIP_FIND_LINKS=/folder"
        )


def is_installed(requirement: str) -> bool:
    """Whether any version of the distribution is installed."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def installed() -> list[str]:
    """All installed distributions, as constraints for pip."""
    found = importlib.metadata.distributions()
    return sorted({f"{each.name}=={each.version}" for each in found})


if __name__ == "__main__":
    main(sys.argv[1])
