"""F10: whatever is wrong with an upload, the refusal is precise and nothing that serves has changed.

    make faults FAULTS=20

Each fault happens at random moments and places, with turns in flight under random policies, to a server
around the fake engine and to one around real vLLM in fp32. Afterwards every turn is whole, the version
in use is the one that was, a fixed set of prompts gives the same tokens and log-probabilities bit for bit,
the memory of the upload is given back, and the next upload is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import psutil
import pytest

from tests.faults.attempts import Attempt, Source
from tests.faults.report import COUNT, Report, report_of
from tests.faults.sites import Site
from tests.faults.weight_faults import FAULTS

pytestmark = pytest.mark.asyncio(loop_scope="package")

TURNS = 4
LIMIT_SECONDS = 60
DESCRIPTORS = 6
"""So many more may be open after a fault than before: connections that are being closed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault" not in metafunc.fixturenames:
        return
    report = report_of(metafunc.config)
    pairs = [(name, source) for name, (_, sources) in FAULTS.items() for source in sources]
    if report.count is None:
        # Each fault a few times, from as many sources; over many runs, from all.
        count = 1 if metafunc.function is test_vllm else COUNT
        pairs = [
            (name, sources[(report.seed + place + index) % len(sources)])
            for place, (name, (_, sources)) in enumerate(FAULTS.items())
            for index in range(min(count, len(sources)))
        ]
    ids = [f"{name}-{source.value}" for name, source in pairs]
    metafunc.parametrize(("fault", "source"), pairs, ids=ids)


async def test_fake(
    fake: Site, fault: str, source: Source, report: Report, request: pytest.FixtureRequest
) -> None:
    await survive(fake, fault, source, report, request.node.nodeid)


async def test_vllm(
    vllm: Site, fault: str, source: Source, report: Report, request: pytest.FixtureRequest
) -> None:
    await survive(vllm, fault, source, report, request.node.nodeid)


async def survive(site: Site, name: str, source: Source, report: Report, test: str) -> None:
    """Makes one fault happen as often as was asked for."""
    count = report.count or 1
    where, what = f"F10 {site.name}", f"{name}, {source.value}"
    await good_upload(site, random.Random(report.seed))
    descriptors = psutil.Process().num_fds()
    for case in range(count):
        seed = report.seed + case
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await happen(site, name, source, random.Random(f"{seed} {name} {source.value}"))
        except BaseException as error:
            again = report.failed(where, what, seed, test, case, count)
            error.add_note(f"again: {again}")
            raise
    assert psutil.Process().num_fds() <= descriptors + DESCRIPTORS
    report.survived(where, what, count)


async def happen(site: Site, name: str, source: Source, rng: random.Random) -> None:
    """Makes one fault happen once, with turns in flight, and looks at what it left."""
    before = await site.state()
    turns = [
        asyncio.ensure_future(site.trajectories.run(random.Random(rng.random()), 24))
        for _ in range(TURNS)
    ]
    try:
        await asyncio.sleep(rng.uniform(0.0, 0.05))
        with contextlib.closing(Attempt(site, source, rng)) as attempt:
            await FAULTS[name][0](attempt)
            await site.idle()
        for seen in await asyncio.gather(*turns):
            # None of them can have been sampled by what was refused.
            allowed = {before.active} | ({attempt.version} if attempt.takes_effect else set())
            assert set(seen.sampled) <= allowed
            site.explain(seen)
    finally:
        for turn in turns:
            turn.cancel()
    after = await site.state()
    if attempt.takes_effect:
        assert after.active == attempt.version
        assert after.staged == ()
    else:
        assert after == before
    site.check_held(after.active)
    await good_upload(site, rng)


async def good_upload(site: Site, rng: random.Random) -> None:
    """The next version is taken, whatever it travels as."""
    base = site.serving.weights.delta_base_version == site.active > 0
    source = rng.choice(list(Source) if base else [s for s in Source if not s.is_delta])
    with contextlib.closing(Attempt(site, source, rng)) as attempt:
        await attempt.accepted()
    assert site.active == attempt.version
    site.check_held(site.active)
    site.forget()
