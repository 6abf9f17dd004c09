"""Writes docs/internals/reliability.md from the results of the fault suite: `python -m
tests.faults.write_report`.

    make faults      runs the suite, updates tests/faults/results.json, and writes the page

The page lists the promises, the faults with their counts, and the results. Defects found on the way
are in tests/faults/defects.toml.
"""

from __future__ import annotations

import json
import sys
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

PROMISES = {
    "R1": "No accepted group is lost, none trained twice, across kill -9 of trainer, server and agent; "
    'with `durability = "fsync"` across power loss',
    "R2": "No token is lost or doubled across an abort, a lost caller or a lost engine; each carries the "
    "version and the log-probability of the pass that sampled it",
    "R3": "A weight version is live on all ranks or on none",
    "R4": "No token is trained with a lag above `max_lag`",
    "R5": "Memory is bounded with every consumer stopped",
    "R6": "Errors are precise: statuses with a reason from one table",
    "R7": "A dead peer is noticed within 15 s; a stop drains",
    "R8": "Nobody enters without a credential; an agent cannot do what the trainer may",
    "R9": "Versions only grow; one trainer writes",
    "R10": "An old client works with a new server",
}
ON_REAL_ENGINES = ("F21",)
"""Faults that are also run with real engines."""
FAULTS = {
    "F1": ("kill -9 of the trainer at any moment", ("R1", "R9")),
    "F2": ("kill -9 of the server at named points", ("R1",)),
    "F3": ("kill -9 of an engine in mid-turn", ("R2",)),
    "F4": ("kill -9 of an agent", ("R1",)),
    "F5": ("SIGSTOP of each role, for seconds", ("R9", "R7")),
    "F6": ("the network goes dark", ("R1", "R7")),
    "F7": ("a network that delays, throttles, resets, closes, cuts and flips", ("R1", "R2", "R7")),
    "F8": ("callers that read nothing", ("R5",)),
    "F9": ("a thousand clients reconnect at once", ("R5", "R7")),
    "F10": ("uploads of weights that are wrong in any way", ("R3", "R9")),
    "F11": ("requests that make no sense", ("R6",)),
    "F12": ("every rpc fuzzed from its descriptor; a model of the walk", ("R1", "R6")),
    "F13": ("a disk that is full, read-only or fails", ("R1",)),
    "F14": ("power loss", ("R1",)),
    "F16": ("a port in use; a stop under load", ("R7",)),
    "F17": ("a soak, with kills of the server", ("R1", "R5")),
    "F18": ("no, expired and wrong credentials", ("R8",)),
    "F19": ("the staleness gate under random lengths and failures", ("R4",)),
    "F20": ("kill -9 of a worker while thousands of its attempts wait", ("R1",)),
    "F21": ("kill -9 of the engine servers of a pool", ("R1", "R2", "R4")),
    "F22": (
        "the journal on NATS JetStream: kill -9 of it and of the server, its loss of power",
        ("R1",),
    ),
    "F23": ("kill -9 of the actors of a run on Ray", ("R1", "R4")),
    "F24": ("a soak of weight updates under load, some of them faulty", ("R2", "R3", "R5")),
    "F25": ("clients of an earlier release", ("R10",)),
}

LIMITS = """\
- **A bit that flips on the way.** TCP's checksum and the link's find nearly all of them, and HTTP/2\
 ends the connection where a frame no longer parses. What passes both is not noticed in plaintext, \
but for weights, whose chunks and tensors carry XXH3-64 each, and the journal, whose records do: a \
token that became another token is accepted. TLS authenticates every byte; over it a flipped bit is \
a lost connection, and those lose nothing.
- **A trainer that says the greatest epoch there is** (2^63 - 1) is the last one: nothing is \
greater, and the journal remembers it. Only a credential of the role trainer can.
- **grpcio's client**, not the server, answers INTERNAL where a status arrives in the middle of its \
next write on a stream. The server waits until a caller pauses for 150 ms before it refuses; a caller\
 that is held up for longer between two writes may still see it.
- **One message of 64 MiB is decoded at once.** While one with a million map entries is, others wait\
 for about a second on one core; `limits.caller.message_bytes` bounds what a caller may send.
- **A journal on NATS JetStream survives the loss of power** as far as NATS syncs what it acknowledges, \
which 2.10 and later can be told to (`sync_interval: always`). F22 ran with 2.15.1, and takes for granted \
that a file that was synced has its name.
- **`redelivery_count` begins at zero** with each start of the server: that a group was delivered is\
 not in the journal, only that it was used.
"""


