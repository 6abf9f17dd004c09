"""F21: kill -9 of a pool's engine servers, at random, while a real trainer trains a tiny model.

The hub and its worker are in this process. Each engine server is a separate process. It is killed in the
middle of whatever it does, including weight uploads, and restarted on the same port. At least one is left
alive. Invariants, checked during the run or afterwards:

- Every token that the hub holds is what its version samples. This is checked by the fake engine's own rule
  or, with vLLM, by Hugging Face's forward pass under the weights that the hub was given.
- No attempt failed for lack of an engine.
- By the trainer's ledger, each accepted group is trained once, and no token with a lag above `max_lag`. By
  the versions that the hub recorded, every older token is among those that the step reports as masked.
- Turns finish all the time: no pause between two is longer than STUCK_SECONDS. The longest is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import pytest
import xxhash

from penstock.server.config.pool import PoolSection
from penstock.server.pool.engine import PoolEngine
from penstock.server.pool.remote import EngineServer
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.switch import Update
from penstock.trainer.state.ledger import StepEntry, read_ledger
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from tests.faults.report import COUNT, Report
from tests.faults.scoring import Scorer
from tests.faults.trainers import (
    GROUPS_PER_STEP,
    Accepted,
    Nursery,
    Stand,
    at_work,
    check_lineage,
)
from tests.faults.trajectories import Seen
from tests.support.fakes import sampled
from tests.support.harness import Harness
from tests.support.pools import serve_hub
from tests.support.processes import Server, engines_of
from tests.support.tiny_model import make_tiny_model
from tests.support.trainer_processes import ASKED
from tests.trainer.test_end_to_end import configure

MAX_LAG = 2
STEP_SECONDS = "0.004"
STUCK_SECONDS = 60.0
"""Maximum time without a finished turn while an engine lives. It includes placing turns again, starts,
switches and the trainer's steps. The longest in 400 kills on two cores was 4.2 s. A busy machine may take
many times as long; a run that is really stuck takes longer than this."""
VLLM_COUNTS = {2: 50, 4: 150}
"""Maximum kills, by the engines of the pool. Each start of vLLM takes a core for 20 to 45 s. Of two engines
only one may be down at a time, of four three."""
TEST = "tests/faults/test_f21_killed_engines.py::"
RULES = PoolSection(look_seconds=0.2)


class Explains(Protocol):
    """Checks that the tokens of a trajectory are what its versions sample."""

    def begin(self, hub: Harness, pool: PoolEngine) -> None:
        """Starts to record from now on."""
        ...

    def check(self, record: Any) -> int:
        """Returns the number of tokens checked. Raises AssertionError, KeyError."""
        ...


@dataclass(frozen=True)
class Kind:
    """The kind of engine servers in a pool."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...]
    explains: Callable[[Path], Explains]
    in_flight: str
    """What a switch does to turns in flight."""
    seconds: float
    """Time limit for one kill."""
    test: str
    niceness: int = 0
    """Niceness of engine servers that serve. Starting ones go first; otherwise a start takes minutes."""


@dataclass
class Engines:
    """Runs engine servers, and kills and restarts them."""

    rng: random.Random
    niceness: int = 0
    servers: list[Server] = field(default_factory=list[Server])
    alive: set[int] = field(default_factory=set[int])
    kills: int = 0

    async def fell(self, count: int) -> None:
        """Kills this many times; each server comes back after a while, and one always lives."""
        self.alive = set(range(len(self.servers)))
        for number in self.alive:
            self.give_way(number)
        async with asyncio.TaskGroup() as starting:
            for _ in range(count):
                await asyncio.sleep(self.rng.uniform(0.0, 0.8))
                while len(self.alive) < 2:
                    await asyncio.sleep(0.01)
                number = self.rng.choice(sorted(self.alive))
                self.alive.discard(number)
                await self.servers[number].kill()
                self.kills += 1
                starting.create_task(self._start(number))

    async def _start(self, number: int) -> None:
        await asyncio.sleep(self.rng.uniform(0.0, 1.0))
        await self.servers[number].start()
        self.give_way(number)
        self.alive.add(number)

    def give_way(self, number: int) -> None:
        """Lowers the priority of a server that serves, and of its child, the engine's process."""
        pid = self.servers[number].process.pid
        for process in (psutil.Process(pid), *engines_of(pid)):
            # Only root may lower the niceness with which it was started.
            process.nice(max(process.nice(), self.niceness))


