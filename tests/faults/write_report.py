"""Writes docs/internals/reliability.md from the results of the fault suite: `python -m
tests.faults.write_report`.

    make faults      runs the suite, updates tests/faults/results.json, and writes the page

The page lists the promises, the faults with their counts, and the results. Defects found on the way
are in tests/faults/defects.toml.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.faults.report import Verdict, read_results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results.json"
DEFECTS = HERE / "defects.toml"
PAGE = ROOT / "docs" / "internals" / "reliability.md"

MOST_ROWS = 30
WIDTH = 100

PROMISES = {
    "R1": "No accepted group is lost, and none is trained twice, after kill -9 of trainer, server or "
    'agent; with `durability = "fsync"` also after power loss',
    "R2": "No token is lost or doubled by an abort, a lost caller or a lost engine; each carries the "
    "version and the log-probability of the pass that sampled it",
    "R3": "A weight version is active on all ranks of an engine or on none",
    "R4": "No token is trained with a lag above `max_lag`",
    "R5": "Memory is bounded even if no consumer reads",
    "R6": "Every error is a status with a reason from one table",
    "R7": "A dead peer is noticed after about 15 s; a stop drains",
    "R8": "With authentication configured, every call but a health check needs a credential, and a role "
    "allows only its own calls",
    "R9": "Versions only increase; one trainer writes",
    "R10": "An old client works with a new server",
    "R11": "An attempt that hangs holds the place of its group no longer than its time limit",
}
ON_REAL_ENGINES = ("F21",)
"""Faults that are also run with real engines."""
FAULTS = {
    "F1": ("kill -9 of the trainer at any moment", ("R1", "R9")),
    "F2": ("kill -9 of the server at failpoints", ("R1",)),
    "F3": ("kill -9 of an engine during a turn", ("R2",)),
    "F4": ("kill -9 of an agent", ("R1",)),
    "F5": ("SIGSTOP of each role for seconds", ("R9", "R7")),
    "F6": ("a network link that is set down", ("R1", "R7")),
    "F7": (
        "a network that delays, throttles, resets, closes, cuts and flips bits",
        ("R1", "R2", "R7"),
    ),
    "F8": ("callers that read no answers", ("R5",)),
    "F9": ("a thousand clients that reconnect at once", ("R5", "R7")),
    "F10": ("faulty uploads of weights", ("R3", "R9")),
    "F11": ("requests that make no sense", ("R6",)),
    "F12": ("fuzzing of every rpc, and a model of a whole run", ("R1", "R6")),
    "F13": ("a disk that is full, read-only or fails", ("R1",)),
    "F14": ("power loss", ("R1",)),
    "F16": ("a port in use; a stop under load", ("R7",)),
    "F17": ("a soak with kills of the server", ("R1", "R5")),
    "F18": ("missing, expired and wrong credentials", ("R8",)),
    "F19": ("the staleness gate under random lengths and failures", ("R4",)),
    "F20": ("kill -9 of a worker with thousands of waiting attempts", ("R1",)),
    "F21": ("kill -9 of the engine servers of a pool", ("R1", "R2", "R4")),
    "F22": ("NATS JetStream: kill -9 of NATS and of the server, and power loss", ("R1",)),
    "F23": ("kill -9 of the actors of a run on Ray", ("R1", "R4")),
    "F24": ("a soak of weight updates under load, some of them faulty", ("R2", "R3", "R5")),
    "F25": ("clients of an earlier release", ("R10",)),
    "F26": ("attempts that never end", ("R11",)),
}
SHOWN = {
    "certificate of nobody, or of another": "no client certificate, or one of an unknown authority",
    "NATS stays away for longer than is waited": "NATS away for longer than `patience_seconds`",
}
"""Plainer names of some results."""

LIMITS = (
    "**Flipped bits in plaintext.** Weights and journal records carry checksums (XXH3-64). For "
    "everything else, a bit that passes the checksums of TCP and of the link, and still parses, is "
    "not noticed: a token may become another token. Over TLS a flipped bit ends the connection, and "
    "nothing is lost.",
    "**The greatest epoch** (2^63 - 1). No trainer can follow one that uses it, because the journal "
    "remembers it. Only a credential of the role trainer can use it.",
    "**INTERNAL from grpcio's client**, if a status arrives while the client writes to a stream. The "
    "server refuses only after its caller has paused for 150 ms. A caller that pauses longer between "
    "two writes may still see it.",
    "**One message of 64 MiB** is decoded at once. With a million map entries, it delays other calls "
    "by about a second on one core. `limits.caller.message_bytes` sets a lower limit.",
    "**Power loss under NATS JetStream** is survived only if NATS syncs each write "
    "(`sync_interval: always`, from 2.10 on). F22 ran with 2.15.1. It assumes that a synced file "
    "keeps its name.",
    "**`redelivery_count`** starts at zero with each start of the server. The journal records that a "
    "group was trained, not that it was delivered.",
)


def render(verdicts: Sequence[Verdict], machine: str, defects: Sequence[dict[str, object]]) -> str:
    limits = "## Limits\n\n" + "\n".join(_item(limit) for limit in LIMITS) + "\n"
    parts = [
        HEAD + _wrapped(METHOD.format(machine=machine)) + "\n",
        _promises(verdicts),
        _faults(verdicts),
    ]
    parts += [_skipped(verdicts), limits, _defects(defects)]
    return "\n".join(part for part in parts if part)


HEAD = """\
<!-- Written by `make faults`, from tests/faults/results.json and tests/faults/defects.toml. Do not \
edit. -->
# Reliability

