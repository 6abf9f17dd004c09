"""The server of `buffer.delivery`: `penstock serve` with an engine that writes a whole turn at once.

    python -m benchmarks.buffer.server FOLDER [--set KEY=VALUE]...

Run it in the root of a checkout. It prints one line, `serving PORT`, and stops when standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import click
from benchmarks.buffer.groups import TOKENS, Sample, sample_of
from tests.support.fakes import ByteRenderer, FakeEngine

from penstock.common import allocator
from penstock.common.garbage import start_up_kept
from penstock.server.assembly import Serving
from penstock.server.config import settings as config
from penstock.server.engine.protocol import Delta, EngineRequest, Finish
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind


class InstantEngine(FakeEngine):
    """Returns the tokens of `sample_of` at once, because this benchmark does not measure sampling."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta]:
        """Yields the sample whose number is the prompt's first token."""
        return self._at_once(sample_of(int(request.token_ids[0])))

    async def _at_once(self, sample: Sample) -> AsyncGenerator[Delta]:
        yield Delta(sample.token_ids, sample.logprobs, self.version, Finish.LENGTH, 0)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True)
def main(folder: Path, settings: tuple[str, ...]) -> None:
    """Serve until standard input ends."""
    allocator.keep_freed_memory()
    asyncio.run(serve(folder, list(settings)))


async def serve(folder: Path, settings: list[str]) -> None:
    loaded = config.load(
        None, ["listen=127.0.0.1:0", f"journal.folder={folder}", "freshness=false", *settings]
    )
    server, port = bind(loaded.listen, loaded.limits.concurrent_calls)
    engine = InstantEngine(max_context=2 * TOKENS, vocab_size=1 << 20, keeps_history=False)
    life = Lifecycle(
        Serving(engine, ByteRenderer(), loaded, await open_journal(loaded.journal)), server
    )
    await life.start()
    print(f"serving {port}", flush=True)
    with start_up_kept():
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await life.stop(0.0)


if __name__ == "__main__":
    main()
