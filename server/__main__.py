"""`penstock serve`: reads the configuration, starts the engine and serves until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import cast

import click
from pydantic import ValidationError

from penstock.common.answers import Exit, complain, json_option, show_toml
from penstock.common.explaining import messages
from penstock.common.garbage import start_up_kept
from penstock.common.secrets import without_secrets
from penstock.common.settings import read_with_origins
from penstock.server.config import settings as configuration
from penstock.server.config.settings import AddressInUse, ConfigError, ServeConfig
from penstock.server.engines import EngineSource, HubSource, ParserFailed, VllmSource, make_parser
from penstock.server.preflight import check_engine, check_model, check_ports

logger = logging.getLogger(__name__)
PROGRAM = "penstock serve"


HELP = """Serve a model: rollouts, tasks and weight updates over penstock.v1.

Every option of vLLM's engine may be given under its own name:

    penstock serve --model HuggingFaceTB/SmolLM2-135M-Instruct --dtype bfloat16 --max-model-len 2048

With --engines it is a hub instead: it offers the same services for a pool of such servers
(docs/operations/many-engines.md).

    penstock serve --engines 10.0.0.1:50051,10.0.0.2:50051

All settings may also be in a TOML file: the server's own settings at the top and in [leases],
[weights], [journal], [conversation], [http], [streaming], [limits], [pool], [peers] and [security],
vLLM's in [engine]. --dry-run prints such a file with every setting resolved.

