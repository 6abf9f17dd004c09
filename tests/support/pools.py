"""A hub and its engine servers, all in this process, each on its own port."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.server.assembly import Serving
from penstock.server.config import settings as config
from penstock.server.config.pool import PoolSection
from penstock.server.engine.protocol import AdapterLimits
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind
from penstock.server.pool.engine import PoolEngine
from penstock.server.pool.member import Member, State
from penstock.server.pool.turns import PoolTurns
from penstock.server.security.gate import open_gate
from penstock.wire.security import open_channel
from tests.support.fakes import ByteRenderer, FakeEngine
from tests.support.harness import Harness, Wire, serve, until

QUICK = PoolSection(look_seconds=0.05)


@dataclass
class Pool:
    """A running hub and its engine servers."""

    hub: Harness
    engine: PoolEngine
    engines: list[Harness]

    def member(self, number: int) -> Member:
        """The hub's view of an engine."""
        address = self.engines[number].address
        return next(member for member in self.engine.roster.members if member.address == address)

    async def serving(self, *numbers: int) -> None:
        """Wait until these engines, or all of them, are in rotation."""
        members = [self.member(number) for number in numbers or range(len(self.engines))]
        await until(lambda: all(member.state is State.SERVING for member in members))


def changed(rules: PoolSection, **fields: object) -> PoolSection:
    return rules.model_validate({**rules.model_dump(), **fields})


def is_idle(turns: PoolTurns) -> bool:
    """Whether no state of any request is left."""
    return not (turns.placed or turns._requests or turns._aborting)


@contextlib.asynccontextmanager
async def serve_hub(
    folder: Path,
    addresses: Sequence[str],
    *settings: str,
    rules: PoolSection = QUICK,
    flush_seconds: float = 0.0,
) -> AsyncGenerator[tuple[Harness, PoolEngine]]:
    """A hub in front of these engine servers."""
    folder.mkdir(exist_ok=True)
    given = ["listen=127.0.0.1:0", "http.listen=", f"weights.stage_folder={folder}", *settings]
    loaded = config.load(None, given)
    gate = open_gate(loaded)
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls, gate)
    engine = PoolEngine(addresses, rules=rules)
    engine.turns.flush_seconds = engine.turns.whole_flush_seconds = flush_seconds
    await engine.roster.described()
    journal = await open_journal(loaded.journal)
    life = Lifecycle(Serving(engine, ByteRenderer(), loaded, journal, gate), server)
    await life.start()
    channel = open_channel(f"127.0.0.1:{port}")
    try:
        yield Harness(life, engine, port, Wire(channel), channel), engine  # type: ignore[arg-type]
    finally:
        await channel.close()
        await life.stop(0.0)


@contextlib.asynccontextmanager
async def serve_pool(
    folder: Path,
    count: int,
    *settings: str,
    step_seconds: float = 0.0,
    rules: PoolSection = QUICK,
    hosts: Sequence[str] = (),
    of_engines: Sequence[str] = (),
    adapters: AdapterLimits | None = None,
    make_engine: Callable[..., FakeEngine] = FakeEngine,
) -> AsyncGenerator[Pool]:
    """`count` engine servers around fake engines, and a hub with all of them in rotation.
    `hosts` names the host of each server; by default all are on this host. `of_engines` are the
    settings of the engine servers."""
    async with contextlib.AsyncExitStack() as stack:
        engines: list[Harness] = []
        for number in range(count):
            own = folder / f"engine-{number}"
            own.mkdir()
            engine = await stack.enter_async_context(
                serve(
                    own,
                    *of_engines,
                    step_seconds=step_seconds,
                    adapters=adapters,
                    make_engine=make_engine,
                )
            )
            if hosts:
                engine.serving.info._host_id = hosts[number]
            engines.append(engine)
        addresses = [engine.address for engine in engines]
        hub, engine = await stack.enter_async_context(
            serve_hub(folder / "hub", addresses, *settings, rules=rules)
        )
        pool = Pool(hub, engine, engines)
        await pool.serving()
        yield pool
