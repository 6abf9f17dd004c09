"""The worker's part: its functions are imported, and the reward is called once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.client.outcome import Failed
from penstock.client.scoring import RewardInvalid, as_failed, load_function
from penstock.client.trial import NeedsServer, try_reward
from penstock.preflight.report import Report, within

if TYPE_CHECKING:
    from penstock.client.scoring import Agent
    from penstock.client.tasks import Task
    from penstock.common.settings import Table

CALL_SECONDS = 2.0
KEYWORDS = ("exit-status", "result-file")
"""What --reward may be instead of a function, with --command."""


def load_reward(options: Table) -> Agent | None:
    """The reward of a worker with these options of `penstock rollout`; None if it has none that can be
    called without a server. Raises BadFunction."""
    generate, reward = options.get("generate"), options.get("reward")
    style = str(options.get("style", "penstock"))
    if style != "penstock":
        return _load_style(style, options)
    if generate is not None:
        load_function(str(generate), "--generate")
    if reward in (None, *KEYWORDS):
        return None
    function = load_function(str(reward), "--reward")
    # With --command it reads what the process left.
    return None if "command" in options else function


def _load_style(style: str, options: Table) -> Agent | None:
    from penstock.client.plugins.arguments import read_arguments
    from penstock.client.plugins.styles import Style, load_functions
    from penstock.client.plugins.worker import load_worker
    from penstock.client.worker import WorkerSettings

    names = ("generate", "reward", "rollout-function")
    generate, reward, whole = (cast("str | None", options.get(name)) for name in names)
    args = options.get("args")
    path = None if args is None else Path(str(args))
    whole_group = bool(options.get("group-reward"))
    if style == Style.SLIME or whole is not None:
        # slime's functions are called with samples, which only a server can fill.
        load_worker(style, generate, reward, whole, path, WorkerSettings(group_reward=whole_group))
        return None
    given = read_arguments(path)
    return load_functions(Style(style), generate, reward, given, whole_group=whole_group).reward


def call_once(reward: Agent, name: str, task: Task, report: Report, *, whole_group: bool) -> None:
    """Calls the reward on a task with an empty answer, which a policy may give too."""
    begun = time.monotonic()
    try:
        outcome = within(
            CALL_SECONDS,
            lambda: asyncio.run(try_reward(reward, task, "", whole_group=whole_group)),
        )
    except NeedsServer:
        report.remark(name, "it calls the server, so it was imported and not called")
        return
    except TimeoutError:
        report.remark(name, f"no reward of an empty answer within {CALL_SECONDS:g} s")
        return
    except RewardInvalid as error:
        report.problem(name, error)
        return
    except Exception as error:
        failed = as_failed(error, task)
        report.problem(
            name,
            f"it raises {type(error).__name__} for an empty answer to the first prompt: "
            f"{failed.message}; try it with `penstock reward try`",
        )
        return
    if isinstance(outcome, Failed):
        report.remark(
            name, f"an empty answer fails the attempt: {outcome.reason} {outcome.message}"
        )
        return
    milliseconds = 1000 * (time.monotonic() - begun)
    report.checked.append(
        f"reward: {outcome.reward:g} for an empty answer, in {milliseconds:.0f} ms"
    )
