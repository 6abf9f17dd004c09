"""The command line.

Each command imports what it needs only when it runs, so that `penstock --help` stays fast. The engine's
child process imports the main module again, so importing this module must have no side effects.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.doctor import doctor
from penstock.cli.health import health
from penstock.cli.journal import journal
from penstock.cli.loading import exit_with
from penstock.cli.looking import check, logs, runs
from penstock.cli.options import Address, overrides_option, security_options, style_options
from penstock.cli.reward import reward
from penstock.cli.shell import Commands, PassThrough, completion, help_command
from penstock.cli.training import init, train
from penstock.client.environments.settings import environment_options
from penstock.client.external.options import command_options
from penstock.common.answers import show
from penstock.common.distribution import installed_version

if TYPE_CHECKING:
    from penstock.wire.security import Security

_STATUS = "Exit status: 0 if it succeeded; 1 if it failed; 2 if the command line is invalid."

_ENGINE_EXTRAS = "cpu (or cuda)"
_UPLOAD_EXTRAS = "server (or trainer)"


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(installed_version(), "-V", "--version", prog_name="penstock")
def main() -> None:
    """Reinforcement learning for language models over one typed gRPC protocol.

    Three processes make a run. `serve` samples from the model. `rollout` takes the turns of tasks
    and scores them. `train` submits the tasks, trains on the scored trajectories and sends the new
    weights back. `up` runs all three, on this machine or on a cluster. `demo` runs all three
    without any configuration.
    """


@main.command(cls=PassThrough, parser="penstock.server.__main__:serve")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(options: tuple[str, ...]) -> None:
    """Serve a model: sampling, tasks and weight updates.

    [--config FILE] [--listen HOST:PORT] [--dry-run] [any option of the engine, such as --model]
    """
    exit_with("penstock.server.__main__", "main", _ENGINE_EXTRAS, list(options))


@main.command(
    epilog="Exit status: 0 if it was stopped on request, or has made --attempts; 1 if the server refused "
    "it, or it was stopped before it had drained; 2 if the command line or a function is invalid."
)
@click.option(
    "--server",
    "servers",
    required=True,
    multiple=True,
    metavar="HOST:PORT",
    type=Address(),
    help="Rollout server. Can be repeated; --concurrency is then divided among the servers.",
)
@click.option(
    "--generate",
    metavar="PKG.MODULE:FUNCTION",
    show_default="one turn on the task's prompt",
    help="generate(task, trajectory) takes any number of turns.",
)
@click.option(
    "--reward",
    metavar="PKG.MODULE:FUNCTION",
    show_default="the value that generate returns",
    help="reward(task, trajectory) returns a number. FILE.py:FUNCTION works too.",
)
@click.option(
    "--group-reward",
    is_flag=True,
    help="Call reward(task, trajectories) once for all attempts at a task. It must return a list of "
    "numbers. --concurrency must be at least the group size.",
)
@click.option(
    "--concurrency",
    default=8,
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of attempts in flight.",
)
@click.option(
    "--agent-id",
    metavar="NAME",
    show_default="HOST-PID",
    help="Name of this process for the server.",
)
@click.option(
    "--purpose",
    type=click.Choice(["train", "eval"]),
    show_default="both",
    help="Lease only tasks of this purpose.",
)
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="no limit",
    help="Exit after this many attempts.",
)
@click.option(
    "--attempt-timeout",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    show_default="no limit",
    help="Fail attempts that take longer than this, reward included.",
)
@click.option(
    "--drain-timeout",
    default=20.0,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long attempts in flight can continue after SIGTERM or Ctrl-C.",
)
@click.option(
    "--reconnect-timeout",
    default=60.0,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long to wait for a lost server before abandoning an attempt in flight. Waiting for "
    "new attempts has no limit.",
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
    group_reward: bool,
    concurrency: int,
    agent_id: str | None,
    purpose: str | None,
    attempts: int | None,
    attempt_timeout: float | None,
    drain_timeout: float,
    reconnect_timeout: float,
    **others: Any,
) -> None:
    """Lease attempts at tasks, take their turns and score them.

    Runs until stopped and reconnects when the server restarts. Give --reward, a --generate that
    returns the reward, an --environment or a --command. Modules in the working directory are
    importable. Functions can be async or plain; a plain function runs in a thread. If a function
    raises, its attempt fails and the server schedules it again.

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
    options = RolloutOptions(settings=settings, patience=patience, security=security, **others)
    sys.exit(run(options))


@main.command("eval", cls=PassThrough, parser="penstock.trainer.commands.evaluate:evaluate")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def evaluate(options: tuple[str, ...]) -> None:
    """Evaluate a server, or a model, on a set of prompts.

    (--server HOST:PORT | --model MODEL) (--data FILE | --task NAME) [--reward PKG.MODULE:FUNCTION]
    """
    if any(option.partition("=")[0] == "--model" for option in options):
        extras, module = _ENGINE_EXTRAS, "penstock.demo.evaluate"
    else:
        extras, module = "trainer", "penstock.trainer.commands.evaluate"
    exit_with(module, "main", extras, list(options))


@main.group()
def weights() -> None:
    """Show the weight versions of a server, or push one manually."""


