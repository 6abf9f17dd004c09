"""`penstock eval`: measures what a server samples; prints a table and a line of JSON of each set.

Exit status: 0 measured; 1 no sample of a set could be scored, or the server was lost; 2 the command line
cannot be used.
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

from penstock.cli.address_type import Address
from penstock.cli.security_options import security_options
from penstock.cli.style_options import style_options
from penstock.client.environments.settings import environment_options

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.client.calls import Calls
    from penstock.client.environments.settings import EnvironmentSettings
    from penstock.trainer.commands.evaluate_alone import Functions
    from penstock.trainer.commands.evaluate_sets import MeasuredSet
    from penstock.trainer.config.trainer import TrainerConfig
    from penstock.trainer.evaluation.record import EvaluationRecord, Figures
    from penstock.wire.security import Security

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


class Finite(click.FloatRange):
    """A number: `nan` is in every range, for it is not outside of any."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As of a range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


@dataclass(frozen=True)
class Scoring:
    """What the command line says of how attempts are made and scored."""

    generate: str | None
    reward: str | None
    group_reward: bool
    style: str
    arguments: Path | None
    environments: EnvironmentSettings | None


@click.command(name="eval")
@click.option(
    "--server",
    metavar="HOST:PORT",
    type=Address(),
    help="The rollout server. Default: that of --config.",
)
@click.option("--model", metavar="MODEL", help="Instead: a folder, or a name on the hub, to serve.")
@click.option(
    "--max-model-len", metavar="N", type=click.IntRange(min=1), help="With --model: its context."
)
@click.option(
    "--data",
    metavar="DATA",
    help="A *.jsonl or *.parquet file, a folder of the latter, or PKG.MODULE:FUNCTION.",
)
@click.option("--task", metavar="NAME", help="Instead: a data set of reasoning-gym, or 'sums'.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead: a trainer's file, of which every [[evaluation]] is measured. What is given "
    "besides, such as --prompts, counts over it.",
)
@click.option("--only", multiple=True, metavar="NAME", help="With --config: this evaluation of it.")
@click.option(
    "--reward",
    metavar="PKG.MODULE:FUNCTION",
    help="reward(task, trajectory): a number. Default: what generate returns, or the task's own.",
)
@click.option(
    "--generate",
    metavar="PKG.MODULE:FUNCTION",
    help="generate(task, trajectory): any number of turns. Default: one, on the prompt.",
)
@click.option("--group-reward", is_flag=True, help="Call reward once for all samples of a prompt.")
@style_options
@environment_options
@click.option("--prompts", type=click.IntRange(min=1), help="[default: 256]")
@click.option("--samples", type=click.IntRange(min=1, max=4096), help="[default: 1]")
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Prompts under way at a time.  [default: 16]"
)
@click.option("--attempts", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--temperature",
    type=Finite(min=0),
    help="0 is greedy.  [default: 0 for one sample, 1 for more]",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="[default: 256]")
