"""`penstock eval`: measures what a server samples. Prints a table and a line of JSON for each set.

Exit status: 0 measured; 1 no sample of a set could be scored, or the server was lost; 2 invalid usage.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import Address, data_options, security_options, style_options
from penstock.client.environments.settings import environment_options
from penstock.common.answers import Exit, as_json, complain, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.client.calls import Calls
    from penstock.client.environments.settings import EnvironmentSettings
    from penstock.trainer.commands.evaluate_alone import Functions
    from penstock.trainer.commands.evaluate_sets import MeasuredSet
    from penstock.trainer.config.trainer import TrainerConfig
    from penstock.trainer.evaluation.record import EvaluationRecord
    from penstock.wire.security import Security

PROGRAM = "penstock eval"
OK, FAILED, MISUSED, INTERRUPTED = Exit.DONE, Exit.FAILED, Exit.MISUSED, Exit.INTERRUPTED


class Finite(click.FloatRange):
    """A finite number in a range. Click's range accepts `nan`, because no comparison excludes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


@dataclass(frozen=True)
class Scoring:
    """Options that select how attempts are made and scored."""

    generate: str | None
    reward: str | None
    group_reward: bool
    style: str
    arguments: Path | None
    environments: EnvironmentSettings | None


@click.command(
    name="eval",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="Exit status: 0 if every set was measured; 1 if no sample of a set could be scored, or the "
    "server was lost; 2 if the command line is invalid; 130 if it was interrupted.",
)
@click.option(
    "--server",
    metavar="HOST:PORT",
    type=Address(),
    show_default="the one in --config",
    help="Address of the rollout server.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Instead of --server: a model folder, or a name on the hub, to serve.",
)
@click.option(
    "--max-model-len", metavar="N", type=click.IntRange(min=1), help="With --model: context length."
)
@data_options(required=False)
@click.option(
    "--task", metavar="NAME", help="Instead of --data: a reasoning-gym data set, or 'sums'."
)
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of --data: a trainer's file; measures every [[evaluation]] in it. Other options, "
    "such as --prompts, override the file.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="With --config: measure only this evaluation."
)
@click.option(
    "--reward",
    metavar="PKG.MODULE:FUNCTION",
    show_default="the result of generate, or the task's own reward",
    help="reward(task, trajectory) returns a number.",
)
@click.option(
    "--generate",
    metavar="PKG.MODULE:FUNCTION",
    show_default="one turn on the prompt",
    help="generate(task, trajectory) takes any number of turns.",
)
@click.option("--group-reward", is_flag=True, help="Call reward once for all samples of a prompt.")
@style_options
@environment_options
@click.option(
    "--prompts",
    type=click.IntRange(min=1),
    show_default="256",
    help="Number of prompts of each set, from its start.",
)
@click.option(
    "--samples",
    type=click.IntRange(min=1, max=4096),
    show_default="1",
    help="Trajectories sampled for one prompt. With two or more, pass@k is reported.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    show_default="16",
    help="Prompts open at a time.",
)
@click.option(
    "--attempts",
    default=3,
    type=click.IntRange(min=1),
    help="How many times a sample is made before its failure counts.",
)
@click.option(
    "--temperature",
    type=Finite(min=0),
    show_default="0 for one sample, 1 for more",
    help="Temperature of sampling; 0 is greedy.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    show_default="256",
    help="Upper bound on policy tokens in one turn.",
)
@click.option(
    "--top-p",
    type=Finite(min=0, min_open=True, max=1),
    show_default="1",
    help="Nucleus sampling; 1 keeps every token.",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=0),
    show_default="0",
    help="Number of most likely tokens to sample from; 0 means no limit.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends a turn. Can be repeated.")
