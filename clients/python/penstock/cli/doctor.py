"""The command `penstock doctor`: checks what a run on this machine needs."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from penstock.common.answers import Exit, show
from penstock.machine.examine import examine
from penstock.machine.findings import Finding, State


@click.command(
    "doctor",
    epilog="Exit status: 0 if nothing is missing; 1 if something is, so that no run of server, worker and "
    "trainer works here; 2 if the command line is invalid.",
)
def doctor() -> None:
    """Check this machine: packages, processor, GPUs, memory, disk, ports and models.

    Prints a line for each check: ok, warning or missing, what was found, and what to do. An agent's
    machine needs the base install only, so there the missing extras do not matter.
    """
    findings = list(examine())
    missing = any(finding.state is State.MISSING for finding in findings)
    text = "\n".join(_line(finding) for finding in findings)
    show(text, {"ready": not missing, "findings": [asdict(finding) for finding in findings]})
    sys.exit(Exit.FAILED if missing else Exit.DONE)


def _line(finding: Finding) -> str:
    hint = f"; {finding.hint}" if finding.hint else ""
    return f"{finding.state:<9}{finding.name:<16}{finding.found}{hint}"