@dataclass
class Watch:
    """Records every trajectory that the hub closes."""

    explains: Explains
    closed: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])
    versions: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])
    """For each trajectory with a reward: number of tokens by version, as the hub recorded it."""
    _last: float | None = None

    def over(self, hub: Harness, pool: PoolEngine) -> None:
        """Starts to record from now on."""
        self.explains.begin(hub, pool)
        store = hub.serving.store
        close = store.close

        def look(record: Any, outcome: Any) -> None:
            now = time.monotonic()
            self.pauses.append(now - (self._last or now))
            self._last = now
            try:
                self.tokens += self.explains.check(record)
                self.closed += 1
            except (AssertionError, KeyError) as error:
                # The hub continues, and the test fails at its end.
                self.problems.append(f"{record.trajectory_id}: {error!r}")
            if not outcome.HasField("failure"):
                counts: Counter[int] = Counter()
                for segment in record.segments:
                    if segment.author == trajectory_pb2.AUTHOR_POLICY:
                        counts[segment.weight_version] += segment.token_count
                self.versions[record.trajectory_id] = counts
            close(record, outcome)

        store.close = look  # type: ignore[method-assign]


Content = tuple[int, ...]
"""A version's tensor checksums, by tensor; empty for the model as loaded."""


@dataclass
class ByRule:
    """The fake engine's tokens follow from the prefix and the version."""

    sampled_by: dict[int, tuple[int, Content]] = field(
        default_factory=dict[int, "tuple[int, Content]"]
    )
    """By the hash of a prefix: the engine server's number for the version that sampled the next token, and
    the weights it was given under that number. The fake engine samples by that number. It differs from the
    hub's if the hub had to give it one version twice."""
    versions: dict[int, Content] = field(default_factory=lambda: {0: ()})
    """The weights that the hub was given, by version."""

    def begin(self, hub: Harness, pool: PoolEngine) -> None:
        for member in pool.roster.members:
            self._listen(member.server)
        switcher: Any = hub.serving.switcher
        stage = switcher.stage

        def note(update: Update) -> None:
            staged = update.staged
            data = staged.weights.path.read_bytes()
            self.versions[staged.weight_version] = tuple(
                xxhash.xxh3_64_intdigest(data[t.offset_bytes : t.offset_bytes + t.length_bytes])
                for t in staged.weights.tensors
            )
            stage(update)

        switcher.stage = note

    def _listen(self, server: EngineServer) -> None:
        """Records the weights that an engine server is given, and its version for each token."""
        generate, stage = server.generate, server.stage
        given: dict[int, Content] = {0: ()}

        def staging(header: Any, pieces: Any) -> Any:
            given[header.weight_version] = tuple(tensor.xxh3 for tensor in header.tensors)
            return stage(header, pieces)

        async def heard(message: Any, metadata: Any) -> AsyncGenerator[Any]:
            prefix = codec.token_ids(message.tokens).tobytes()
            async with contextlib.aclosing(generate(message, metadata)) as events:
                async for event in events:
                    if event.WhichOneof("event") == "segment":
                        number = event.segment.weight_version
                        for token in codec.token_ids(event.segment):
                            self.sampled_by[hash(prefix)] = number, given[number]
                            prefix += token.tobytes()
                    yield event

        server.generate = heard  # type: ignore[method-assign]
        server.stage = staging  # type: ignore[method-assign]

    def check(self, record: Any) -> int:
        prefix, count = b"", 0
        for segment in record.segments:
            logprobs = np.frombuffer(segment.logprobs, np.float32)
            for place, token in enumerate(np.frombuffer(segment.tokens, np.int32)):
                if segment.author == trajectory_pb2.AUTHOR_POLICY:
                    number, content = self.sampled_by[hash(prefix)]
                    wanted = sampled(prefix, number)
                    assert (int(token), float(logprobs[place])) == pytest.approx(wanted)
                    # The hub's version must have the same contents as the engine server's.
                    assert content == self.versions[segment.weight_version]
                    count += 1
                prefix += token.tobytes()
        return count