@click.option("--system-prompt", help="Text of a system message before each prompt.")
@click.option(
    "--passes-from",
    type=Finite(),
    show_default="1",
    help="Lowest reward that counts as correct for pass@k.",
)
@click.option(
    "--reconnect-timeout",
    default=60.0,
    metavar="SECONDS",
    type=Finite(min=0),
    help="How long to wait for a lost server before giving up.",
)
@click.option("--dry-run", is_flag=True, help="Check everything except the server, and exit.")
@json_option
@security_options
def evaluate(
    security: Security,
    environments: EnvironmentSettings | None,
    server: str | None,
    model: str | None,
    max_model_len: int | None,
    data: str | None,
    task: str | None,
    config_file: Path | None,
    only: tuple[str, ...],
    reward: str | None,
    generate: str | None,
    group_reward: bool,
    style: str,
    arguments: Path | None,
    attempts: int,
    reconnect_timeout: float,
    dry_run: bool,
    **said: Any,
) -> None:
    """Measure what a server samples on sets of prompts; see docs/guides/evaluation.md.

    Takes and scores the turns in this process, with or without a trainer on the same server.
    """
    from penstock.trainer.commands.evaluate_sets import Given, open_set, open_sets

    if max_model_len is not None:
        raise click.UsageError("--max-model-len requires --model")
    if model is not None:
        raise click.UsageError("--model starts a server itself: leave --server out")
    if [data, task, config_file].count(None) != 2:
        raise click.UsageError("give either --data or --task, or --config")
    if only and config_file is None:
        raise click.UsageError("--only requires --config")
    given = Given(**said)
    if given.columns is not None and data is None:
        raise click.UsageError("--columns requires --data")
    if config_file is None:
        sets = [open_set(data, task, given, attempts)]
    else:
        from penstock.trainer.config.trainer import load_config

        config = load_config(config_file)
        if server is None:
            server, security = _server_of(config, security)
        sets = open_sets(config, config_file, only, given, attempts)
    if server is None:
        raise click.UsageError("give --server, or --model")
    scoring = Scoring(generate, reward, group_reward, style, arguments, environments)
    load = _load(task, scoring)
    if generate is None and environments is None:
        for each in sets:
            if each.needs_environment:
                raise click.UsageError(
                    f"the prompts of {each.extent.name} come from an environment: give --environment"
                )
    security.check(server)
    if not dry_run:
        sys.exit(asyncio.run(_measure(server, security, reconnect_timeout, sets, load)))


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    from penstock.client.errors import PenstockError
    from penstock.client.scoring import BadFunction
    from penstock.trainer.core.errors import ConfigInvalid
    from penstock.wire.security import CredentialsUnusable

    logging.basicConfig(level=logging.INFO, format="penstock eval: %(message)s", stream=sys.stderr)
    try:
        evaluate.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    except (click.ClickException, ConfigInvalid, BadFunction, CredentialsUnusable) as error:
        return complain(PROGRAM, error, MISUSED)
    except PenstockError as error:
        return complain(PROGRAM, error, FAILED)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return OK


def _server_of(config: TrainerConfig, given: Security) -> tuple[str, Security]:
    """Returns the server's address from a trainer's file, and its security settings. Those `given`
    on the command line take precedence. Raises ConfigInvalid."""
    from penstock.trainer.assembly import security_of

    address, *others = config.server.addresses
    if others:
        raise click.UsageError("the file has several servers: select one with --server")
    return address, security_of(config.server, given)


def _load(task: str | None, scoring: Scoring) -> Callable[[Calls], Functions]:
    """Loads the functions that the command line names. Raises BadFunction."""
    from penstock.client.scoring import BadFunction, is_group_reward, load_function, single_turn
    from penstock.trainer.commands.evaluate_alone import Functions
    from penstock.trainer.commands.evaluate_sets import reward_of

    generate, reward = scoring.generate, scoring.reward
    if scoring.style != "penstock":
        return _load_style(scoring)
    if scoring.arguments is not None:
        raise BadFunction("--args requires a --style")
    if scoring.environments is not None:
        if generate is not None:
            raise BadFunction("--environment and --generate both take the turns: give only one")
        from penstock.client.environments.naming import load_agent

        agent = load_agent(scoring.environments)
    elif generate is not None:
        agent = load_function(generate, "--generate")
    else:
        agent = single_turn
        if reward is None:
            if task is None:
                raise BadFunction("give --reward, or a --generate that returns the reward")
            reward = reward_of(task)
    if reward is None and scoring.group_reward:
        raise BadFunction("--group-reward changes how --reward is called: give --reward too")
    score = load_function(reward, "--reward") if reward else None
    functions = Functions(agent, score, per_group=scoring.group_reward or is_group_reward(score))
    return lambda calls: functions


