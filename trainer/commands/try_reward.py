"""`penstock reward try`: calls a reward on one row of the data, and shows what it was given and returned.

Exit status: 0 if it returned a reward; 1 if it raised, or the attempt would fail; 2 invalid usage.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.client.outcome import Failed
from penstock.client.scoring import BadFunction, as_failed, load_function, to_log
from penstock.client.tasks import Task, read_task
from penstock.client.trial import described, try_reward
from penstock.common.answers import Exit, complain, show
from penstock.common.suggestions import listed
from penstock.trainer.config.data import SamplingConfig
from penstock.trainer.config.data_options import parse_columns, source_of
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Problem
from penstock.trainer.data.tasks import describe_problem
from penstock.v1 import task_service_pb2
from penstock.wire import codec

if TYPE_CHECKING:
    from penstock.client.scoring import Agent

logger = logging.getLogger("penstock.reward")

SHOWN = 400


def try_on_row(
    name: str,
    data: str,
    columns: str | None,
    row: int,
    answer: str | None,
    style: str,
    arguments: Path | None,
) -> int:
    """Returns the exit status. `row` counts from one, in the order of the data. Without an answer it
    takes the row's own."""
    logging.basicConfig(level=logging.INFO, format="penstock reward: %(message)s")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            reward = _load(name, style, arguments)
        problem = _problem(data, columns, row)
        given = _own_answer(problem, row) if answer is None else answer
    except (BadFunction, ConfigInvalid) as error:
        return complain("penstock reward", error)
    message = describe_problem(problem, "", SamplingConfig())
    message.task_id = f"try/{row - 1}"
    task = read_task(codec.twin(task_service_pb2.Task).FromString(message.SerializeToString()))
    begun = time.perf_counter()
    try:
        # What it prints is not the result.
        with contextlib.redirect_stdout(sys.stderr):
            outcome = asyncio.run(try_reward(reward, task, given))
    except Exception as error:
        # It may raise anything; a worker would fail the attempt and continue.
        outcome = as_failed(error, task)
        # The traceback begins in the function's own file, as a worker's does, and not in this one.
        own = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        logger.error("%s: %s", outcome.reason, outcome.message, exc_info=to_log(own))
    seconds = time.perf_counter() - begun
    told = {
        "row": row,
        "prompt": _prompt(task),
        "metadata": dict(task.metadata),
        "answer": given,
        **described(outcome),
        "seconds": seconds,
    }
    show(_for_people(told), told)
    return Exit.FAILED if isinstance(outcome, Failed) else Exit.DONE


def _load(name: str, style: str, arguments: Path | None) -> Agent:
    """Raises BadFunction."""
    if style == "penstock":
        return load_function(name, "REWARD")
    from penstock.client.plugins.arguments import read_arguments
    from penstock.client.plugins.styles import Style, load_functions

    args = read_arguments(arguments)
    found = load_functions(Style(style), None, name, args, whole_group=False).reward
    if found is None:
        raise BadFunction(f"--style {style}: its rewards need a server: use `penstock eval`")
    return found


def _problem(data: str, columns: str | None, row: int) -> Problem:
    """Raises ConfigInvalid."""
    source = open_source(source_of(data, parse_columns(columns), shuffle=False), 0, "--data")
    if isinstance(source, Finite) and row > source.size:
        raise ConfigInvalid(f"--row {row}: {data} has {source.size} rows")
    return source.problem(row - 1)


def _own_answer(problem: Problem, row: int) -> str:
    """Raises ConfigInvalid."""
    if isinstance(found := problem.metadata.get("answer"), str | int | float):
        return str(found)
    raise ConfigInvalid(
        f"row {row} holds no answer, only {listed(problem.metadata) or 'a prompt'}: give --answer TEXT"
    )


def _prompt(task: Task) -> str:
    assert isinstance(task.prompt, tuple), "a problem is a conversation"
    return "\n".join(f"{each.role}: {each.content}" for each in cast("Any", task.prompt))


def _for_people(told: Mapping[str, Any]) -> str:
    metadata, parts, seconds = told["metadata"], told.get("metrics", {}), told["seconds"]
    shown = {name: value for name, value in told.items() if name not in ("metrics", "seconds")}
    shown["metadata"] = ", ".join(f"{key} = {value!r}" for key, value in sorted(metadata.items()))
    shown["parts"] = ", ".join(f"{name} {value:g}" for name, value in sorted(parts.items()))
    shown["time"] = f"{1000 * seconds:.1f} ms"
    return "\n".join(
        f"{name:<10}{_cut(str(value))}".replace("\n", f"\n{'':<10}")
        for name, value in shown.items()
        if value != ""
    )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text) - SHOWN} characters more)"
