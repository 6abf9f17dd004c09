"""What the fault tests share: how often a fault happens, from which seed, for how long, and its
verdict.

A test uses the fixture `report` and adds verdicts. They are printed together when the run ends.
With `--fault-results FILE`, each is also written to FILE as JSON at once. Case number i of a run
uses `seed + i`, so `--fault-seed` and `--fault-count 1` repeat any case alone.

How often each fault happens:

    no option           a few times (`COUNT`), for `make test`
    --fault-table       as often as `TABLE` has for the fault in the test's name (test_f7_...)
    --fault-count N     N times
"""

from __future__ import annotations

import json
import platform
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

COUNT = 2
"""How often each fault happens if no option says."""
UPDATES = 20
SEEDS = 1_000_000_000
TABLE = {
    "F1": 200,
    "F3": 200,
    "F4": 200,
    "F5": 100,
    "F6": 50,
    # An hour on two cores of 2.3 GHz.
    "F7": 230,
    "F8": 64,
    "F9": 10,
    "F12": 10_000,
    "F14": 500,
    "F19": 200,
    "F20": 5_000,
    "F21": 200,
    "F22": 100,
    # Rounds that kill each role once.
    "F23": 10,
    "F25": 20,
}
"""How often each fault happens with `--fault-table`."""
TABLE_COUNT = 20
"""The same for faults that are not in the table."""


@dataclass(frozen=True)
class Verdict:
    """The result of one fault, over all the times it happened."""

    fault: str
    """For example F7."""
    where: str
    """The subject of the fault."""
    name: str
    count: int
    """How often it happened."""
    unit: str
    """The unit of `count`."""
    violations: int
    seed: int
    seconds: float
    figures: str = ""
    """Measurements made meanwhile."""
    skipped: str = ""
    """Why it did not happen at all."""
    again: str = ""
    """The command that repeats the fault, if it was not survived."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of a result. A later run with the same key replaces it."""
        return self.fault, self.where, self.name


@dataclass
class Report:
    """The options, and the results so far."""

    seed: int
    count: int | None
    """None without an option."""
    updates: int
    lines: list[str] = field(default_factory=list[str])
    tally: dict[str, int] = field(default_factory=dict[str, int])
    """Number of survived faults, by where they happened."""
    verdicts: list[Verdict] = field(default_factory=list[Verdict])
    fault: str = ""
    """The fault of the test that uses this report."""
    said: bool = False
    """Whether `count` is the same for all faults, instead of the table's."""
    results: Path | None = None
    """File to which each verdict is written at once, so that an interrupted run keeps those it has."""
    since: float = field(default_factory=time.monotonic)
    """When the test that uses this report began, or its previous verdict was added."""

    def of_test(self, fault: str) -> Report:
        """The report for the test of one fault. The count comes from the table unless an option
        sets it.
        """
        count = self.count
        if count is not None and not self.said:
            count = TABLE.get(fault, TABLE_COUNT)
        return replace(self, fault=fault, count=count, since=time.monotonic())

    def survived(
        self, where: str, name: str, count: int, unit: str = "times", figures: str = ""
    ) -> None:
        """Add a fault that was survived every time. It gets its own line only if an option asked
        for a count.
        """
        self.tally[where] = self.tally.get(where, 0) + count
        self._add(where, name, count, unit=unit, figures=figures)
        if self.count is not None:
            self.lines.append(
                f"{where:<16}{name:<40} seed {self.seed}  {count:>3} of {count} survived"
                f"{'; ' if figures else ''}{figures}"
            )

    def failed(
        self,
        where: str,
        name: str,
        seed: int,
        test: str,
        done: int,
        count: int,
        options: str = "--fault-count 1",
    ) -> str:
        """Add a fault that was not survived; return the command that repeats it."""
        file, _, test_name = test.partition("::")
        again = f"pytest {file} -k '{test_name}' --fault-seed {seed} {options}"
        self._add(where, name, done + 1, violations=1, again=again)
        self.lines.append(
            f"{where:<16}{name:<40} seed {seed}  FAILED after {done} of {count}; again: {again}"
        )
        return again

    def skipped(self, where: str, name: str, reason: str) -> None:
        """Add a fault that cannot be made to happen here."""
        self._add(where, name, 0, skipped=reason)
        self.lines.append(f"{where:<16}{name:<40} skipped: {reason}")

    async def repeat(
        self,
        where: str,
        name: str,
        test: str,
        count: int,
        happen: Callable[[random.Random], Awaitable[None]],
        unit: str = "times",
    ) -> None:
        """Make a fault happen `count` times, each time from another seed.

        Adds no verdict if it is survived. The caller does that, because it knows what was measured.
        """
        for case in range(count):
            seed = self.seed + case
            try:
                await happen(random.Random(f"{seed} {name}"))
            except BaseException as error:
                error.add_note(f"again: {self.failed(where, name, seed, test, case, count)}")
                raise

    def _add(self, where: str, name: str, count: int, **fields: Any) -> None:
        fault, _, place = where.partition(" ")
        if not re.fullmatch(r"F\d+", fault):
            fault, place = self.fault, where
        now = time.monotonic()
        seconds, self.since = now - self.since, now
        self.verdicts.append(
            Verdict(
                **{
                    "fault": fault,
                    "where": place,
                    "name": name,
                    "count": count,
                    "unit": "times",
                    "violations": 0,
                    "seed": self.seed,
                    "seconds": round(seconds, 1),
                    **fields,
                }
            )
        )
        if self.results is not None:
            write_results(self.results, self.verdicts[-1:])


