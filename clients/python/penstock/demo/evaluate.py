"""`penstock eval --model`: starts a server for one evaluation, and runs `penstock eval --server` on it.

Order: check everything but the server, before a model is loaded -> start the server -> evaluate -> stop
the server. The exit status is that of the evaluation, or 1 if the server does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

import click

from penstock.common.answers import Exit, complain
from penstock.demo.model import ModelUnavailable, prepare_model
from penstock.demo.settings import SERVER_THREADS, environment
from penstock.up.cast import penstock
from penstock.up.processes import Command, FirstMatch, Process, ProcessFailed, end
from penstock.up.supervisor import SERVING

FAILED, INTERRUPTED = Exit.FAILED, Exit.INTERRUPTED


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.option("--model", required=True)
@click.option("--max-model-len", type=click.IntRange(min=1))
@click.option("--server")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def _evaluate(
    serve: tuple[str, ...],
    model: str,
    max_model_len: int | None,
    server: str | None,
    rest: tuple[str, ...],
) -> None:
    if server is not None:
        raise click.UsageError("--model starts its own server; leave --server out")
    sys.exit(asyncio.run(_run(model, max_model_len, rest, serve)))


def main(arguments: list[str], serve: tuple[str, ...] | None = None) -> int:
    """Returns the exit status. `serve` is the beginning of the server's command line."""
    try:
        _evaluate.main(
            arguments,
            prog_name="penstock eval",
            standalone_mode=False,
            obj=serve or penstock("serve"),
        )
        return 0
    except SystemExit as ended:
        return int(ended.code or 0)
    except click.ClickException as error:
        return complain("penstock eval", error, error.exit_code)
    except (ModelUnavailable, ProcessFailed) as error:
        return complain("penstock eval", error, FAILED)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


async def _run(
    model: str, max_model_len: int | None, rest: tuple[str, ...], serve: tuple[str, ...]
) -> int:
    if status := await _evaluate_at("127.0.0.1:0", (*rest, "--dry-run")):
        return status
    folder = prepare_model(model, lambda text: click.echo(f"penstock eval: {text}", err=True))
    arguments = [*serve, "--model", str(folder), "--listen", "127.0.0.1:0"]
    if max_model_len is not None:
        arguments += ["--max-model-len", str(max_model_len)]
    with tempfile.TemporaryDirectory(prefix="penstock-eval-") as logs:
        log = Path(logs) / "server.log"
        command = Command("server", tuple(arguments), log, environment(SERVER_THREADS))
        serves = FirstMatch(SERVING)
        server = Process.start(command, serves)
        try:
            return await _evaluate_at(await serves.wait(server), rest)
        finally:
            await end([server])


async def _evaluate_at(address: str, rest: tuple[str, ...]) -> int:
    """Runs `penstock eval` on this terminal, whose Ctrl-C reaches it directly."""
    process = await asyncio.create_subprocess_exec(*penstock("eval", "--server", address, *rest))
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.wait()
        raise
