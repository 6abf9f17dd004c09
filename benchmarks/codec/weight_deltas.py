"""Weight deltas: their size, their speed, and whether the result is bitwise the dense one.

    python -m benchmarks.codec.weight_deltas [--part synthetic|grpo|both] [--steps 6] [--run 1e-6=FOLDER]

1. Synthetic: the demo's model in bf16 with a share of its elements changed, evenly over all tensors, which
   leaves no pattern to compress. Elements change by one unit in the last place, or to any other value.
   Measured are the shipped codec, and each coding of positions with each compression.
2. GRPO: the demo's task, trained by real processes at two learning rates. Every version is kept as the
   trainer published it in bf16, and coded against the previous one. `--run` reads the versions of an
   existing run.

Rounds are interleaved, so that a busy moment of the machine affects every form alike. The figures are
medians. GB/s count the dense bytes of the model. The last line is one JSON object, with null for a part
that was not run. Its figures at 1 % are those of changes to any other value, the harder kind.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from benchmarks.codec.delta_forms import RAW, SAME, SPARSE, Form, apply_shipped, forms, shipped_form

from penstock.demo import settings
from penstock.demo.model import prepare_model
from penstock.demo.tasks import write_sums
from penstock.up.processes import Command, FirstMatch, Process, ProcessFailed, end, explain
from penstock.up.supervisor import SERVING
from penstock.wire import sparse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements = NDArray[np.uint16]
    Pairs = list[tuple[Elements, Elements]]

T = TypeVar("T")

THREADS = 2
SHARES = (0.001, 0.01, 0.05, 0.2)
HEADLINE_SHARE = 0.01

LEARNING_RATES = ("1e-6", "2e-5")
ROUNDS = 5
STEPS = 6


@dataclass(frozen=True)
class Figure:
    """Medians of one form."""

    name: str
    length_bytes: int
    changed: int
    encode_seconds: float
    apply_seconds: float


def read_version(folder: Path) -> dict[str, Elements]:
    """Reads the tensors of a folder of safetensors files, as integers; they must be in bf16."""
    tensors: dict[str, Elements] = {}
    for path in sorted(folder.glob("*.safetensors")):
        octets = np.fromfile(path, np.uint8)
        start = 8 + int(octets[:8].view("<u8")[0])
        header = json.loads(octets[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path}: {name} is {entry['dtype']}, not BF16")
            first, last = (start + offset for offset in entry["data_offsets"])
            tensors[name] = octets[first:last].view(np.uint16)
    if not tensors:
        raise ValueError(f"{folder} has no weights")
    return tensors


def changed_tensors(bases: Sequence[Elements], share: float, *, by_one: bool) -> Pairs:
    """Pairs each tensor with a copy in which about `share` of the elements are changed.

    They change by +-1 at random, or to any other value.
    """
    generator = np.random.default_rng(0)
    pairs: Pairs = []
    for base in bases:
        new = base.copy()
        positions = np.flatnonzero(generator.random(len(base), np.float32) < share)
        if by_one:
            new[positions] += generator.choice(np.array([1, 0xFFFF], np.uint16), len(positions))
        else:
            new[positions] += generator.integers(1, 1 << 16, len(positions)).astype(np.uint16)
        pairs.append((base, new))
    return pairs


def in_threads(calls: Iterable[Callable[[], T]]) -> tuple[list[T], float]:
    """Runs the calls in threads; returns their results and the seconds they took."""
    with ThreadPoolExecutor(THREADS) as pool:
        started = time.perf_counter()
        results = list(pool.map(lambda call: call(), calls))
        return results, time.perf_counter() - started


def measure(wanted: Sequence[Form], pairs: Pairs, rounds: int) -> list[Figure]:
    """Medians over interleaved rounds. Raises ValueError if a result is not bitwise the dense one."""
    pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
    targets = [np.empty_like(base) for base, _ in pairs]
    encode_seconds: dict[str, list[float]] = {form.name: [] for form in wanted}
    apply_seconds: dict[str, list[float]] = {form.name: [] for form in wanted}
    lengths: dict[str, int] = {}
    changed = 0
    for round_number in range(rounds):
        for form in wanted:
            encoded, seconds = in_threads([partial(form.encode, *pair) for pair in pairs])
            encode_seconds[form.name].append(seconds)
            for target, (base, _) in zip(targets, pairs, strict=True):
                target[:] = base
            _, seconds = in_threads(
                [partial(form.apply, t, e) for t, e in zip(targets, encoded, strict=True)]
            )
            apply_seconds[form.name].append(seconds)
            lengths[form.name] = sum(one.length_bytes for one in encoded)
            changed = sum(one.changed_element_count for one in encoded)
            if round_number == 0 and not all(
                np.array_equal(target, new) for target, (_, new) in zip(targets, pairs, strict=True)
            ):
                raise ValueError(f"{form.name}: the result differs from the dense tensors")
    return [
        Figure(
            form.name,
            lengths[form.name],
            changed,
            median(encode_seconds[form.name]),
            median(apply_seconds[form.name]),
        )
        for form in wanted
    ]


def table_head(first: str) -> None:
    print(f"{first:32}{'payload':>10}{'dense':>10}{'payload':>10}{'encode':>10}{'apply':>10}")
    print(f"{'':32}{'MB':>10}{'/payload':>10}{'B/changed':>10}{'GB/s':>10}{'GB/s':>10}")


def table_row(name: str, figure: Figure, dense: int) -> None:
    print(
        f"{name:32}{figure.length_bytes / 1e6:10.3f}{dense / figure.length_bytes:10.1f}"
        f"{figure.length_bytes / figure.changed:10.3f}"
        f"{dense / figure.encode_seconds / 1e9:10.2f}{dense / figure.apply_seconds / 1e9:10.2f}"
    )


def synthetic(model: Path, rounds: int, form_rounds: int) -> dict[str, float]:
    """Runs part 1; returns its figures for the last line."""
    bases = list(read_version(model).values())
    dense = sum(base.nbytes for base in bases)
    print(f"{len(bases)} tensors, {dense / 1e6:.0f} MB in bf16; {THREADS} threads\n")
    headline: dict[str, float] = {}
    shipped: list[tuple[str, Figure]] = []
    tables: list[tuple[str, list[Figure]]] = []
    for share in SHARES:
        for by_one in (True, False):
            name = f"{share:.1%} by {'+-1 ulp' if by_one else 'any amount'}"
            pairs = changed_tensors(bases, share, by_one=by_one)
            (figure,) = measure([shipped_form()], pairs, rounds)
            shipped.append((name, figure))
            if form_rounds:
                tables.append((name, measure(list(forms()), pairs, form_rounds)))
            if share == HEADLINE_SHARE and not by_one:
                headline = {
                    "bytes_ratio_at_1_percent": round(dense / figure.length_bytes, 2),
                    "encode_gb_per_second": round(dense / figure.encode_seconds / 1e9, 3),
                }
    table_head("The codec; changed elements")
    for name, figure in shipped:
        table_row(name, figure, dense)
    print("every applied result was bitwise equal to the dense tensors\n")
    for name, figures in tables:
        table_head(name)
        for figure in figures:
            table_row("  " + figure.name, figure, dense)
        print()
    return headline


async def train(model: Path, out: Path, learning_rate: str, steps: int) -> None:
    """Runs server, worker and trainer like the demo; every version stays in `out`/weights."""
    scale = dataclasses.replace(
        settings.SMALL_MODEL, learning_rate=float(learning_rate), warmup_steps=0
    )
    plan = settings.Plan(
        model=model,
        model_name=model.name,
        out=out,
        task=settings.SUMS,
        steps=steps,
        seed=0,
        listen="127.0.0.1:0",
        scale=scale,
    )
    overrides = (
        # The demo's schedule decays to zero; here every step must have the stated rate.
        "train.schedule=constant",
        "weights.transport=checkpoint",
        f"weights.keep={steps + 1}",
    )
    write_sums(plan.tasks_file)
    running: list[Process] = []
    try:
        serves = FirstMatch(SERVING)
        command = settings.serve_command(plan, None)
        server = start(out, "server", command, settings.SERVER_THREADS, serves)
        running.append(server)
        address = await serves.wait(server)
        plan.trainer_config_file.write_text(settings.trainer_config(plan, address))
        running.append(start(out, "worker", settings.rollout_command(plan, address), 1))
        options = (part for override in overrides for part in ("--set", override))
        command = (*settings.train_command(plan), *options)
        trainer = start(out, "trainer", command, settings.TRAINER_THREADS)
        running.append(trainer)
        if status := await trainer.wait():
            raise ProcessFailed(explain(trainer, status))
    finally:
        await end(running)


def start(
    out: Path,
    name: str,
    arguments: tuple[str, ...],
    threads: int,
    on_line: Callable[[str], None] | None = None,
) -> Process:
    """Starts one process; its log is in `out`."""
    command = Command(name, arguments, out / f"{name}.log", settings.environment(threads))
    return Process.start(command, on_line)


def version_folders(run: Path) -> list[Path]:
    """Folders of the versions that a run kept, in order."""
    folders = [path for path in (run / "weights").glob("*") if path.name.isdigit()]
    return sorted(folders, key=lambda path: int(path.name))


def update_rows(model: Path, run: Path) -> float:
    """Prints a row for each update of a run; returns the median ratio of dense bytes to payload."""
    older = read_version(model)
    ratios: list[float] = []
    for folder in version_folders(run):
        newer = read_version(folder)
        # If the embeddings are tied, the base's file may contain them once or twice.
        pairs = [(older[name], tensor) for name, tensor in newer.items()]
        started = time.perf_counter()
        encoded = sparse.encode_all(pairs, threads=THREADS)
        seconds = time.perf_counter() - started
        for (base, new), one in zip(pairs, encoded, strict=True):
            target = base.copy()
            apply_shipped(target, one)
            if not np.array_equal(target, new):
                raise ValueError(f"{folder}: the result differs from the dense tensors")
        dense = sum(new.nbytes for _, new in pairs)
        length = sum(one.length_bytes for one in encoded)
        changed = sum(one.changed_element_count for one in encoded)
        kinds = Counter(one.encoding for one in encoded)
        # An empty payload counts as one byte, so that the ratio stays finite.
        ratios.append(dense / max(length, 1))
        print(
            f"{folder.name:>8}{changed / (dense / 2):12.3%}{kinds[SAME]:8}{kinds[SPARSE]:8}{kinds[RAW]:8}"
            f"{length:14,}{ratios[-1]:12.1f}{length / max(changed, 1):11.3f}{dense / seconds / 1e9:10.2f}"
        )
        older = newer
    if not ratios:
        raise ValueError(f"{run} has no folder weights/<version>")
    return median(ratios)


def grpo(model: Path, steps: int, runs: dict[str, Path]) -> dict[str, float]:
    """Runs part 2; returns the median ratio of each learning rate."""
    ratios: dict[str, float] = {}
    for learning_rate in LEARNING_RATES:
        with tempfile.TemporaryDirectory(prefix="delta-") as temporary:
            run = runs.get(learning_rate)
            if run is None:
                run = Path(temporary)
                print(f"training {steps} steps at learning rate {learning_rate} ...", flush=True)
                asyncio.run(train(model, run, learning_rate, steps))
            print(f"GRPO at learning rate {learning_rate}: each version against the previous one")
            print(
                f"{'version':>8}{'changed':>12}{'SAME':>8}{'SPARSE':>8}{'RAW':>8}"
                f"{'bytes':>14}{'dense/bytes':>12}{'B/changed':>11}{'GB/s':>10}"
            )
            ratio = update_rows(model, run)
            ratios[f"bytes_ratio_lr_{learning_rate}"] = round(ratio, 2)
            print(
                f"median of dense/bytes: {ratio:.1f}; every result equals the dense one bitwise\n"
            )
    return ratios


def named_run(text: str) -> tuple[str, Path]:
    learning_rate, separator, folder = text.partition("=")
    if not separator or learning_rate not in LEARNING_RATES:
        raise argparse.ArgumentTypeError(f"must be RATE=FOLDER, with RATE one of {LEARNING_RATES}")
    return learning_rate, Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", default="both", choices=("synthetic", "grpo", "both"))
    parser.add_argument("--model", help="model directory or hub name; default: the demo's")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of the codec in part 1")
    parser.add_argument(
        "--form-rounds", type=int, default=3, help="rounds of the other codings; 0 skips them"
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of each GRPO run")
    parser.add_argument(
        "--run",
        type=named_run,
        action="append",
        default=[],
        metavar="RATE=FOLDER",
        help="read the versions of this run instead of training",
    )
    arguments = parser.parse_args()
    model = prepare_model(arguments.model, print)
    figures: dict[str, float | None] = {
        "bytes_ratio_at_1_percent": None,
        "encode_gb_per_second": None,
        **{f"bytes_ratio_lr_{rate}": None for rate in LEARNING_RATES},
    }
    if arguments.part != "grpo":
        figures.update(synthetic(model, arguments.rounds, arguments.form_rounds))
    if arguments.part != "synthetic":
        figures.update(grpo(model, arguments.steps, dict(arguments.run)))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