class ByForward:
    """vLLM's tokens have the log-probabilities given by their version's weights."""

    def __init__(self, model: Path) -> None:
        from safetensors.numpy import load_file

        self._weights: dict[int, dict[str, Any]] = {0: load_file(model / "model.safetensors")}
        self._scorer = Scorer(model, self._weights.__getitem__)

    def begin(self, hub: Harness, _: PoolEngine) -> None:
        switcher: Any = hub.serving.switcher
        stage = switcher.stage

        def note(update: Update) -> None:
            staged = update.staged
            self._weights[staged.weight_version] = _tensors(staged)
            stage(update)

        switcher.stage = note

    def check(self, record: Any) -> int:
        seen = Seen()
        for segment in record.segments:
            tokens = np.frombuffer(segment.tokens, np.int32).tolist()
            if segment.author != trajectory_pb2.AUTHOR_POLICY:
                seen.give(tokens)
                continue
            seen.tokens += tokens
            seen.versions += [segment.weight_version] * len(tokens)
            seen.logprobs += np.frombuffer(segment.logprobs, np.float32).tolist()
        self._scorer.check(seen)
        return len(seen.sampled)


def _tensors(staged: Staged) -> dict[str, Any]:
    # torch warns about arrays that are not writable, and a warning is an error here.
    data = bytearray(staged.weights.path.read_bytes())
    return {
        tensor.name: np.frombuffer(
            data, np.float32, tensor.length_bytes // 4, tensor.offset_bytes
        ).reshape(tensor.shape)
        for tensor in staged.weights.tensors
    }


FAKE = Kind(
    "F21 fake",
    ("-m", "tests.support.fake_serve"),
    ("--step-seconds", STEP_SECONDS),
    lambda _: ByRule(),
    in_flight="keep",
    seconds=20.0,
    test="test_killed_engines_cost_a_pool_nothing_but_time",
)
VLLM = Kind(
    "F21 vLLM",
    ("-m", "penstock.cli", "serve"),
    (
        *("--http-listen", "", "--dtype", "float32"),
        *("--max-model-len", "512", "--max-num-seqs", "16"),
        *("--kv-cache-memory-bytes", str(20 << 20)),
    ),
    ByForward,
    # The version that computed a turn's cache is then the version of its tokens.
    in_flight="recompute",
    seconds=120.0,
    test="test_killed_vllm_engines_cost_a_pool_nothing_but_time",
    niceness=15,
)


@contextlib.asynccontextmanager
async def engine_processes(
    folder: Path, model: Path, kind: Kind, count: int
) -> AsyncGenerator[list[Server]]:
    """Start `count` engine servers, each as a process."""
    options = ("--model", str(model), *kind.options)
    servers: list[Server] = []
    try:
        for number in range(count):
            own = folder / f"engine-{number}"
            own.mkdir(parents=True)
            servers.append(Server(own, options, command=kind.command))
        await asyncio.gather(*(server.start() for server in servers))
        yield servers
    finally:
        for process in [process for server in servers for process in server.processes]:
            process.kill()
            await process.wait()


@pytest.mark.timeout(0)
async def test_killed_engines_cost_a_pool_nothing_but_time(
    model: Path, nursery: Nursery, tmp_path: Path, report: Report
) -> None:
    # By default, a pool of two is enough to check that it works at all.
    for engines in (2,) if report.count is None else (2, 4):
        await kill_some(FAKE, engines, report.count or COUNT, model, nursery, tmp_path, report)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("engines", VLLM_COUNTS)
async def test_killed_vllm_engines_cost_a_pool_nothing_but_time(
    nursery: Nursery, tmp_path: Path, report: Report, engines: int
) -> None:
    if report.count is None:
        pytest.skip("vLLM has to start twice for each; `make faults` does it")
    pytest.importorskip("vllm")
    model = make_tiny_model(tmp_path / "model")
    count = min(report.count, VLLM_COUNTS[engines])
    await kill_some(VLLM, engines, count, model, nursery, tmp_path, report)