@click.option("--top-p", type=Finite(min=0, min_open=True, max=1))
@click.option("--top-k", type=click.IntRange(min=0))
@click.option("--stop", multiple=True, metavar="TEXT", help="Ends a turn; may be repeated.")
@click.option("--system-prompt", help="Text of a system message before each prompt.")
@click.option(
    "--passes-from",
    type=Finite(),
    help="Reward from which an answer is right, for pass@k.  [default: 1]",
)
@click.option(
    "--reconnect-timeout", default=60.0, show_default=True, metavar="SECONDS", type=Finite(min=0)
)
@click.option("--dry-run", is_flag=True, help="Check all but the server, and exit.")
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
    """Measure what a server samples on sets of prompts; docs/evaluation.md.

    Takes the turns and scores them in this process, beside a trainer of the same server or without one.
    """
    from penstock.trainer.commands.evaluate_sets import Given, open_set, open_sets

    if max_model_len is not None:
        raise click.UsageError("--max-model-len goes with --model")
    if model is not None:
        raise click.UsageError("--model begins a server of its own: leave --server out")
    if [data, task, config_file].count(None) != 2:
        raise click.UsageError("give either --data or --task, or --config")
    if only and config_file is None:
        raise click.UsageError("--only goes with --config")
    given = Given(**said)
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
                    f"the prompts of {each.extent.name} are made by an environment: give --environment"
                )
    security.check(server)
    if not dry_run:
        sys.exit(asyncio.run(_measure(server, security, reconnect_timeout, sets, load)))


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    from penstock.client.errors import PenstockError
    from penstock.client.functions import BadFunction
    from penstock.trainer.core.errors import ConfigInvalid
    from penstock.wire.security import CredentialsUnusable

    logging.basicConfig(level=logging.INFO, format="penstock eval: %(message)s", stream=sys.stderr)
    try:
        evaluate.main(arguments, prog_name="penstock eval", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return MISUSED
    except (ConfigInvalid, BadFunction, CredentialsUnusable) as error:
        sys.stderr.write(f"penstock eval: {error}\n")
        return MISUSED
    except PenstockError as error:
        sys.stderr.write(f"penstock eval: {error}\n")
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return OK


def _server_of(config: TrainerConfig, given: Security) -> tuple[str, Security]:
    """Where a trainer's file says that its server is, and how it is called, for all that the command line
    has not `given`. Raises ConfigInvalid."""
    from penstock.trainer.assembly import security_of

    address, *others = config.server.addresses
    if others:
        raise click.UsageError("the file has several servers: say which by --server")
    return address, security_of(config.server, given)


def _load(task: str | None, scoring: Scoring) -> Callable[[Calls], Functions]:
    """The functions of the command line, for a server. Raises BadFunction."""
    from penstock.client.functions import BadFunction, load_function
    from penstock.client.scoring import is_group_reward, single_turn
    from penstock.trainer.commands.evaluate_alone import Functions
    from penstock.trainer.commands.evaluate_sets import reward_of

    generate, reward = scoring.generate, scoring.reward
    if scoring.style != "penstock":
        return _load_style(scoring)
    if scoring.arguments is not None:
        raise BadFunction("--args goes with a --style")
    if scoring.environments is not None:
        if generate is not None:
            raise BadFunction("--environment and --generate each take the turns: give one")
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
        raise BadFunction("--group-reward says how --reward is called: give it too")
    score = load_function(reward, "--reward") if reward else None
    functions = Functions(agent, score, per_group=scoring.group_reward or is_group_reward(score))
    return lambda calls: functions


def _load_style(scoring: Scoring) -> Callable[[Calls], Functions]:
    """Functions that were written for another system. Raises BadFunction."""
    from penstock.client.functions import BadFunction
    from penstock.client.plugins.arguments import ArgumentsInvalid, read_arguments
    from penstock.client.plugins.styles import Style, load_functions
    from penstock.client.scoring import is_group_reward
    from penstock.trainer.commands.evaluate_alone import Functions

    if scoring.environments is not None:
        raise BadFunction(
            "--style says how functions are called: it does not go with --environment"
        )
    try:
        args = read_arguments(scoring.arguments)
    except ArgumentsInvalid as error:
        raise BadFunction(f"--args {error}") from error
    found = load_functions(
        *(Style(scoring.style), scoring.generate, scoring.reward, args),
        whole_group=scoring.group_reward,
    )

    def connected(calls: Calls) -> Functions:
        found.connect(calls)
        return Functions(found.generate, found.reward, per_group=is_group_reward(found.reward))

    return connected


async def _measure(
    server: str,
    security: Security,
    reconnect_timeout: float,
    sets: Sequence[MeasuredSet],
    load: Callable[[Calls], Functions],
) -> int:
    """Measures one set after the other, and prints each as it ends; returns the exit status."""
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
    """Prints what was found; returns the exit status."""
    from rich.console import Console

    from penstock.trainer.evaluation.writer import as_line

    Console(highlight=False).print(_table(record))
    sys.stdout.write(json.dumps(as_line(record)) + "\n")
    if not record.figures.samples:
        counted = ", ".join(f"{r} {n}" for r, n in sorted(record.failure_reasons.items()))
        sys.stderr.write(f"penstock eval: no sample could be scored: {counted}\n")
        return FAILED
    return OK


def _table(record: EvaluationRecord) -> Table:
    from rich.table import Table
    from rich.text import Text

    from penstock.trainer.evaluation.writer import versions

    # As it is: a name may be [hard].
    title = f"{record.name}, version {versions(record)}"
    table = Table(title=Text(title), title_justify="left")
    names = ["", "prompts", "reward", "±", *(f"pass@{k}" for k in record.figures.pass_at)]
    for name in [*names, "tokens", "truncated", "failed"]:
        table.add_column(name, justify="left" if not name else "right")
    rows = {"all": record.figures}
    if len(record.by_source) > 1:
        rows = {**record.by_source, **rows}
    for name, figures in rows.items():
        table.add_row(Text(name), *_cells(figures, list(record.figures.pass_at)))
    if record.mixed_groups:
        table.caption = (
            f"{record.mixed_share:.0%} of the prompts mix versions "
            f"{record.oldest_weight_version} to {record.newest_weight_version}"
        )
    return table


def _cells(figures: Figures, counts: list[str]) -> list[str]:
    def number(value: float | None, form: str = ".3f") -> str:
        return "-" if value is None else format(value, form)

    return [
        str(figures.prompts),
        number(figures.reward_mean),
        number(figures.reward_stderr),
        *(number(figures.pass_at.get(k)) for k in counts),
        number(figures.tokens_mean, ".1f"),
        number(figures.truncated_share, ".0%"),
        str(figures.failures),
    ]
