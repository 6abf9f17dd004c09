"""`penstock journal`: lists, verifies and exports what a server stored.

It neither locks nor changes the folder. If a server writes to it meanwhile, the output shows the state at
the moment of reading.

Exit status: 0; 1 if a record is corrupt; 2 if there is no journal, or if the output cannot be written.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import click

from penstock.common.answers import Exit, as_json, complain, show
from penstock.server.groups.buffer import BufferedGroup
from penstock.server.groups.recovery import Recovered
from penstock.server.journal.disk.reading import NoJournal, StoredJournal, open_stored
from penstock.server.journal.disk.segment import SegmentCorrupt
from penstock.server.journal.disk.segment_reader import (
    FileMissing,
    SegmentReader,
    check_last,
    check_order,
)
from penstock.server.journal.protocol import Stored
from penstock.server.journal.tools.contents import read_contents, recover_stored
from penstock.server.journal.tools.export import group_rows, open_writer, state_of

P = ParamSpec("P")

EXPORTS = (".jsonl", ".parquet")
OK, CORRUPT, UNREADABLE = Exit.DONE, Exit.FAILED, Exit.MISUSED


class NotExported(Exception):
    """The output file cannot be written. The message is shown to the user."""


def _guarded(command: Callable[P, int]) -> Callable[P, int]:
    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except SegmentCorrupt as error:
            said = f"corrupt: {error}; `penstock journal verify` shows details"
            return complain("penstock journal", said, CORRUPT)
        except (NoJournal, NotExported) as error:
            return complain("penstock journal", error, UNREADABLE)

    return run


# list


@_guarded
def list_stored(folder: Path) -> int:
    """Print what a journal holds; returns the exit status."""
    with open_stored(folder) as journal:
        contents = read_contents(journal)
    if sys.stdout.isatty() and not as_json():
        _show_tables(contents)
    else:
        show("\n".join(_lines(contents)), contents)
    return OK


def _head(contents: dict[str, Any]) -> list[str]:
    folder, writer = contents["folder"], contents["writer"]
    lines = [] if writer is None else [_writing(folder, writer)]
    run = f"run {contents['run_id']}, " if contents["run_id"] else ""
    lines.append(
        f"{folder}: {run}weight version {contents['weight_version']}, trainer epoch "
        f"{contents['trainer_epoch']}, {contents['starts']} starts, {contents['stored_bytes']} bytes"
    )
    if contents["torn_bytes"]:
        torn = "are torn: they were never acknowledged"
        state = torn if writer is None else "are being written"
        lines.append(f"{contents['torn_bytes']} bytes at the end {state}")
    return lines


def _writing(folder: str, writer: int) -> str:
    return f"a server (process {writer}) is writing to {folder}: this is a momentary view"


def _lines(contents: dict[str, Any]) -> Iterator[str]:
    """Yield one line per item: its kind, its id, and name=value pairs."""
    yield from _head(contents)
    kinds = ("waiting", "under-way", "open", "finished")
    for kind, (title, rows) in zip(kinds, _sections(contents), strict=True):
        yield f"{len(rows)} {title}"
        for row in rows:
            (_, name), *values = row.items()
            pairs = " ".join(f"{key.replace(' ', '-')}={value}" for key, value in values if value)
            yield f"{kind} {name} {pairs}".rstrip()


def _sections(contents: dict[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the title and rows of each section; the first value of a row is its id."""
    waiting = [
        {"task": t["task_id"], "purpose": t["purpose"], "attempts": str(t["group_size"])}
        for t in contents["tasks_waiting"]
    ]
    under_way = [
        {
            "group": g["group_id"],
            "task": g["task_id"],
            "purpose": g["purpose"],
            "closed": f"{sum(a['closed'] for a in g['attempts'])}/{g['group_size']}",
            "leased": str(sum(a["leased"] for a in g["attempts"])),
            "admitted": str(g["admitted_weight_version"]),
        }
        for g in contents["groups_under_way"]
    ]
    trajectories = [
        {
            "trajectory": t["trajectory_id"],
            "group": t["group_id"],
            "turns": str(t["turn_count"]),
            "tokens": str(t["token_count"]),
        }
        for t in contents["open_trajectories"]
    ]
    finished = [
        {
            "group": g["group_id"],
            "task": g["task_id"],
            "purpose": g["purpose"],
            "trajectories": str(g["trajectory_count"]),
            "tokens": str(g["token_count"]),
            "bytes": str(g["byte_count"]),
            "versions": _versions(g),
            "state": g["state"],
            "step": "" if g["step"] is None else str(g["step"]),
        }
        for g in contents["finished_groups"]
    ]
    return [
        ("tasks waiting", waiting),
        ("groups under way", under_way),
        ("open trajectories", trajectories),
        ("finished groups", finished),
    ]


def _versions(group: dict[str, Any]) -> str:
    oldest, newest = group["oldest_weight_version"], group["newest_weight_version"]
    if oldest is None:
        return ""
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _show_tables(contents: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for line in _head(contents):
        console.print(line, markup=False)
    for title, rows in _sections(contents):
        if not rows:
            console.print(f"no {title}")
            continue
        table = Table(title=f"{len(rows)} {title}", title_justify="left")
        for name in rows[0]:
            numeric = all(row[name].isdigit() or not row[name] for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row.values()))
        console.print(table)


# verify


@dataclass(frozen=True)
class Problem:
    """The first place in a segment that differs from what was written."""

    offset: int
    problem: str


