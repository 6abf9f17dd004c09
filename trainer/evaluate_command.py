"""`penstock eval`: measures what a server samples, by itself; prints a table and, as its last line, JSON.

Exit status: 0 measured; 1 no sample could be scored, or the server was lost; 2 the command line cannot be
used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.client.address_type import Address
from penstock.client.security_options import security_options
from penstock.trainer.data_config import (
    JsonlConfig,
    MixableConfig,
    ParquetConfig,
    PythonConfig,
    ReasoningGymConfig,
)

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.trainer.evaluate_alone import Extent, Functions
    from penstock.trainer.evaluation_record import EvaluationRecord, Figures
    from penstock.trainer.sources.problem import Source
    from penstock.wire.security import Security

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
SUMS = "sums"
# By their names: what they are in is no part of the trainer.
SUMS_DATA = "penstock.demo.tasks:sums"
SUMS_REWARD = "penstock.demo.rewards:last_integer_is_answer"
GYM_REWARD = "penstock.demo.rewards:reasoning_gym_score"


@click.command(name="eval")
@click.option("--server", metavar="HOST:PORT", type=Address(), help="The rollout server.")
@click.option("--model", metavar="MODEL", help="Instead: a folder, or a name on the hub, to serve.")
@click.option(
    "--max-model-len", metavar="N", type=click.IntRange(min=1), help="With --model: its context."
)
@click.option(
    "--data",
    metavar="DATA",
    help="A *.jsonl or *.parquet file, a folder of the latter, or PKG.MODULE:FUNCTION.",
)
@click.option("--task", metavar="NAME", help=f"Instead: a data set of reasoning-gym, or {SUMS!r}.")
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
@click.option("--prompts", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--samples", default=1, show_default=True, type=click.IntRange(min=1, max=4096))
@click.option(
    "--concurrency",
    default=16,
    show_default=True,
    type=click.IntRange(min=1),
    help="Prompts under way at a time.",
)
@click.option("--attempts", default=3, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    help="0 is greedy.  [default: 0 for one sample, 1 for more]",
)
@click.option("--max-tokens", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--top-p", type=click.FloatRange(min=0, min_open=True, max=1))
@click.option("--system-prompt", default="", help="Text of a system message before each prompt.")
@click.option(
    "--passes-from",
    default=1.0,
    show_default=True,
    help="Reward from which an answer is right, for pass@k.",
)
@click.option("--reconnect-timeout", default=60.0, show_default=True, metavar="SECONDS")
@click.option("--dry-run", is_flag=True, help="Check all but the server, and exit.")
@security_options
def evaluate(
    security: Security,
    server: str | None,
    model: str | None,
    max_model_len: int | None,
    data: str | None,
    task: str | None,
    reward: str | None,
    generate: str | None,
    group_reward: bool,
    prompts: int,
    samples: int,
    concurrency: int,
    attempts: int,
    temperature: float | None,
    max_tokens: int,
    top_p: float | None,
    system_prompt: str,
    passes_from: float,
    reconnect_timeout: float,
    dry_run: bool,
) -> None:
    """Measure what a server samples on a set of prompts; docs/evaluation.md.

    Takes the turns and scores them in this process, beside a trainer of the same server or without one.
    """
    from penstock.client.sampling import SamplingParams
    from penstock.trainer.evaluate_alone import Extent

    if model is not None or max_model_len is not None:
        raise click.UsageError("--model begins a server of its own: leave --server out")
    if server is None:
        raise click.UsageError("give --server, or --model")
    source = _open(data, task)
    functions = _load(task, generate, reward, group_reward=group_reward)
    extent = Extent(
        name=task or source.name,
        prompts=_count(source, prompts),
        samples_per_prompt=samples,
        concurrency=concurrency,
        attempts=attempts,
        sampling=SamplingParams(
            temperature=(0.0 if samples == 1 else 1.0) if temperature is None else temperature,
            top_p=top_p,
            max_tokens=max_tokens,
        ),
        system_prompt=system_prompt,
        passes_from=passes_from,
    )
    security.check(server)
    if not dry_run:
        record = asyncio.run(
            _measure(server, security, reconnect_timeout, source, functions, extent)
        )
        sys.exit(_report(record))


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    from penstock.client.errors import PenstockError
    from penstock.client.functions import BadFunction
    from penstock.trainer.errors import ConfigInvalid
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


def _open(data: str | None, task: str | None) -> Source:
    """Raises ConfigInvalid, UsageError."""
    from penstock.trainer.sources.opening import open_source

    if (data is None) == (task is None):
        raise click.UsageError("give either --data or --task")
    section = "--data" if data is not None else "--task"
    # Always the same order, so that results can be compared.
    return open_source(_source(data, task), 0, section)


def _source(data: str | None, task: str | None) -> MixableConfig:
    if data is None:
        if task == SUMS:
            return MixableConfig(python=PythonConfig(function=SUMS_DATA))
        return MixableConfig(reasoning_gym=ReasoningGymConfig(name=task or ""))
    path = Path(data)
    if path.is_dir() or path.suffix == ".parquet":
        return MixableConfig(parquet=ParquetConfig(path=path))
    if path.suffix in (".jsonl", ".json"):
        return MixableConfig(jsonl=JsonlConfig(path=path))
    if ":" in data:
        return MixableConfig(python=PythonConfig(function=data))
    raise click.UsageError(
        f"--data {data}: neither *.jsonl, *.parquet, a folder of the latter, nor PKG.MODULE:FUNCTION"
    )


def _load(
    task: str | None, generate: str | None, reward: str | None, *, group_reward: bool
) -> Functions:
    """Raises BadFunction."""
    from penstock.client.functions import BadFunction, load_function
    from penstock.client.scoring import is_group_reward, single_turn
    from penstock.trainer.evaluate_alone import Functions

    if reward is None and generate is None:
        if task is None:
            raise BadFunction("give --reward, or a --generate that returns the reward")
        reward = SUMS_REWARD if task == SUMS else GYM_REWARD
    if reward is None and group_reward:
        raise BadFunction("--group-reward says how --reward is called: give it too")
    scoring = load_function(reward, "--reward") if reward else None
    return Functions(
        load_function(generate, "--generate") if generate else single_turn,
        scoring,
        per_group=group_reward or is_group_reward(scoring),
    )


def _count(source: Source, prompts: int) -> int:
    from penstock.trainer.sources.problem import Finite

    return min(prompts, source.size) if isinstance(source, Finite) else prompts


async def _measure(
    server: str,
    security: Security,
    reconnect_timeout: float,
    source: Source,
    functions: Functions,
    extent: Extent,
) -> EvaluationRecord:
    from rich.console import Console
    from rich.progress import Progress

    from penstock.client.calls import Calls, Patience
    from penstock.trainer.evaluate_alone import Measuring

    calls = Calls(server, Patience(reconnect_seconds=reconnect_timeout), security)
    try:
        console = Console(stderr=True)
        quiet = not console.is_terminal
        with Progress(console=console, transient=True, disable=quiet) as progress:
            bar = progress.add_task(extent.name, total=extent.prompts)
            measuring = Measuring(
                calls, source, functions, extent, on_prompt=lambda: progress.advance(bar)
            )
            return await measuring.run()
    finally:
        await calls.close()


def _report(record: EvaluationRecord) -> int:
    """Prints what was found; returns the exit status."""
    from rich.console import Console

    from penstock.trainer.evaluation_writer import as_line

    Console(highlight=False).print(_table(record))
    sys.stdout.write(json.dumps(as_line(record)) + "\n")
    if not record.figures.samples:
        counted = ", ".join(f"{r} {n}" for r, n in sorted(record.failure_reasons.items()))
        sys.stderr.write(f"penstock eval: no sample could be scored: {counted}\n")
        return FAILED
    return OK


def _table(record: EvaluationRecord) -> Table:
    from rich.table import Table

    table = Table(title=f"{record.name}, version {record.weight_version}", title_justify="left")
    names = ["", "prompts", "reward", "±", *(f"pass@{k}" for k in record.figures.pass_at)]
    for name in [*names, "tokens", "truncated", "failed"]:
        table.add_column(name, justify="left" if not name else "right")
    rows = {"all": record.figures}
    if len(record.by_source) > 1:
        rows = {**record.by_source, **rows}
    for name, figures in rows.items():
        table.add_row(name, *_cells(figures, list(record.figures.pass_at)))
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
