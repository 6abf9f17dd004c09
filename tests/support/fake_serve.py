"""`penstock serve` around the fake engine, as a separate process that tests kill and restart.

    python -m tests.support.fake_serve --listen 127.0.0.1:0 [--config FILE] [--set KEY=VALUE]...
        [--model FOLDER] [--max-model-len N] [--step-seconds S] [--turn-seconds S] [--start-seconds S]
        [--engine-process] [--enable-lora] [--max-lora-rank N] [--max-loras N]

Options, output and exit status are those of `penstock serve`. So is the whole server, except the
engine (`tests.support.fakes.FakeEngine`) and the tokenizer (bytes). An [engine] table in FILE sets
the options listed here that it names; its other keys are ignored.

- `--model`: take the tensors and the vocabulary from this Hugging Face folder, so that a real trainer
  fits. The default is those of `tests.support.fakes`. Sampled tokens still depend only on prefix and
  version.
- `--step-seconds`: the time that one token of every request takes.
- `--turn-seconds`: the extra time per token for each request that samples.
- `--start-seconds`: the time that the engine takes to start.
- `--engine-process`: tie the engine to its own process, and print `fake engine process PID` before the
  line `penstock serving fake on HOST:PORT (weight version 0)`. Killing that process kills the engine.

Exit status: 0 stopped on request (SIGTERM, SIGINT); 1 the address or the journal is in use, or the
engine is lost; 2 bad configuration. In tests, `tests.support.processes.Server` starts, kills and
restarts one.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from safetensors import safe_open

from penstock.server.assembly import Serving
from penstock.server.config import settings as configuration
from penstock.server.config.settings import AddressInUse, ConfigError, ServeConfig
from penstock.server.engine.protocol import AdapterLimits, TensorMeta
from penstock.server.http.server import open_http
from penstock.server.journal.protocol import JournalInUse, JournalUnreadable
from penstock.server.journals import open_journal
from penstock.server.lifecycle import Lifecycle, bind
from penstock.server.security.gate import open_gate
from tests.support.fakes import MAX_CONTEXT, TENSORS, VOCAB_SIZE, ByteRenderer, FakeEngine


@dataclass(frozen=True)
class EngineOptions:
    """The fake engine's options."""

    model: Path | None = None
    max_model_len: int = MAX_CONTEXT
    step_seconds: float = 0.0
    turn_seconds: float = 0.0
    start_seconds: float = 0.0
    freeze_at: int | None = None
    engine_process: bool = False
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 1


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--listen")
@click.option(
    "--http-listen", default="", help="As of `penstock serve`, but off where it is not given."
)
@click.option("--config", "path", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True)
@click.option("--dry-run", is_flag=True)
@click.option("--model")
@click.option("--max-model-len", type=int)
@click.option("--step-seconds", type=float)
@click.option("--turn-seconds", type=float)
@click.option("--start-seconds", type=float)
@click.option("--freeze-at", type=int)
@click.option("--engine-process", is_flag=True, default=None)
@click.option("--enable-lora", is_flag=True, default=None)
@click.option("--max-lora-rank", type=int)
@click.option("--max-loras", type=int)
@click.argument("ignored", nargs=-1)
def main(
    listen: str | None,
    http_listen: str,
    path: Path | None,
    settings: tuple[str, ...],
    dry_run: bool,
    ignored: tuple[str, ...],
    **engine_options: Any,
) -> None:
    """Serve until a signal stops the server."""
    given = [f"http.listen={http_listen}", *settings, *([f"listen={listen}"] if listen else [])]
    try:
        config = configuration.load(path, given)
    except ConfigError as error:
        click.echo(f"penstock serve: {error}", err=True)
        sys.exit(2)
    if dry_run:
        import tomli_w

        click.echo(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)), nl=False)
        return
    options = engine_options_of(config, engine_options)
    try:
        sys.exit(asyncio.run(serve(config, options)))
    except (AddressInUse, JournalInUse, JournalUnreadable) as error:
        click.echo(f"penstock serve: {error}", err=True)
        sys.exit(1)


def engine_options_of(config: ServeConfig, given: dict[str, Any]) -> EngineOptions:
    table = {key.replace("-", "_"): value for key, value in config.engine.items()}
    table |= {key: value for key, value in given.items() if value is not None}
    known = {key: table[key] for key in EngineOptions.__dataclass_fields__ if key in table}
    if "model" in known:
        known["model"] = Path(str(known["model"]))
    return EngineOptions(**known)


async def serve(config: ServeConfig, options: EngineOptions) -> int:
    """Serve from the first bind to the last answer, in the same order as `penstock serve`."""
    gate = open_gate(config)
    server, port = bind(config.listen, config.limits.concurrent_calls, gate)
    http = open_http(config, port, gate.credentials)
    journal = await open_journal(config.journal)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopping = asyncio.ensure_future(stop.wait())
    starting = asyncio.ensure_future(asyncio.sleep(options.start_seconds))
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return 0
    engine = make_engine(options)
    process = await live_in_a_process(engine) if options.engine_process else None
    serving = Serving(engine, ByteRenderer(), config, journal, gate, http)
    life = Lifecycle(serving, server)
    await life.start()
    host = config.listen.rpartition(":")[0]
    version = serving.switch.active_version
    click.echo(f"penstock serving fake on {host}:{port} (weight version {version})")
    if http is not None:
        click.echo(f"penstock endpoints on {http.url}")
    failing = asyncio.ensure_future(life.failed())
    await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        click.echo(f"penstock serve: {failing.result()}", err=True)
        await life.stop(0.0)
        return 1
    failing.cancel()
    await life.stop()
    if process is not None:
        process.cancel()
    return 0


def make_engine(options: EngineOptions) -> FakeEngine:
    tensors, vocabulary = TENSORS, VOCAB_SIZE
    if options.model is not None:
        tensors = tensors_of(options.model)
        vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    adapters = AdapterLimits(options.max_lora_rank, options.max_loras)
    engine = FakeEngine(
        options.step_seconds,
        options.max_model_len,
        adapters=adapters if options.enable_lora else None,
        tensors=tensors,
        vocab_size=vocabulary,
        keeps_history=False,
    )
    engine.freeze_at = options.freeze_at
    engine.turn_seconds = options.turn_seconds
    return engine


def tensors_of(folder: Path) -> dict[str, TensorMeta]:
    """The tensors of a full upload, with the shapes in the folder's safetensors."""
    found: dict[str, TensorMeta] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = TensorMeta(tuple(file.get_slice(name).get_shape()))
    embedding = found.get("model.embed_tokens.weight")
    if embedding is not None and "lm_head.weight" not in found:
        # Tied to the embedding, but a trainer may still upload it.
        found["lm_head.weight"] = TensorMeta(embedding.shape, optional=True)
    return found


async def live_in_a_process(engine: FakeEngine) -> asyncio.Task[None]:
    """Tie the engine's life to a new process. That process ends with this one."""
    process = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    click.echo(f"fake engine process {process.pid}")

    async def die_with_it() -> None:
        status = await process.wait()
        engine.die(f"its process ended with {status}")

    return asyncio.create_task(die_with_it())


if __name__ == "__main__":
    main()
