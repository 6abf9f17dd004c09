"""The command line: `penstock serve | train | rollout | eval | weights | health | journal | token |
demo | up`.

Kept light: each command imports what it runs when it runs. The engine's child process imports the main
module anew, so nothing here may have an effect at import.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.address_type import Address
from penstock.cli.health import health
from penstock.cli.loading import exit_with, load
from penstock.cli.security_options import security_options
from penstock.cli.style_options import style_options
from penstock.cli.up import up
from penstock.client.environments.settings import environment_options
from penstock.client.external.options import command_options

if TYPE_CHECKING:
    from penstock.client.environments.settings import EnvironmentSettings
    from penstock.client.external.settings import CommandSettings
    from penstock.wire.security import Security

# Passed through whole, --help included, to the command's own parser.
_PASS_THROUGH: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}

_SERVE_EXTRAS = "server,cpu (or server,cuda)"
_UPLOAD_EXTRAS = "server (or trainer)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("penstock"), prog_name="penstock")
def main() -> None:
    """Reinforcement learning for language models over one typed gRPC protocol.

    Three processes: `serve` samples from the model, `rollout` takes the turns of tasks and scores
    them, `train` submits the tasks, learns from what was scored and sends the new weights back.
    `up` runs all three, on this machine or a cluster, and `demo` does with nothing to configure.
    """


@main.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(options: tuple[str, ...]) -> None:
    """Serve a model: sampling, tasks, weights.

    [--config FILE] [--listen HOST:PORT] [--dry-run] [any option of the engine, such as --model]
    """
    run = load("penstock.server.__main__", "main", _SERVE_EXTRAS)
    exit_with(run, _SERVE_EXTRAS, list(options))


@main.command()
@click.argument("config", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and exit.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes of this host to compute with; for several hosts see torchrun.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a value of CONFIG; may be repeated.",
)
def train(
    config: Path, resume: bool, dry_run: bool, ranks: int, overrides: tuple[str, ...]
) -> None:
    """Train a policy as CONFIG, a TOML file, says.

    The file names the rollout server, or several, the model and where the tasks come from; what it
    leaves out has a default, which --dry-run prints. Reward, lag and times are shown for every step,
    and written to the run's folder.
    """
    run = load("penstock.trainer.__main__", "train", "trainer")
    exit_with(run, "trainer", config, list(overrides), resume, dry_run, ranks)


@main.command()
@click.option(
    "--server",
    "servers",
    required=True,
    multiple=True,
    metavar="HOST:PORT",
    type=Address(),
    help="The rollout server; may be repeated, and --concurrency is then divided over them.",
)
@click.option(
    "--generate",
    metavar="PKG.MODULE:FUNCTION",
    help="generate(task, trajectory): takes any number of turns. "
    "Default: one, on the task's prompt.",
)
@click.option(
    "--reward",
    metavar="PKG.MODULE:FUNCTION",
    help="reward(task, trajectory): returns a number. Default: what generate returns. Also "
    "FILE.py:FUNCTION.",
)
@click.option(
    "--group-reward",
    is_flag=True,
    help="Call reward(task, trajectories) once for all attempts at a task; it returns a list of "
    "numbers. --concurrency must be at least the size of a group.",
)
@click.option(
    "--concurrency",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Attempts in flight at a time.",
)
@click.option(
    "--agent-id", metavar="NAME", help="Names this process to the server. Default: HOST-PID."
)
@click.option("--purpose", type=click.Choice(["train", "eval"]), help="Only tasks of this purpose.")
@click.option(
    "--attempts", type=click.IntRange(min=1), metavar="N", help="Exit after so many attempts."
)
@click.option(
    "--attempt-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Fail an attempt that takes longer, reward included. Default: no limit.",
)
@click.option(
    "--drain-timeout",
    default=20.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="After SIGTERM or Ctrl-C, give attempts in flight this long to end.",
)
@click.option(
    "--reconnect-timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Wait this long for a lost server before an attempt in flight is given up. New attempts "
    "are waited for without a bound.",
)
@style_options
@click.option(
    "--rollout-function",
    metavar="PKG.MODULE:FUNCTION",
    help="With --style slime: f(args, rollout_id, data_source, evaluation) makes whole rollouts.",
)
@environment_options
@command_options
@security_options
def rollout(
    security: Security,
    external: CommandSettings | None,
    environments: EnvironmentSettings | None,
    servers: tuple[str, ...],
    style: str,
    arguments: Path | None,
    rollout_function: str | None,
    generate: str | None,
    reward: str | None,
    group_reward: bool,
    concurrency: int,
    agent_id: str | None,
    purpose: str | None,
    attempts: int | None,
    attempt_timeout: float | None,
    drain_timeout: float,
    reconnect_timeout: float,
) -> None:
    """Lease attempts at tasks, take their turns and score them.

    Goes on until stopped, over restarts of the server. Give --reward, a --generate that returns
    the reward, an --environment or a --command; modules of the working directory are found.
    Functions may be async or plain; a plain one runs in a thread. One that raises fails its attempt,
    which the server has made again.

    \b
    # score.py
    def reward(task, trajectory):
        return float(task.metadata["answer"] in trajectory.text)

    \b
    $ penstock rollout --server 127.0.0.1:50051 --reward score:reward
    """
    from penstock.cli.rollout import RolloutOptions
    from penstock.cli.rollout import rollout as run
    from penstock.client.calls import Patience
    from penstock.client.leases import default_agent_id
    from penstock.client.tasks import Purpose
    from penstock.client.worker import WorkerSettings

    settings = WorkerSettings(
        concurrency=concurrency,
        agent_id=agent_id or default_agent_id(),
        purpose=Purpose(purpose) if purpose else None,
        group_reward=group_reward,
        attempts=attempts,
        attempt_seconds=attempt_timeout,
        drain_seconds=drain_timeout,
    )
    patience = Patience(reconnect_seconds=reconnect_timeout)
    options = RolloutOptions(
        *(servers, generate, reward, settings, patience, security),
        style=style,
        arguments=arguments,
        rollout_function=rollout_function,
        external=external,
        environments=environments,
    )
    sys.exit(run(options))


@main.command("eval", context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def evaluate(options: tuple[str, ...]) -> None:
    """Measure what a server, or a model, samples on a set of prompts.

    (--server HOST:PORT | --model MODEL) (--data FILE | --task NAME) [--reward PKG.MODULE:FUNCTION]
    """
    if any(option.partition("=")[0] == "--model" for option in options):
        extras, module = "server,trainer,cpu", "penstock.demo.evaluate"
    else:
        extras, module = "trainer", "penstock.trainer.commands.evaluate"
    exit_with(load(module, "main", extras), extras, list(options))


@main.group()
def weights() -> None:
    """Show the weight versions of a server, or push one by hand."""


@weights.command("show")
@click.argument("address", metavar="HOST:PORT", type=Address())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@security_options
def show_weights(security: Security, address: str, as_json: bool) -> None:
    """Show what the server at HOST:PORT samples, holds and takes."""
    from penstock.cli.weights import show

    sys.exit(show(address, as_json, security))


@weights.command("push")
@click.argument("address", metavar="HOST:PORT", type=Address())
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--version",
    "weight_version",
    type=click.IntRange(min=1),
    metavar="N",
    help="Greater than every version the server has. Default: the newest one's and one.",
)
@click.option(
    "--source",
    type=click.Choice(["auto", "checkpoint", "stream", "shared-memory"]),
    default="auto",
    show_default=True,
    help="How the server gets the bytes. auto: FOLDER itself where the server can read it and its "
    "dtype is the server's, else memory of this host, else the connection.",
)
@click.option(
    "--in-flight",
    type=click.Choice(["keep", "recompute", "drain", "abort"]),
    help="What happens to turns in flight. Default: as the server is configured.",
)
@click.option("--stage-only", is_flag=True, help="Upload and verify, and do not switch.")
@security_options
def push_weights(
    security: Security,
    address: str,
    folder: Path,
    weight_version: int | None,
    source: str,
    in_flight: str | None,
    stage_only: bool,
) -> None:
    """Upload a Hugging Face checkpoint, a FOLDER of safetensors, to the server at HOST:PORT.

    Tensors are converted to the server's dtype. Prints how long sampling stood still and how many
    tensors changed. Not while a trainer is connected: versions only grow, and its next would be
    refused.
    """
    from penstock.cli.weights import PushOptions, push

    options = PushOptions(
        address, folder.resolve(), weight_version, source, in_flight, stage_only, security
    )
    exit_with(push, _UPLOAD_EXTRAS, options)


@main.command(context_settings=_PASS_THROUGH, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> None:
    """Run all three on this machine: a reward climbs."""
    extras = "server,trainer,cpu"
    exit_with(load("penstock.demo.__main__", "main", extras), extras, list(options))


main.add_command(up)
main.add_command(health)


class _JournalFolder(click.Path):
    """A folder; the address of a NATS server is told why it is none."""

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        if str(value).startswith(("nats:", "tls:")):
            self.fail(
                "a journal in a stream of NATS is read by its server alone: docs/many-hubs.md",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


_JOURNAL = click.argument(
    "folder", type=_JournalFolder(exists=True, file_okay=False, path_type=Path)
)


@main.group()
def journal() -> None:
    """Show, check and export what a server stored; docs/journal.md.

    Nothing is locked or changed, and the server may go on meanwhile.
    """


@journal.command("list")
@_JOURNAL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_journal(folder: Path, as_json: bool) -> None:
    """List what the journal in FOLDER holds: tasks, groups, open trajectories."""
    run = load("penstock.server.journal.tools.command", "list_stored", "server")
    exit_with(run, "server", folder, as_json)


@journal.command("verify")
@_JOURNAL
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_journal(folder: Path, as_json: bool) -> None:
    """Check every record of the journal in FOLDER.

    The status is 0 where all is whole, 1 where a record is corrupt, 2 where there is no journal. A
    torn end is not corrupt: it was never acknowledged.
    """
    run = load("penstock.server.journal.tools.command", "verify", "server")
    exit_with(run, "server", folder, as_json)


@journal.command("export")
@_JOURNAL
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--state",
    type=click.Choice(["waiting", "used", "all"]),
    default="all",
    show_default=True,
    help="waiting: no step has used them; used: one has, and no durable checkpoint contains it yet.",
)
def export_journal(folder: Path, out: Path, state: str) -> None:
    """Write the finished groups of the journal in FOLDER to OUT, a *.jsonl or *.parquet file.

    One row per trajectory; docs/journal.md names the columns.
    """
    run = load("penstock.server.journal.tools.command", "export", "server")
    exit_with(run, "server", folder, out, state)


_TOKEN_FILE = click.option(
    "--file",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The server's file of tokens, as its security.tokens names it.",
)


@main.group()
def token() -> None:
    """Make, list and revoke the tokens that a server lets in; docs/security.md."""


@token.command("create")
@_TOKEN_FILE
@click.option(
    "--name",
    required=True,
    help="What the caller is called in logs and refusals. Several tokens of one: NAME@WHICH.",
)
@click.option(
    "--role",
    required=True,
    type=click.Choice(["agent", "trainer", "admin"]),
    help="What it may do: take turns, train, or everything.",
)
@click.option(
    "--expires",
    default="30d",
    show_default=True,
    metavar="TIME",
    help="How long it is good for: a number and m, h, d or w.",
)
def create_token(path: Path, name: str, role: str, expires: str) -> None:
    """Make a token. It is printed once, and the file keeps its hash."""
    run = load("penstock.cli.tokens", "create", "server")
    run(path, name, role, expires)


@token.command("list")
@_TOKEN_FILE
def list_tokens(path: Path) -> None:
    """List names, roles and how long they are good for."""
    load("penstock.cli.tokens", "show", "server")(path)


@token.command("revoke")
@_TOKEN_FILE
@click.option("--name", required=True, help="As it was created.")
def revoke_token(path: Path, name: str) -> None:
    """Revoke a token: a server that runs refuses it at its next call."""
    load("penstock.cli.tokens", "revoke", "server")(path, name)


@main.command("version")
def show_version() -> None:
    """Print the version."""
    click.echo(version("penstock"))


if __name__ == "__main__":
    main()
