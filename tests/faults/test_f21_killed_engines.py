"""F21: engine servers of a pool are killed with SIGKILL at random, while a real trainer trains a
tiny model.

The hub and its worker are in this process. Each engine server is a separate process, which is
killed during whatever it does, including uploads of weights, and restarted on the same port. At
least one stays alive. During or after the run:

- Every token that the hub holds is what its version samples there. The fake engine's own rule shows
  that or, with vLLM, Hugging Face's forward pass with the weights that the hub received.
- No attempt failed for lack of an engine.
- Each accepted group is trained once, according to the ledger, and no token with a lag above
  `max_lag`. The step must have masked every token that is older by the hub's recorded versions.
- Turns keep finishing: no pause between two is longer than STUCK_SECONDS. The longest is reported.
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

from penstock.server.pool.engine import PoolEngine
from penstock.server.pool.remote import EngineServer
from penstock.server.pool.rules import PoolRules
from penstock.server.weights.staging.incoming import Staged
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
"""Longest allowed time without a finished turn while an engine lives.

It may be spent on turns that are placed again, starts, switches or the trainer's steps. The longest
in 400 kills on two cores was 4.2 s. A busy machine may take many times as long, but a deadlock
takes longer than this.
"""
VLLM_COUNTS = {2: 50, 4: 150}
"""The most kills, by the number of engines in the pool. Each start of vLLM takes a core for 20 to
45 s. Of two engines only one may be away at a time, of four up to three.
"""
TEST = "tests/faults/test_f21_killed_engines.py::"
RULES = PoolRules(look_seconds=0.2, flush_seconds=0.02, whole_flush_seconds=0.02)


class Explains(Protocol):
    """Checks whether the tokens of a trajectory are what their versions sample."""

    def begin(self, hub: Harness, pool: PoolEngine) -> None:
        """Observe this hub from now on."""
        ...

    def check(self, record: Any) -> int:
        """Check a closed trajectory; return its number of sampled tokens. Raises AssertionError,
        KeyError.
        """
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of engine server, and how to check its tokens."""

    name: str
    command: tuple[str, ...]
    options: tuple[str, ...]
    explains: Callable[[Path], Explains]
    in_flight: str
    """What a switch does with turns in flight."""
    seconds: float
    """The time that one kill may take."""
    test: str
    niceness: int = 0
    """Niceness of running engine servers. Starting ones get priority, or a start would take minutes."""


@dataclass
class Engines:
    """Engine servers that are killed and restarted."""

    rng: random.Random
    niceness: int = 0
    servers: list[Server] = field(default_factory=list[Server])
    alive: set[int] = field(default_factory=set[int])
    kills: int = 0

    async def fell(self, count: int) -> None:
        """Kill `count` times. Each server is restarted after a while, and one is always alive."""
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
        """Lower the priority of a running server and of its engine process."""
        pid = self.servers[number].process.pid
        for process in (psutil.Process(pid), *engines_of(pid)):
            # Only root may go below the niceness that a process was started with.
            process.nice(max(process.nice(), self.niceness))


@dataclass
class Watch:
    """Checks each trajectory as the hub closes it."""

    explains: Explains
    closed: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])
    versions: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])
    """For each trajectory with a reward: the number of tokens of each version, as the hub recorded it."""
    _last: float | None = None

    def over(self, hub: Harness, pool: PoolEngine) -> None:
        """Watch this hub from now on."""
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
                # The hub continues, and the test fails at the end.
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
"""A version's contents: the checksum of each tensor. Empty for the model as loaded."""


@dataclass
class ByRule:
    """Checks the fake engine's tokens, which follow from their prefix and version."""

    sampled_by: dict[int, tuple[int, Content]] = field(
        default_factory=dict[int, "tuple[int, Content]"]
    )
    """Hash of a prefix -> the engine server's version of the next token, and the contents it had
    received under that number.

    The fake engine samples by its own number. It differs from the hub's if the hub had to send a
    version twice.
    """
    versions: dict[int, Content] = field(default_factory=lambda: {0: ()})
    """The contents that the hub received under each version."""

    def begin(self, hub: Harness, pool: PoolEngine) -> None:
        for member in pool.members:
            self._listen(member.server)
        versions = hub.serving.weights
        accepted = versions.on_accepted
        assert accepted is not None

        def note(staged: Staged, probe: Any, adapter: Any) -> None:
            data = staged.weights.path.read_bytes()
            self.versions[staged.weight_version] = tuple(
                xxhash.xxh3_64_intdigest(data[t.offset_bytes : t.offset_bytes + t.length_bytes])
                for t in staged.weights.tensors
            )
            accepted(staged, probe, adapter)

        versions.on_accepted = note

    def _listen(self, server: EngineServer) -> None:
        """Record the versions that the engine server receives, and the version it reports for each
        token.
        """
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
    """Checks that vLLM's tokens have the log-probabilities that their version's weights give them."""

    def __init__(self, model: Path) -> None:
        from safetensors.numpy import load_file

        self._weights: dict[int, dict[str, Any]] = {0: load_file(model / "model.safetensors")}
        self._scorer = Scorer(model, self._weights.__getitem__)

    def begin(self, hub: Harness, _: PoolEngine) -> None:
        versions = hub.serving.weights
        accepted = versions.on_accepted
        assert accepted is not None

        def note(staged: Staged, probe: Any, adapter: Any) -> None:
            self._weights[staged.weight_version] = _tensors(staged)
            accepted(staged, probe, adapter)

        versions.on_accepted = note

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
    # torch warns about read-only arrays, and warnings are errors here.
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
    # The version on a token is then also the version that computed its cache.
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
    # By default, a pool of two is enough to see whether it works at all.
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
    """Run one pool through `count` kills, and add the verdict."""
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
    """Run one pool from its first engine to the final checks; return the measurements."""
    watch, accepted = Watch(kind.explains(model)), Accepted()
    async with engine_processes(folder, model, kind, engines) as servers:
        run.servers = servers
        addresses = [server.address for server in servers]
        async with (
            serve_hub(folder / "hub", addresses, rules=RULES) as (hub, pool),
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
        f"recomputed, {too_old} too old and masked; {pool.requests_lost} turns placed again; longest "
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
    """Run one trainer for as long as engines are killed, and a little longer."""
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
    """Check that no token trained according to the ledger is older than the contract allows.

    Every token that is too old by the hub's recorded versions must be among those that its step
    masked. Returns their number.
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
        # No token can come from a future version.
        assert max(sampled) <= held, f"step {entry.step}: {sampled} with {held}"
        held, found = entry.weight_version, found + too_old
    return found