def render(verdicts: Sequence[Verdict], machine: str, defects: Sequence[dict[str, object]]) -> str:
    parts = [HEAD.format(machine=machine), _promises(verdicts), _faults(verdicts)]
    parts += [_skipped(verdicts), "## What cannot be promised\n\n" + LIMITS, _defects(defects)]
    return "\n".join(part for part in parts if part)


HEAD = """\
<!-- Written by `make faults`, from tests/faults/results.json and tests/faults/defects.toml. Do not \
edit. -->
# Reliability

What is promised, the faults that were made to happen to it, and what became of it: {machine}.
`make faults` makes them happen again, `make faults FAULTS=3` each three times; a few of each are in\
 `make test`. Every line is of the newest run of its fault, from its seed. `make soak` is the run \
under load.

Where somebody is killed or stopped in a run with groups and a trainer (F1, F2, F4, F5, F7, F12's \
model, `penstock up`), what became of every group and token is decided afterwards, from what the three \
sides wrote down and nothing else: the server's journal, the trainer's ledger, the agents' logs. The \
rules are at the head of `tests/faults/history.py`.
"""


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
        lines.append(f"### {fault}: {what}\n")
        lines.append(
            f"For {' and '.join(promises)}. In all {total:,} times, {broken} violations, {seconds:.0f} s.\n"
        )
        shown = found
        if len(found) > MOST_ROWS:
            # A long table would hide the rows that matter.
            shown = [verdict for verdict in found if verdict.violations]
            lines += ["Survived:\n", *_survived([v for v in found if not v.violations]), ""]
        if shown:
            lines.append("| what | to | count | violations | seed | seconds | |")
            lines.append("|---|---|---|---|---|---|---|")
            lines += [_row(verdict) for verdict in shown]
        lines.append("")
    return "\n".join(lines)


def _survived(verdicts: Sequence[Verdict]) -> list[str]:
    """One line for each combination of place, count, unit and seed. Text after a comma in a name
    goes in brackets.
    """
    runs: dict[tuple[str, int, str, int], dict[str, list[str]]] = {}
    for verdict in verdicts:
        run = runs.setdefault((verdict.where, verdict.count, verdict.unit, verdict.seed), {})
        name, _, kind = verdict.name.partition(", ")
        run.setdefault(name, []).append(kind)
    lines: list[str] = []
    for (where, count, unit, seed), names in runs.items():
        shown = ", ".join(
            f"{name} ({', '.join(kinds)})" if any(kinds) else name for name, kinds in names.items()
        )
        lines.append(f"- to {where}, {count:,} {unit} each, seed {seed}: {shown}")
    return lines


def _row(verdict: Verdict) -> str:
    cells = (
        verdict.name,
        verdict.where,
        f"{verdict.count:,} {verdict.unit}",
        str(verdict.violations),
        str(verdict.seed),
        f"{verdict.seconds:.1f}",
        f"again: `{verdict.again}`" if verdict.again else verdict.figures,
    )
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
        "## Defects found on the way\n",
        "| fault | seed | what was wrong | fix |",
        "|---|---|---|---|",
    ]
    for defect in defects:
        cells = (
            str(defect[key]).strip().replace("|", "\\|") for key in ("fault", "seed", "what", "fix")
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


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