REPORT = pytest.StashKey[Report]()


class Distributed:
    """Sends the results of a distributed run's processes to the one that prints them."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            found = report_of(session.config)
            verdicts = [asdict(verdict) for verdict in found.verdicts]
            output["faults"] = (found.seed, found.lines, found.tally, verdicts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        brought = getattr(node, "workeroutput", {}).get("faults")
        if brought is None:
            return  # It died.
        found = report_of(node.config)
        seed, lines, tally, verdicts = brought
        found.seed = seed
        found.lines += lines
        for where, count in tally.items():
            found.tally[where] = found.tally.get(where, 0) + count
        found.verdicts += [Verdict(**fields) for fields in verdicts]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(Distributed(), "verdicts of distributed runs")
    group = parser.getgroup("faults")
    group.addoption("--fault-count", type=int, help=f"times each fault happens (default {COUNT})")
    group.addoption(
        "--fault-table", action="store_true", help="each fault as often as a whole run has it"
    )
    group.addoption("--fault-seed", type=int, help="where randomness begins (default: at random)")
    group.addoption("--fault-results", type=Path, help="JSON file that verdicts are added to")
    group.addoption(
        "--updates",
        type=int,
        default=UPDATES,
        help=f"weight updates of a soak under load (default {UPDATES})",
    )
    for name, default, what in (
        ("machine-examples", 2_000, "runs of the stateful model of a whole run"),
        ("fault-seconds", 600, "seconds that slow faults last in a whole run"),
        ("fuzz-seconds", 3_600, "seconds of bytes led by coverage of a whole run"),
        ("gate-steps", 10_000, "steps of the gate for each seed of a whole run"),
        ("soak-groups", 60, "groups of the soak with restarts"),
        ("soak-restart-seconds", 600, "seconds after which its server is killed"),
    ):
        group.addoption(f"--{name}", type=int, default=default, help=f"{what} (default {default})")


def report_of(config: pytest.Config) -> Report:
    if REPORT not in config.stash:
        seed, said = config.getoption("fault_seed"), config.getoption("fault_count")
        if seed is None:
            # The processes of a distributed run share the seed, because they must collect the same tests.
            run = getattr(config, "workerinput", {}).get("testrunuid")
            seed = random.SystemRandom().randrange(SEEDS) if run is None else int(run, 16) % SEEDS
        table = TABLE_COUNT if config.getoption("fault_table") else None
        config.stash[REPORT] = Report(
            seed,
            table if said is None else said,
            config.getoption("updates"),
            said=said is not None,
            # In a distributed run only one process writes, once all have reported.
            results=None if hasattr(config, "workerinput") else config.getoption("fault_results"),
        )
    return config.stash[REPORT]


def fault_of(path: Path) -> str:
    """The fault in the name of a test's file; "" without one."""
    match = re.match(r"test_f(\d+)", path.name)
    return f"F{match[1]}" if match else ""


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Options of the fault tests, and their verdicts."""
    return report_of(request.config).of_test(fault_of(request.path))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    found = report_of(config)
    path = config.getoption("fault_results")
    if path is not None and found.verdicts:
        write_results(path, found.verdicts)
    if not found.lines and not found.tally:
        return
    terminalreporter.section("faults")
    for line in found.lines:
        terminalreporter.write_line(line)
    for where, count in found.tally.items():
        terminalreporter.write_line(f"{where}: {count} faults survived, seed {found.seed}")


def write_results(path: Path, verdicts: Sequence[Verdict]) -> None:
    """Add verdicts to a file. Each replaces an earlier one with the same key."""
    kept = {verdict.key: verdict for verdict in read_results(path)} if path.exists() else {}
    kept |= {verdict.key: verdict for verdict in verdicts}
    machine = f"{psutil.cpu_count()} {platform.machine()} cores, Python {platform.python_version()}"
    table = {"machine": machine, "verdicts": [asdict(verdict) for verdict in kept.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def read_results(path: Path) -> list[Verdict]:
    return [Verdict(**fields) for fields in json.loads(path.read_text())["verdicts"]]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, round(share * len(ordered) + 0.5) - 1))]


def slope(values: Sequence[float]) -> float:
    """Median growth from one value to the next, by the Theil-Sen estimator, which is robust to
    outliers.
    """
    slopes = sorted(
        (values[b] - values[a]) / (b - a)
        for a in range(len(values))
        for b in range(a + 1, len(values))
    )
    return slopes[len(slopes) // 2] if slopes else 0.0


def growth(values: Sequence[float]) -> float:
    """How far both edges of the values' band moved up from the first half to the second.

    Values that hop between levels, such as one spare file or none, have the same band in both
    halves, however often each level occurs. Warming up moves only the lower edge, and a momentary
    peak only the upper edge. A leak moves both.
    """
    before, after = values[: len(values) // 2], values[len(values) // 2 :]
    return min(min(after) - min(before), max(after) - max(before)) if before else 0.0
