"""The generated pages, by file name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support.reference import (
    commands,
    configuration,
    environment,
    errors,
    exit_statuses,
    metrics,
    protocol,
)

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "cli.md": commands.page,
    "configuration-server.md": configuration.server_page,
    "configuration-trainer.md": configuration.trainer_page,
    "configuration-up.md": configuration.up_page,
    "environment.md": environment.page,
    "errors.md": errors.page,
    "exit-statuses.md": exit_statuses.page,
    "metrics.md": lambda: metrics.page(FOLDER / "metrics.md"),
    "protocol.md": lambda: protocol.page(ROOT / "proto"),
}