async def kill_some(
    kind: Kind,
    engines: int,
    count: int,
    model: Path,
    nursery: Nursery,
    folder: Path,
    report: Report,
) -> None:
    """Checks that a pool survives this many kills, and adds the verdicts."""
    name = f"one of {engines} engines killed while it trains"
    run = Engines(random.Random(f"{report.seed} {name}"), kind.niceness)
    try:
        figures = await kill_and_train(
            kind, model, nursery, folder / f"{engines}", run, engines, count
        )
    except BaseException as error:
        test = f"{TEST}{kind.test}"
        again = report.failed(kind.name, name, report.seed, test, run.kills, count)
        error.add_note(f"again: {again}")
        raise
    assert run.kills == count
    report.survived(kind.name, name, count, unit="kills", figures=figures)


async def kill_and_train(
    kind: Kind,
    model: Path,
    nursery: Nursery,
    folder: Path,
    run: Engines,
    engines: int,
    count: int,
) -> str:
    """Runs one pool from its first engine to the final checks; returns the measurements."""
    watch, accepted = Watch(kind.explains(model)), Accepted()
    async with engine_processes(folder, model, kind, engines) as servers:
        run.servers = servers
        addresses = [server.address for server in servers]
        async with (
            serve_hub(folder / "hub", addresses, rules=RULES, flush_seconds=0.02) as (hub, pool),
            at_work(hub.address),
        ):
            watch.over(hub, pool)
            accepted.watch(hub)  # type: ignore[arg-type]
            stand = await train(kind, hub, nursery, folder, model, accepted, run, count)
            too_old = check_lag(stand, watch)
            assert not watch.problems, watch.problems[:5]
            assert max(watch.pauses) <= STUCK_SECONDS, sorted(watch.pauses)[-5:]
            assert set(hub.serving.closing.failures) <= {"RUNTIME_ERROR"}
    return (
        f"{stand.steps} steps, {len(accepted.tasks)} groups trained once each, {watch.tokens} tokens "
        f"recomputed, {too_old} too old and masked; {pool.turns.lost_count} turns placed again; longest "
        f"time without a finished turn {max(watch.pauses):.1f} s"
    )


async def train(
    kind: Kind,
    hub: Harness,
    nursery: Nursery,
    folder: Path,
    model: Path,
    accepted: Accepted,
    run: Engines,
    count: int,
) -> Stand:
    """Runs one trainer as long as engines are killed, and a little longer."""
    config = configure(
        folder,
        model,
        hub.address,
        run={"steps": 100_000},
        data={"group_size": 2, "sampling": {"max_tokens": 48}},
        train={"groups_per_step": GROUPS_PER_STEP},
        staleness={"max_lag": MAX_LAG},
        weights={"in_flight": kind.in_flight},
        checkpoint={"every_steps": 20},
    )
    stand = Stand(hub, folder, config, accepted, 0)  # type: ignore[arg-type]
    await nursery.begin(config, stand.log, resume=False)
    try:
        async with asyncio.timeout(120 + kind.seconds * count):
            await run.fell(count)
            after = len(accepted.tasks) + 2 * GROUPS_PER_STEP
            while len(accepted.tasks) < after:
                assert not nursery.ended, stand.said
                await asyncio.sleep(0.05)
    finally:
        nursery.terminate()
    assert await nursery.end() == ASKED, stand.said
    stand.steps = len(stand.rows())
    check_lineage(stand)
    return stand


def check_lag(stand: Stand, watch: Watch) -> int:
    """Checks that no step in the ledger trained a token beyond the maximum lag.

    By the versions that the hub recorded, each token that is too old is among those that its step masked.
    Returns the number of such tokens.
    """
    entries = read_ledger(stand.folder / "out" / "ledger.jsonl")
    steps = [entry for entry in entries if isinstance(entry, StepEntry)]
    masked = {row["step"]: row["tokens_masked"] for row in stand.rows()}
    held = found = 0
    for entry in steps:
        sampled: Counter[int] = Counter()
        for group in entry.groups:
            for name in group.trajectory_ids:
                sampled += watch.versions.get(name, Counter())
        assert sampled.total(), f"step {entry.step} trained nothing that the hub has closed"
        too_old = sum(n for version, n in sampled.items() if held - version > MAX_LAG)
        assert too_old <= masked[entry.step], f"step {entry.step}: {sampled} with {held}"
        # Tokens from a newer version than the trainer's cannot exist.
        assert max(sampled) <= held, f"step {entry.step}: {sampled} with {held}"
        held, found = entry.weight_version, found + too_old
    return found