@dataclass(eq=False)
class SegmentReport:
    """The result of checking one file."""

    name: str
    file_bytes: int
    stored_bytes: int = 0
    """Up to the end of its last whole record."""
    torn_bytes: int = 0
    records: dict[str, int] = field(default_factory=dict[str, int])
    """Number of records by kind."""
    corrupt: Problem | None = None


@_guarded
def verify(folder: Path) -> int:
    """Check every record of every segment and print the result; returns the exit status."""
    with open_stored(folder) as journal:
        reports, missing = check_all(journal.segments)
    corrupt = _any_corrupt(reports) or bool(missing)
    found = {
        "folder": str(folder),
        "whole": not corrupt,
        "writer": journal.writer,
        "missing": missing,
        "obsolete_files": [path.name for path in journal.obsolete],
        "segments": [asdict(report) for report in reports],
    }
    lines = (*_report_lines(journal, reports), *missing, "corrupt" if corrupt else "whole")
    show("\n".join(lines), found)
    return CORRUPT if corrupt else OK


def check_all(segments: Sequence[SegmentReader]) -> tuple[list[SegmentReport], list[str]]:
    """Check each file; returns the reports, and a message for each missing file.

    An incomplete copy of a folder may lack files.
    """
    state = Recovered()
    reports: list[SegmentReport] = []
    missing: list[str] = []
    before: SegmentReader | None = None
    for segment in segments:
        try:
            check_order(before, segment)
        except FileMissing as error:
            missing.append(f"the file before {error.path.name} is missing")
        except SegmentCorrupt as error:
            # The error is at the end of the previous file, or in this file's header. `_check` finds
            # the latter again.
            if error.path != segment.path and reports[-1].corrupt is None:
                reports[-1].corrupt = Problem(error.offset, error.problem)
        reports.append(_check(segment, None if _any_corrupt(reports) or missing else state))
        before = segment
    try:
        check_last(before)
    except FileMissing as error:
        missing.append(f"the file after {error.path.name} is missing")
    return reports, missing


def _any_corrupt(reports: list[SegmentReport]) -> bool:
    return any(report.corrupt is not None for report in reports)


def _check(segment: SegmentReader, state: Recovered | None) -> SegmentReport:
    """Read one file whole; with `state`, also check that its records fit the earlier ones."""
    report = SegmentReport(segment.path.name, segment.byte_count)
    try:
        for frame in segment.frames():
            record = segment.record(frame)
            kind = record.WhichOneof("record") or "unknown"
            if state is not None:
                try:
                    state.apply(record, Stored(segment.number, frame.offset, frame.length))
                except (ValueError, KeyError) as error:
                    problem = f"it contradicts earlier records: {error}"
                    if kind == "unknown":
                        problem = str(error)
                    raise SegmentCorrupt(segment.path, frame.offset, problem) from error
            report.records[kind] = report.records.get(kind, 0) + 1
    except SegmentCorrupt as error:
        report.corrupt = Problem(error.offset, error.problem)
    report.stored_bytes, report.torn_bytes = segment.end, segment.torn_bytes
    return report


def _report_lines(journal: StoredJournal, reports: list[SegmentReport]) -> Iterator[str]:
    if journal.writer is not None:
        yield _writing(str(journal.folder), journal.writer)
    counts: Counter[str] = Counter()
    for report in reports:
        records = sum(report.records.values())
        line = (
            f"{report.name}: {records} records, {report.stored_bytes} of {report.file_bytes} bytes"
        )
        if report.torn_bytes:
            ended = (
                "are being written" if journal.writer else "are torn, and were never acknowledged"
            )
            line += f"; {report.torn_bytes} bytes after them {ended}"
        yield line
        if report.corrupt is not None:
            yield f"{report.name} is corrupt at {report.corrupt.offset}: {report.corrupt.problem}"
        counts.update(report.records)
    for kind, count in sorted(counts.items()):
        yield f"{kind} {count}"
    for path in journal.obsolete:
        yield f"{path.name}: replaced by a snapshot, not read"


# export


@_guarded
def export(folder: Path, out: Path, state: str) -> int:
    """Write finished groups to a file; returns the exit status.

    Raises ModuleNotFoundError for Parquet if pyarrow is not installed.
    """
    if out.suffix not in EXPORTS:
        raise click.UsageError(f"OUT must end in {' or '.join(EXPORTS)}, got {str(out)!r}")
    if out.resolve().is_relative_to(folder.resolve()):
        raise click.UsageError(f"{out} is inside the journal's folder; choose another path")
    if out.exists():
        raise click.UsageError(f"{out} already exists; remove it, or choose another path")
    with open_stored(folder) as journal:
        found = recover_stored(journal, journal.records())
        chosen = [g for g in found.finished.values() if state in ("all", state_of(g))]
        try:
            rows = _export(journal, chosen, out)
        except OSError as error:
            raise NotExported(f"{out}: {error.strerror or error}") from error
    found = {"out": str(out), "groups": len(chosen), "trajectories": rows}
    show(f"{out}: {len(chosen)} groups, {rows} trajectories", found)
    return OK


def _export(journal: StoredJournal, groups: list[BufferedGroup], out: Path) -> int:
    count = 0
    with open_writer(out) as write:
        for group in groups:
            assert group.stored is not None
            rows = group_rows(journal.read(group.stored).group_finished, group)
            if rows:
                write(rows)
            count += len(rows)
    return count