This page shows what Penstock promises, which faults were injected to test each promise, and the \
results.
It also lists what cannot be promised, and the defects that the faults revealed.

| command | runs |
|---|---|
| `make faults` | every fault but the soaks, as often as `tests/faults/report.py` lists; writes this page |
| `make faults FAULTS=3` | every fault three times; `ARGS="-k f7"` selects some, `SEED=7` the seed |
| `make fuzz` | F12 at its full count |
| `make soak` | F17 and F24: runs under load |
| `make test` | a few repetitions of each fault |

"""
METHOD = """\
Each line below is the newest run of its fault, on {machine}. Column "to" names the target; `fake` \
is a server around the fake engine of the tests. Case number i uses the seed plus i, so any case can \
be repeated alone. After runs with groups and a trainer (F1, F2, F4, F5, F7, the \
model of F12, `penstock up`), a checker decides what happened to every group and token. It reads only \
the server's journal, the trainer's ledger and the agents' logs. `tests/faults/history.py` lists its \
rules.
"""


def _wrapped(text: str, first: str = "", later: str = "") -> str:
    """`text` as lines of Markdown. Lines do not break within code."""
    code = re.compile(r"`[^`]*`")
    lines = textwrap.wrap(
        code.sub(lambda found: found[0].replace(" ", "\0"), text),
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\0", " ")


def _item(text: str) -> str:
    return _wrapped(text, "- ", "  ")


def _promises(verdicts: Sequence[Verdict]) -> str:
    lines = ["## Promises\n", "| | promise | faults | violations |", "|---|---|---|---|"]
    for promise, what in PROMISES.items():
        faults = [fault for fault, (_, held) in FAULTS.items() if promise in held]
        found = [verdict for verdict in verdicts if verdict.fault in faults and verdict.count]
        ran = sorted({verdict.fault for verdict in found}, key=_number)
        broken = sum(verdict.violations for verdict in found) if found else "not run"
        lines.append(f"| {promise} | {what} | {', '.join(ran)} | {broken} |")
    return "\n".join(lines) + "\n"


def _faults(verdicts: Sequence[Verdict]) -> str:
    lines = ["## Faults\n"]
    for fault, (what, promises) in FAULTS.items():
        found = [verdict for verdict in verdicts if verdict.fault == fault and not verdict.skipped]
        if not found:
            continue
        total = sum(verdict.count for verdict in found)
        broken = sum(verdict.violations for verdict in found)
        seconds = sum(verdict.seconds for verdict in found)
        units = found[0].unit if len(found) == 1 else "times"
        lines.append(f"### {fault}: {what}\n")
        tested = f"{', '.join(promises)}: {total:,} {units}, {broken} violations, {seconds:.0f} s"
        shown = found
        if len(found) > MOST_ROWS:
            # A long table would hide the rows that matter.
            shown = [verdict for verdict in found if verdict.violations]
            survived = _survived([v for v in found if not v.violations])
            lines += [f"{tested}. Survived:\n", *survived, ""]
            tested = "Not survived"
        if len(shown) == 1 and not broken:
            (only,) = shown
            target = f"; to: {only.where}" if only.where else ""
            figures = f" {only.figures[0].upper()}{only.figures[1:]}." if only.figures else ""
            lines.append(
                _wrapped(f"{tested}{target}; seed {only.seed}. {only.name.capitalize()}.{figures}")
            )
            lines.append("")
        elif shown:
            lines += [*_table(shown, tested), ""]
    return "\n".join(lines)


def _survived(verdicts: Sequence[Verdict]) -> list[str]:
    """One list for each count and seed. Text after a comma in a name is a variant; names that have
    the same variants in the same places are one item.
    """
    runs: dict[tuple[str, int], dict[str, dict[str, list[str]]]] = {}
    for verdict in verdicts:
        names = runs.setdefault((_count(verdict), verdict.seed), {})
        name, _, variant = verdict.name.partition(", ")
        names.setdefault(name, {}).setdefault(variant, []).append(verdict.where)
    lines: list[str] = []
    for (count, seed), names in runs.items():
        items: dict[str, list[str]] = {}
        for name, variants in names.items():
            for places in dict.fromkeys(map(tuple, variants.values())):
                of = ", ".join(v for v, found in variants.items() if v and tuple(found) == places)
                where = f"{' and '.join(places)}{f' ({of})' if of else ''}"
                items.setdefault(where, []).append(f"`{name}`")
        lines.append(f"{count.capitalize()} each, seed {seed}:\n")
        lines += [_item(f"{where}: {', '.join(shown)}") for where, shown in items.items()]
        lines.append("")
    return lines[:-1]


COLUMNS = ("what", "to", "count", "violations", "seed", "seconds", "measured")


def _table(verdicts: Sequence[Verdict], title: str) -> list[str]:
    """The results as a table after its title. Columns with one value for all rows are in the title."""
    rows = [_cells(verdict) for verdict in verdicts]
    columns = list(range(len(COLUMNS)))
    if len(rows) > 1:
        same = [column for column in (1, 3, 4, 6) if len({row[column] for row in rows}) == 1]
        columns = [column for column in columns if column not in same]
        title += "".join(
            f"; {form.format(rows[0][column])}"
            for column, form in ((1, "to: {}"), (4, "seed {}"))
            if column in same and rows[0][column]
        )
    lines = [f"{title}.\n", _line([COLUMNS[column] for column in columns])]
    lines.append("|" + "---|" * len(columns))
    return lines + [_line([row[column] for column in columns]) for row in rows]


def _cells(verdict: Verdict) -> tuple[str, ...]:
    return (
        SHOWN.get(verdict.name, verdict.name),
        verdict.where,
        _count(verdict),
        str(verdict.violations),
        str(verdict.seed),
        f"{verdict.seconds:.1f}",
        f"again: `{verdict.again}`" if verdict.again else verdict.figures,
    )


def _count(verdict: Verdict) -> str:
    once = verdict.count == 1 and verdict.unit == "times"
    return "once" if once else f"{verdict.count:,} {verdict.unit}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _skipped(verdicts: Iterable[Verdict]) -> str:
    """The faults without results: those that were skipped, and those of the table without any line."""
    kept = list(verdicts)
    lines = [f"- {v.fault}, {v.name}: {v.skipped}" for v in kept if v.skipped]
    there = {verdict.fault for verdict in kept}
    lines += [
        f"- {fault}, {what}: no result is kept here; `make faults ARGS='-k {fault.lower()}_'`"
        for fault, (what, _) in FAULTS.items()
        if fault not in there
    ]
    lines += [
        f"- {fault}, {FAULTS[fault][0]}: no result with real engines is kept here"
        for fault in ON_REAL_ENGINES
        if fault in there and not any(v.fault == fault and v.where.lower() == "vllm" for v in kept)
    ]
    if not lines:
        return ""
    return "## Not run\n\n" + "\n".join(lines) + "\n"


def _defects(defects: Sequence[dict[str, object]]) -> str:
    lines = [
        "## Defects\n",
        _wrapped(
            "What the faults revealed, by fault: how to reproduce it before its fix, what was wrong, "
            "and the fix."
        )
        + "\n",
    ]
    for fault in sorted({str(defect["fault"]) for defect in defects}, key=_number):
        lines.append(f"**{fault}**\n")
        lines += [_item(_defect(each)) for each in defects if each["fault"] == fault]
        lines.append("")
    return "\n".join(lines)


def _defect(defect: dict[str, object]) -> str:
    seed = defect["seed"]
    shown = f"seed {seed}" if isinstance(seed, int) else str(seed)
    return f"*{shown}*: {defect['what']} Fix: {defect['fix']}"


def _number(fault: str) -> int:
    return int(fault[1:])


def written(results: Path = RESULTS, defects: Path = DEFECTS) -> str:
    """The page for these files."""
    verdicts = sorted(read_results(results), key=lambda v: _number(v.fault))
    machine: str = json.loads(results.read_text())["machine"]
    found = tomllib.loads(defects.read_text()).get("defect", [])
    return render(verdicts, machine, found)


if __name__ == "__main__":
    PAGE.write_text(written())
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} written\n")