An address other than this host's loopback needs TLS and tokens: docs/operations/security.md.
"""


@click.command(
    help=HELP,
    epilog="Exit status: 0 if it was stopped by SIGTERM or Ctrl-C; 1 if it cannot serve, or its engine or "
    "journal failed; 2 if the configuration or the command line is invalid.",
    context_settings={
        "ignore_unknown_options": True,
        "max_content_width": 100,
        "help_option_names": ["-h", "--help"],
    },
)
@click.option("--model", help="Model directory or hub name; required here or in the file.")
@click.option(
    "--listen",
    show_default="127.0.0.1:50051",
    help="HOST:PORT to listen on; port 0 picks a free one.",
)
@click.option(
    "--http-listen",
    show_default="the port after gRPC's",
    help="HOST:PORT of the HTTP endpoints; empty for none.",
)
@click.option(
    "--engines",
    help="HOST:PORT,... of the engine servers behind a hub; also dns:HOST:PORT and file:PATH.",
)
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file of settings.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a setting of the file, such as leases.seconds=30. Can be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and exit.")
@json_option
@click.argument(
    "engine_options", nargs=-1, type=click.UNPROCESSED, metavar="[--VLLM-OPTION VALUE]..."
)
@click.pass_context
def serve(
    context: click.Context,
    model: str | None,
    listen: str | None,
    http_listen: str | None,
    engines: str | None,
    path: Path | None,
    settings: tuple[str, ...],
    dry_run: bool,
    engine_options: tuple[str, ...],
) -> None:
    """Serve a model."""
    named = {
        "listen": listen,
        "http.listen": http_listen,
        "pool.engines": engines,
        "engine.model": model,
    }
    given = {name: value for name, value in named.items() if value is not None}
    try:
        config = configuration.load(path, list(settings), given)
        if not config.engine.get("model") and not config.pool.engines:
            raise ConfigError(
                "no model: give --model, or model in [engine], or --engines for a hub"
            )
        if not config.pool.engines:

            def origin(key: str) -> str:
                _, origins = read_with_origins(path, settings, configuration.labelled(given))
                return origins.named(tuple(key.split(".")))

            check_engine(config, engine_options, origin)
        context.exit(run(config, list(engine_options), dry_run=dry_run))
    except ConfigError as error:
        context.exit(complain(PROGRAM, error))
    except AddressInUse as error:
        context.exit(complain(PROGRAM, error, Exit.FAILED))


def main(arguments: list[str]) -> int:
    result = serve.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    return result if isinstance(result, int) else 0


def run(config: ServeConfig, engine_options: list[str], *, dry_run: bool) -> int:
    logging.basicConfig(
        level=os.environ.get("PENSTOCK_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if not dry_run:
        check_ports(config)
        check_model(config)
    source = (HubSource if config.pool.engines else VllmSource)(config, engine_options)
    if dry_run:
        import tomli_w

        resolved = config.model_dump(mode="json", exclude_none=True)
        # vLLM's options include secrets at the top (`hf_token`), and inside nested tables.
        resolved["engine"] = without_secrets(source.options)
        show_toml(tomli_w.dumps(cast("dict[str, object]", _without_none(resolved))))
        return 0

    from penstock.common import allocator, telemetry
    from penstock.server.journal.protocol import JournalInUse, JournalUnreadable
    from penstock.wire.security import CredentialsUnusable

    allocator.keep_freed_memory()
    telemetry.configure("penstock-server")
    try:
        return asyncio.run(_serve(config, source))
    except (
        AddressInUse,
        CredentialsUnusable,
        JournalInUse,
        JournalUnreadable,
        ParserFailed,
    ) as error:
        return complain(PROGRAM, error, Exit.FAILED)
    finally:
        telemetry.shutdown()


async def _serve(config: ServeConfig, source: EngineSource) -> int:
    """Serve from the first bind to the last answer; see `lifecycle` for the order."""
    from penstock.server.assembly import Serving
    from penstock.server.http.server import open_http
    from penstock.server.journals import open_journal
    from penstock.server.lifecycle import Lifecycle, bind
    from penstock.server.security.gate import open_gate
    from penstock.server.text.renderer import Renderer

    # Bind first: a port in use must not cost the minutes that a model takes to load.
    gate = open_gate(config)
    server, port = bind(config.listen, config.limits.concurrent_calls, gate)
    http = open_http(config, port, gate.credentials)
    try:
        tokenizer = source.load_tokenizer(None)
    except Exception as error:
        return _cannot_serve(source, error)
    parser = make_parser(config, tokenizer) if tokenizer is not None else None
    journal = await open_journal(config.journal)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.ensure_future(source.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    try:
        engine = starting.result()
        if tokenizer is None:
            tokenizer = source.load_tokenizer(engine)
            assert tokenizer is not None, "a running engine has a tokenizer"
            parser = make_parser(config, tokenizer)
    except Exception as error:
        return _cannot_serve(source, error)
    renderer = Renderer(tokenizer, engine.description.eos_token_ids, parser)
    serving = Serving(engine, renderer, config, journal, gate, http)
    life = Lifecycle(serving, server)
    # Before the first caller can connect, because it takes a few hundred milliseconds.
    with start_up_kept():
        await life.start()
        host = config.listen.rpartition(":")[0]
        click.echo(
            f"penstock serving {engine.description.model} on {host}:{port} "
            f"(weight version {serving.switch.active_version})"
        )
        if http is not None:
            click.echo(f"penstock endpoints on {http.url}")
        sys.stdout.flush()
        failing = asyncio.ensure_future(life.failed())
        await asyncio.wait([failing, stopping], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            complain(PROGRAM, failing.result(), Exit.FAILED)
            await life.stop(0.0)
            return Exit.FAILED
        failing.cancel()
        await life.stop()
        return 0


def _cannot_serve(source: EngineSource, error: Exception) -> int:
    """vLLM may raise anything for a model it cannot load."""
    logger.debug("the engine did not start", exc_info=error)
    # Of pydantic's, only the words: it would add the whole configuration of the engine.
    said = messages(error) if isinstance(error, ValidationError) else error
    return complain(PROGRAM, f"cannot serve {source.model}: {said}", Exit.FAILED)


def _without_none(value: object) -> object:
    """Drop settings that are None, because TOML has no null."""
    if isinstance(value, dict):
        table = cast("dict[object, object]", value)
        return {str(k): _without_none(v) for k, v in table.items() if v is not None}
    if isinstance(value, list | tuple):
        items = cast("list[object]", value)
        return [_without_none(item) for item in items if item is not None]
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
