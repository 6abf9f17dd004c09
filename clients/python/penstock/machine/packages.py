"""Which extras of this distribution are installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import metadata

from penstock.common.distribution import DISTRIBUTION, pip_install
from penstock.common.suggestions import listed
from penstock.machine.findings import Finding, State

NOT_FOR_USERS = ("bench", "dev")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+).*;.*\bextra == ['\"]([\w-]+)['\"]")


def extras(requirements: Iterable[str] | None = None) -> Mapping[str, list[str]]:
    """The packages that each extra needs and that are not installed; empty if all are."""
    found: dict[str, list[str]] = {}
    for line in (metadata.requires(DISTRIBUTION) or ()) if requirements is None else requirements:
        if (match := REQUIREMENT.match(line)) and match[2] not in NOT_FOR_USERS:
            absent = found.setdefault(match[2], [])
            if not _is_installed(match[1]):
                absent.append(match[1])
    return found


def check_packages(has_gpu: bool, found: Mapping[str, list[str]] | None = None) -> list[Finding]:
    """A line for each extra that a run needs, and one for all others."""
    found = extras() if found is None else found
    engine = "cuda" if has_gpu else "cpu"
    needed = ("server", engine, "trainer")
    lines = [_needed(extra, found[extra]) for extra in needed]
    others = {
        extra: absent for extra, absent in found.items() if extra not in (*needed, "cpu", "cuda")
    }
    here = ", ".join(extra for extra, absent in others.items() if not absent) or "none"
    absent = ", ".join(extra for extra, absent in others.items() if absent)
    said = f"{here} installed" + (f"; {absent} not" if absent else "")
    return [*lines, Finding("other extras", State.OK, said, pip_install("NAME") if absent else "")]


def _needed(extra: str, absent: list[str]) -> Finding:
    name = f"extra {extra}"
    if absent:
        return Finding(name, State.MISSING, f"without {listed(absent, 3)}", pip_install(extra))
    return Finding(name, State.OK, "installed")


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
