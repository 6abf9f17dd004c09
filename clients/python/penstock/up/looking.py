"""The commands that look at runs: `penstock runs`, `penstock logs` and `penstock up RUN --status`.

Exit status: 0; 1 if there is no run; 2 if a name is wrong.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from penstock.common.answers import Exit, as_json, complain, show
from penstock.common.suggestions import did_you_mean, listed, unreadable
from penstock.up.columns import in_columns, terminal_width
from penstock.up.config import UpConfigInvalid, load
from penstock.up.runs import RunState, find_runs, is_run, is_under_way, log_files, read_run
from penstock.up.state import FolderUnusable, RoleState, last_words, read_state

POLL_SECONDS = 0.2
LINE_BYTES = 400
"""Of a log are read for each line that is shown, as a first guess."""


def runs(folder: Path) -> int:
    """Lists the runs in a folder, the last one last. Returns the exit status."""
    try:
        found = [read_run(path, time.time()) for path in find_runs(folder)]
    except OSError as error:
        hint = (
            "" if folder.exists() else "; a run makes it, or name the folder that holds your runs"
        )
        return complain("penstock runs", f"{unreadable(folder, error)}{hint}")
    if not found:
        return complain("penstock runs", f"there is no run in {folder}", Exit.FAILED)
    found.sort(key=lambda run: run.started or 0.0)
    heads = ("state", "step", "reward", "left", "started", "run")
    rows = [(*_figures(run), _moment(run.started), run.folder) for run in found]
    text = _table(heads, rows, expendable=("started", "left", "reward"), keep_end=True)
    show(text, {"runs": [asdict(run) for run in found]})
    return Exit.DONE


def status(path: Path, overrides: Sequence[str]) -> int:
    """Shows the run in a folder, or in the folder that a file of `penstock up` names. Returns the exit
    status."""
    try:
        out = path if path.is_dir() else load(path, overrides).up.out
        stored = read_state(out)
        run = read_run(out, time.time()) if is_run(out) else None
    except (UpConfigInvalid, FolderUnusable, OSError) as error:
        return complain("penstock up", error)
    if run is None:
        return complain("penstock up", f"nothing has run in {out}", Exit.FAILED)
    roles = [RoleState(**each) for each in stored["roles"]] if stored else []
    state, step, reward, left = _figures(run)
    remaining = "" if run.seconds_left is None else f", {left} left"
    text = f"{out}: {state}, step {step}, reward {reward}{remaining}"
    if roles:
        heads = ("role", "state", "since", "restarts", "pid", "where", "last words")
        rows = [_role(role) for role in roles]
        text += "\n" + _table(heads, rows, expendable=("where", "pid", "since", "restarts"))
    show(text, {**asdict(run), "roles": [asdict(role) for role in roles]})
    return Exit.DONE


def logs(folder: Path, roles: Sequence[str], lines: int, follow: bool) -> int:
    """Prints the last lines of the logs in a run's folder, and those to come. Returns the exit status."""
    if not folder.is_dir() or not (is_run(folder) or log_files(folder)):
        wrong = f"there is no run in {folder}; `penstock runs` lists some"
        return complain("penstock logs", wrong, Exit.FAILED)
    known = log_files(folder)
    for role in roles:
        if role not in known:
            hint = did_you_mean(role, known) or f"; it has {listed(known) or 'none'}"
            return complain("penstock logs", f"{folder} has no log of {role}{hint}")
    tails = _Tails(folder, roles, lines)
    try:
        while True:
            # Asked first, so that the last lines of a run that ends now are read.
            under_way = is_under_way(folder)
            for role, text in tails.read():
                sys.stdout.write(_log_line(role, text, len(known) > 1))
            sys.stdout.flush()
            if not follow or not under_way:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return Exit.DONE
    except BrokenPipeError:
        # `| head` has what it wanted; nothing may be flushed at the exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.DONE
    if follow:
        sys.stderr.write(f"penstock logs: the run in {folder} does not run\n")
    return Exit.DONE


class _Tails:
    """The logs of a folder, each read from its last lines on."""

    def __init__(self, folder: Path, roles: Sequence[str], lines: int) -> None:
        self._folder, self._roles, self._lines = folder, roles, lines
        self._read_until: dict[str, int] = {}

    def read(self) -> Iterator[tuple[str, str]]:
        """The role and the text of each new whole line."""
        for role, path in log_files(self._folder).items():
            if self._roles and role not in self._roles:
                continue
            begin = self._read_until.get(role)
            begin = _begin(path, self._lines) if begin is None else begin
            with path.open("rb") as file:
                file.seek(begin)
                whole, end, _ = file.read().rpartition(b"\n")
            self._read_until[role] = begin + len(whole) + len(end)
            for line in whole.split(b"\n") if end else ():
                yield role, line.decode(errors="replace")


def _begin(path: Path, lines: int) -> int:
    """Where the last lines of a file begin, in bytes."""
    size = path.stat().st_size
    wanted = LINE_BYTES * (lines + 1)
    while True:
        tail = _end_of(path, min(wanted, size))
        ends = [at for at, byte in enumerate(tail) if byte == 0x0A]
        if len(ends) > lines:
            return size - len(tail) + ends[-lines - 1] + 1
        if len(tail) >= size:
            return 0
        wanted *= 4


def _end_of(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-count, os.SEEK_END)
        return file.read(count)


def _figures(run: RunState) -> tuple[str, str, str, str]:
    steps = "?" if run.steps is None else str(run.steps)
    reward = "-" if run.reward is None else f"{run.reward:.3f}"
    left = "-" if run.seconds_left is None else str(timedelta(seconds=round(run.seconds_left)))
    return run.state, f"{run.step}/{steps}", reward, left


def _role(role: RoleState) -> tuple[str, ...]:
    words = last_words(Path(role.log)) if role.log else ""
    return (
        role.name,
        role.state,
        _moment(role.since),
        str(role.restarts),
        str(role.pid or ""),
        role.address or role.host,
        words,
    )


def _moment(seconds: float | None) -> str:
    """Today's moments by their time, others by their date too."""
    if seconds is None:
        return "-"
    then = time.localtime(seconds)
    today = time.strftime("%F", then) == time.strftime("%F")
    return time.strftime("%H:%M:%S" if today else "%F %H:%M", then)


def _log_line(role: str, text: str, named: bool) -> str:
    if as_json():
        return json.dumps({"role": role, "line": text}) + "\n"
    return f"{role:<8} | {text}\n" if named else f"{text}\n"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> str:
    return "\n".join(in_columns(heads, rows, width=terminal_width(), **options))
