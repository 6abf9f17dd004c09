"""What the fault tests share: how often, from which seed, under how many updates, and one line for each.

A test asks for the fixture `report` and adds lines; they come out together when the run ends. Case number i
of a run runs from `seed + i`, so any case runs again alone with `--fault-seed` and `--fault-count 1`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

COUNT = 2
"""Times each fault is made to happen where nobody says how often."""
UPDATES = 20
SEEDS = 1_000_000_000


@dataclass
class Report:
    """The options, and the lines so far."""

    seed: int
    count: int | None
    """None: nobody said."""
    updates: int
    lines: list[str] = field(default_factory=list[str])
    tally: dict[str, int] = field(default_factory=dict[str, int])
    """Faults survived, by where they happened."""

    def survived(self, where: str, name: str, count: int) -> None:
        """A fault that was survived each time; its own line only where somebody asked for a count."""
        self.tally[where] = self.tally.get(where, 0) + count
        if self.count is not None:
            self.lines.append(
                f"{where:<16}{name:<40} seed {self.seed}  {count:>3} of {count} survived"
            )

    def failed(self, where: str, name: str, seed: int, test: str, done: int, count: int) -> str:
        """A fault that was not survived; returns the command that makes it happen again."""
        file, _, test_name = test.partition("::")
        again = f"pytest {file} -k '{test_name}' --fault-seed {seed} --fault-count 1"
        self.lines.append(
            f"{where:<16}{name:<40} seed {seed}  FAILED after {done} of {count}; again: {again}"
        )
        return again


REPORT = pytest.StashKey[Report]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fault-count", type=int, help=f"times each fault happens (default {COUNT})")
    group.addoption("--fault-seed", type=int, help="where randomness begins (default: at random)")
    group.addoption(
        "--updates",
        type=int,
        default=UPDATES,
        help=f"weight updates of a soak under load (default {UPDATES})",
    )


def report_of(config: pytest.Config) -> Report:
    """The run's report."""
    if REPORT not in config.stash:
        seed = config.getoption("fault_seed")
        config.stash[REPORT] = Report(
            random.SystemRandom().randrange(SEEDS) if seed is None else seed,
            config.getoption("fault_count"),
            config.getoption("updates"),
        )
    return config.stash[REPORT]


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Report:
    """Options of the fault tests, and where their lines go."""
    return report_of(pytestconfig)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = report_of(config)
    if not found.lines and not found.tally:
        return
    terminalreporter.section("faults")
    for line in found.lines:
        terminalreporter.write_line(line)
    for where, count in found.tally.items():
        terminalreporter.write_line(f"{where}: {count} faults survived, seed {found.seed}")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(share * len(ordered) + 0.5) - 1))]


def slope(values: Sequence[float]) -> float:
    """Median growth from one value to the next, by Theil and Sen: a few outliers do not move it."""
    slopes = sorted(
        (values[b] - values[a]) / (b - a)
        for a in range(len(values))
        for b in range(a + 1, len(values))
    )
    return slopes[len(slopes) // 2] if slopes else 0.0
