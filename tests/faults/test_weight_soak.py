"""Weight updates under load: no mislabelled token, no lost turn, no growing memory.

    make soak UPDATES=200

Trajectories of one to three turns run continuously, and callers stop and continue some of them.
Meanwhile versions arrive as whole payloads, files and deltas. They are switched to at once or on
request of the trainer's stream, under every in-flight policy. Some uploads are F10's faults.
Afterwards each token is explained by the version on its label. With the fake engine it is
recomputed; with vLLM it is scored by Hugging Face's own forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest

from penstock.server.rollouts.unleased import KEPT_CLOSED
from tests.faults.attempts import POLICIES, Attempt, Source
from tests.faults.footprint import Footprint, footprint
from tests.faults.report import Report, growth, percentile
from tests.faults.scoring import runs
from tests.faults.sites import Site
from tests.faults.trajectories import Seen
from tests.faults.weight_faults import FAULTS
from tests.support.harness import GetServerInfoRequest

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(3600)]

NAME = "weight updates under load"
TURNS = 18
LIMIT_SECONDS = 60
FAULTY = 0.25
"""Share of uploads that are faults."""

LENGTHS = 320

RESIDENT_GROWTH = 8 << 20
SHARED_GROWTH = 64 << 10
FILES_GROWTH = 2
"""The most that each process may grow from one half of the updates to the other, by `growth`. It
covers noise: memory that the allocator has not returned yet, and connections that are being closed.
"""


@dataclass
class Soaked:
    """The results of a soak."""

    sources: Counter[str] = field(default_factory=lambda: Counter[str]())
    pauses: dict[str, list[float]] = field(
        default_factory=lambda: {policy: [] for policy in POLICIES.values()}
    )
    faults: Counter[str] = field(default_factory=lambda: Counter[str]())
    server: list[Footprint] = field(default_factory=list[Footprint])
    engine: list[Footprint] = field(default_factory=list[Footprint])


async def test_fake_soak(
    fake: Site, report: Report, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await check_soak(fake, report, tmp_path / "trajectories", request.node.nodeid)


@pytest.mark.long
async def test_vllm_soak(
    vllm: Site, report: Report, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await check_soak(vllm, report, tmp_path / "trajectories", request.node.nodeid)


async def check_soak(site: Site, report: Report, path: Path, test: str) -> None:
    where, soaked = f"F24 {site.name}", Soaked()
    try:
        tokens = await survive(site, report, path, soaked)
    except BaseException as error:
        wanted = report.updates
        done = min(len(soaked.server), wanted - 1)
        options = f"--updates {wanted}"
        again = report.failed(where, NAME, report.seed, test, done, wanted, options)
        error.add_note(f"again: {again}")
        raise
    figures = figures_of(site, soaked, tokens)
    report.survived(where, NAME, report.updates, unit="updates", figures=figures)


async def survive(site: Site, report: Report, path: Path, soaked: Soaked) -> int:
    """Run the soak and check everything afterwards; return the number of explained tokens."""
    rng = random.Random(report.seed)
    # Without this, each update would traverse the libraries' objects, which takes longer than the update.
    gc.collect()
    gc.freeze()
    try:
        with path.open("wb") as file:
            await soak(site, rng, report.updates, file, soaked)
    finally:
        gc.unfreeze()
    info = await site.wire.GetServerInfo(GetServerInfoRequest())
    assert (info.load.running_turn_count, info.load.open_trajectory_count) == (0, 0)
    site.check_held(site.active)
    table = [f"soak {site.name}, seed {report.seed}", *pause_table(soaked)]
    try:
        # Only after the soak, because this takes CPU time from what is measured.
        counts = explain_all(site, path)
        found = "; ".join(f"{count} {name}" for name, count in counts.items())
        table.append(f"{found}; mislabelled: 0")
    finally:
        report.lines += [*table, *memory_table(soaked)]
    check_growth(soaked.server)
    check_growth(soaked.engine)
    return counts["tokens"]


def figures_of(site: Site, soaked: Soaked, tokens: int) -> str:
    """The figures for the report of a survived soak."""
    pauses = [1e3 * pause for found in soaked.pauses.values() for pause in found]
    p50, p99 = percentile(pauses, 0.5), percentile(pauses, 0.99)
    lost = site.trajectories.started - site.trajectories.ended
    grown = ", ".join(
        f"{process} {growth([f.resident_bytes for f in found]) / (1 << 20):+.1f} MB"
        for process, found in (("server", soaked.server), ("engine", soaked.engine))
        if found
    )
    return (
        f"{tokens:,} tokens, mislabelled 0; turns lost {lost}; {sum(soaked.faults.values())} faults "
        f"beside; pause p50 {p50:.1f} ms, p99 {p99:.1f} ms; memory {grown}"
    )


async def soak(
    site: Site, rng: random.Random, updates: int, file: BinaryIO, soaked: Soaked
) -> None:
    """Make `updates` successful updates, and some uploads that fail."""
    await warm(site, rng, updates)
    over = asyncio.Event()

    async def run(worker: random.Random) -> None:
        while not over.is_set():
            seen = await site.trajectories.run(worker, 24)
            # Write to disk, because data kept here would look like growing memory.
            pickle.dump(seen, file)

    async with asyncio.TaskGroup() as group:
        for _ in range(TURNS):
            group.create_task(run(random.Random(rng.random())))
        try:
            while len(soaked.server) < updates:
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                async with asyncio.timeout(LIMIT_SECONDS):
                    took_effect = await upload(site, rng, soaked)
                if took_effect:
                    soaked.server.append(footprint())
                    if site.engine_pid is not None:
                        soaked.engine.append(footprint(site.engine_pid))
                    site.forget()
        finally:
            over.set()
    assert site.trajectories.started == site.trajectories.ended


async def warm(site: Site, rng: random.Random, updates: int) -> None:
    """Fill everything that grows only up to a bound.

    These are the closed trajectories that are kept, the engine's cache, what its kernels keep for
    each number of tokens in a step, and its loaders for each source.
    """

    async def turn(length: int) -> None:
        await site.trajectories.turn([rng.randrange(256) for _ in range(length)], 1)

    for length in range(1, LENGTHS if site.engine_pid is not None else 1):
        await turn(length)
    for _ in range(LENGTHS, min(KEPT_CLOSED, 10 * updates), 50):
        await asyncio.gather(*(turn(250) for _ in range(50)))
    for source in (Source.INLINE, *Source):
        with contextlib.closing(Attempt(site, source, rng)) as attempt:
            await attempt.accepted()


async def upload(site: Site, rng: random.Random, soaked: Soaked) -> bool:
    """Make one random upload. Returns whether its version is active."""
    source = rng.choice(list(Source))
    name = rng.choice([name for name, (_, sources) in FAULTS.items() if source in sources])
    faulty = rng.random() < FAULTY
    with contextlib.closing(Attempt(site, source, rng)) as attempt:
        if faulty:
            await FAULTS[name][0](attempt)
            await site.idle()
            soaked.faults[name] += 1
        else:
            await attempt.accepted()
            soaked.sources[source.value] += 1
        assert site.active == (attempt.version if attempt.takes_effect else attempt.before)
        site.check_held(site.active)
        if attempt.pause_seconds is not None:
            soaked.pauses[POLICIES[attempt.policy]].append(attempt.pause_seconds)
    return attempt.takes_effect


def explain_all(site: Site, path: Path) -> Counter[str]:
    """Explain every token; return counts of what there was."""
    counts: Counter[str] = Counter()
    for seen in read(path):
        assert seen.sampled == sorted(seen.sampled)
        site.explain(seen)
        versions = len(set(seen.sampled))
        counts["tokens"] += len(seen.sampled)
        counts["trajectories"] += 1
        counts["of several versions"] += versions > 1
        counts["segments"] += len(runs(seen))
        counts["attempts"] += seen.attempts
        if versions > 1 and counts["of several versions"] % 10 == 0:
            counts["false labels tried"] += 1
            counts["found out"] += is_found_out(site, falsely_labelled(seen))
    # Two versions can happen to give a token nearly the same log-probability.
    assert counts["found out"] >= 0.9 * counts["false labels tried"]
    return counts


def falsely_labelled(seen: Seen) -> Seen:
    """A copy with one wrong label: the last token of a version gets the next version."""
    other = copy.deepcopy(seen)
    found = runs(seen)
    at = next(i for i, (first, second) in enumerate(pairwise(found)) if first[2] != second[2])
    other.versions[found[at][1] - 1] = found[at + 1][2]
    return other


def is_found_out(site: Site, seen: Seen) -> bool:
    try:
        site.explain(seen)
    except AssertionError:
        return True
    return False


def read(path: Path) -> Iterator[Seen]:
    with path.open("rb") as file, contextlib.suppress(EOFError):
        while True:
            yield pickle.load(file)


def pause_table(soaked: Soaked) -> Iterator[str]:
    found = ", ".join(f"{name} {count}" for name, count in sorted(soaked.sources.items()))
    yield f"{len(soaked.server)} updates ({found}; {sum(soaked.faults.values())} faults beside)"
    yield f"{'pause, ms':<16}{'updates':>8}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}"
    every = [pause for pauses in soaked.pauses.values() for pause in pauses]
    for name, pauses in {**soaked.pauses, "all": every}.items():
        if pauses:
            shares = "".join(f"{percentile(pauses, s) * 1e3:9.1f}" for s in (0.5, 0.9, 0.99, 1.0))
            yield f"{name:<16}{len(pauses):>8}{shares}"


def memory_table(soaked: Soaked) -> Iterator[str]:
    yield f"{'memory':<16}{'first':>10}{'last':>10}{'growth*':>10}{'allowed':>10}"
    for process, found in (("server", soaked.server), ("engine", soaked.engine)):
        for name, unit, values, allowed in measures(found):
            figures = (values[0], values[-1], growth(values))
            numbers = "".join(f"{figure / unit:10.2f}" for figure in figures)
            yield f"{process + ' ' + name:<16}{numbers}{allowed / unit:10.2f}"
    yield "* of the whole band, from the first half to the second; MB, but for files"


def check_growth(found: list[Footprint]) -> None:
    for name, _, values, allowed in measures(found):
        assert growth(values) <= allowed, (name, values)


def measures(found: list[Footprint]) -> Iterator[tuple[str, int, list[int], int]]:
    """(name, unit, values, growth allowed)."""
    if found:
        yield "resident", 1 << 20, [f.resident_bytes for f in found], RESIDENT_GROWTH
        yield "shared", 1 << 20, [f.shared_bytes for f in found], SHARED_GROWTH
        yield "files", 1, [f.files for f in found], FILES_GROWTH