@weights.command("show", epilog=_STATUS)
@click.argument("address", metavar="HOST:PORT", type=Address())
@security_options
def show_weights(security: Security, address: str) -> None:
    """Show the weight versions of the server at HOST:PORT and the uploads it accepts."""
    exit_with("penstock.cli.weights", "show", _UPLOAD_EXTRAS, address, security)


@weights.command("push", epilog=_STATUS)
@click.argument("address", metavar="HOST:PORT", type=Address())
@click.argument(
    "folder", type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path)
)
@click.option(
    "--version",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="the newest version plus one",
    help="Number of the new version. Must be greater than every version the server has.",
)
@click.option(
    "--source",
    type=click.Choice(["auto", "checkpoint", "stream", "shared-memory"]),
    default="auto",
    help="How the server gets the bytes. auto: the server reads FOLDER if it can and the dtypes "
    "match; otherwise shared memory on this host; otherwise the connection.",
)
@click.option(
    "--in-flight",
    type=click.Choice(["keep", "recompute", "drain", "abort"]),
    show_default="the server's setting",
    help="What to do with turns in flight.",
)
@click.option(
    "--stage-only", is_flag=True, help="Upload and verify, but do not switch to the new version."
)
@security_options
def push_weights(security: Security, **options: Any) -> None:
    """Upload FOLDER, a Hugging Face checkpoint of safetensors, to the server at HOST:PORT.

    Tensors are converted to the server's dtype. Prints how long sampling was paused and how many
    tensors changed. While a trainer is connected, the server refuses: only the trainer uploads then.
    """
    from penstock.cli.weights import PushOptions

    given = PushOptions(security=security, **options)
    exit_with("penstock.cli.weights", "push", _UPLOAD_EXTRAS, given)


@main.command(cls=PassThrough, parser="penstock.demo.command:demo")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def demo(options: tuple[str, ...]) -> None:
    """Run server, worker and trainer on this machine and watch the reward climb."""
    exit_with("penstock.demo.__main__", "main", _ENGINE_EXTRAS, list(options))


@main.command(
    epilog="Exit status: 0 if the run is done, or was stopped on request; 1 if a process failed too often, "
    "or --status found no run; 2 if CONFIG is invalid."
)
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--resume", is_flag=True, help="Resume the run in the folder that CONFIG names.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and exit.")
@click.option(
    "--status",
    is_flag=True,
    help="Show how far the run in that folder is, and its processes. CONFIG may be the folder itself.",
)
@overrides_option
def up(config: Path, resume: bool, dry_run: bool, status: bool, overrides: tuple[str, ...]) -> None:
    """Run server, workers and trainer as configured in CONFIG, a TOML file, and keep them running.

    With [engines] in the file, it runs several engine servers behind a hub. With [cluster], it runs
    on the nodes of a Ray cluster. A process that dies is restarted. A restarted server waits for
    the weights of the run before it serves. Exits when the trainer is done.
    """
    if status:
        exit_with("penstock.up.looking", "status", _ENGINE_EXTRAS, config, list(overrides))
    if config.is_dir():
        raise click.UsageError(
            f"{config} is a folder, and CONFIG a TOML file; --status shows the run in a folder"
        )
    exit_with("penstock.up.up", "up", _ENGINE_EXTRAS, config, list(overrides), resume, dry_run)


main.add_command(check)
main.add_command(runs)
main.add_command(logs)
main.add_command(reward)
main.add_command(train)
main.add_command(init)
main.add_command(health)
main.add_command(journal)
main.add_command(doctor)
main.add_command(help_command)
main.add_command(completion)


_TOKEN_FILE = click.option(
    "--file",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The server's token file, as named by its security.tokens setting.",
)


@main.group()
def token() -> None:
    """Create, list and revoke access tokens for a server; see docs/operations/security.md."""


@token.command("create", epilog=_STATUS)
@_TOKEN_FILE
@click.option(
    "--name",
    required=True,
    help="Name of the caller in logs and errors. Use NAME@WHICH for several tokens of one caller.",
)
@click.option(
    "--role",
    required=True,
    type=click.Choice(["agent", "trainer", "admin"]),
    help="What the token allows: taking turns, training, or everything.",
)
@click.option(
    "--expires",
    default="30d",
    metavar="TIME",
    help="How long the token is valid: a number followed by m, h, d or w.",
)
def create_token(path: Path, name: str, role: str, expires: str) -> None:
    """Create a token. It is printed once; the file stores only its hash."""
    exit_with("penstock.cli.tokens", "create", "server", path, name, role, expires)


@token.command("list", epilog=_STATUS)
@_TOKEN_FILE
def list_tokens(path: Path) -> None:
    """List the names, roles and expiry times of the tokens."""
    exit_with("penstock.cli.tokens", "show", "server", path)


@token.command("revoke", epilog=_STATUS)
@_TOKEN_FILE
@click.option("--name", required=True, help="Name of the token, as given to create.")
def revoke_token(path: Path, name: str) -> None:
    """Revoke a token. A running server refuses it from the next call on."""
    exit_with("penstock.cli.tokens", "revoke", "server", path, name)


@main.command("version", epilog="Exit status: 0.")
def show_version() -> None:
    """Print the version of the penstock package."""
    show(installed_version(), {"version": installed_version()})


if __name__ == "__main__":
    main()