def _load_style(scoring: Scoring) -> Callable[[Calls], Functions]:
    """Loads functions that were written for another system. Raises BadFunction."""
    from penstock.client.plugins.arguments import read_arguments
    from penstock.client.plugins.styles import Style, load_functions
    from penstock.client.scoring import BadFunction
    from penstock.trainer.commands.evaluate_alone import Functions

    if scoring.environments is not None:
        raise BadFunction(
            "--style selects how functions are called: it cannot be combined with --environment"
        )
    args = read_arguments(scoring.arguments)
    found = load_functions(
        *(Style(scoring.style), scoring.generate, scoring.reward, args),
        whole_group=scoring.group_reward,
    )

    def connected(calls: Calls) -> Functions:
        found.connect(calls)
        return Functions(found.generate, found.reward, per_group=scoring.group_reward)

    return connected


async def _measure(
    server: str,
    security: Security,
    reconnect_timeout: float,
    sets: Sequence[MeasuredSet],
    load: Callable[[Calls], Functions],
) -> int:
    """Measures the sets one after another, printing each as it ends. Returns the exit status."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from penstock.client.calls import Calls, Patience
    from penstock.trainer.commands.evaluate_alone import Measuring

    status = OK
    calls = Calls(server, Patience(reconnect_seconds=reconnect_timeout), security)
    try:
        functions = load(calls)
        console = Console(stderr=True)
        quiet = not console.is_terminal
        for each in sets:
            with Progress(console=console, transient=True, disable=quiet) as progress:
                bar = progress.add_task(escape(each.extent.name), total=each.extent.prompts)
                measuring = Measuring(
                    *(calls, each.source, functions, each.extent),
                    on_prompt=lambda: progress.advance(bar),  # noqa: B023
                )
                record = await measuring.run()
            status = max(status, _report(record))
    finally:
        await calls.close()
    return status


def _report(record: EvaluationRecord) -> int:
    from rich.console import Console

    from penstock.trainer.evaluation.writer import as_line

    if not as_json():
        Console(highlight=False).print(_table(record))
    sys.stdout.write(json.dumps(as_line(record)) + "\n")
    if not record.figures.samples:
        counted = ", ".join(f"{r} {n}" for r, n in sorted(record.failure_reasons.items()))
        return complain(PROGRAM, f"no sample could be scored: {counted}", FAILED)
    return OK


def _table(record: EvaluationRecord) -> Table:
    from rich.table import Table
    from rich.text import Text

    from penstock.trainer.evaluation.writer import number, versions

    # Without markup, because a name may look like markup, such as [hard].
    title = f"{record.name}, version {versions(record)}"
    table = Table(title=Text(title), title_justify="left")
    counts = list(record.figures.pass_at)
    names = ["", "prompts", "reward", "±", *(f"pass@{k}" for k in counts)]
    for name in [*names, "tokens", "truncated", "failed"]:
        table.add_column(name, justify="left" if not name else "right")
    rows = {"all": record.figures}
    if len(record.by_source) > 1:
        rows = {**record.by_source, **rows}
    for name, figures in rows.items():
        table.add_row(
            Text(name),
            str(figures.prompts),
            number(figures.reward_mean),
            number(figures.reward_stderr),
            *(number(figures.pass_at.get(k)) for k in counts),
            number(figures.tokens_mean, ".1f"),
            number(figures.truncated_share, ".0%"),
            str(figures.failures),
        )
    if record.mixed_groups:
        table.caption = (
            f"{record.mixed_share:.0%} of the prompts mix versions "
            f"{record.oldest_weight_version} to {record.newest_weight_version}"
        )
    return table
