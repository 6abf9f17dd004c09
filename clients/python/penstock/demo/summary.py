"""Summarizes a run: figures for people and for programs."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from penstock.demo.settings import LORA_RANK
from penstock.demo.tasks import held_out

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from penstock.demo.run import Ended
    from penstock.demo.settings import Plan

SHOWN_CHARACTERS = 200
"""Of a prompt and of an answer in the table; summary.json has them whole."""

FIRST_STEPS = 2
LAST_STEPS = 5
"""The first and last reward are means over this many steps."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: the keys of the trainer's metrics.jsonl that are used here.

    Times are in seconds since the epoch.
    """

    step: int
    reward_mean: float
    reward_target_mean: float | None
    """Mean that the target looks at; None without a target or before there are enough attempts."""
    lag_mean: float
    lag_max: int
    tokens: int
    """Policy tokens in the batch."""
    tokens_masked: int
    """Policy tokens that were masked for their age."""
    seconds: float
    """Duration of the whole step, including waiting."""
    pause_seconds: float
    """How long the weight switch paused generation."""
    upload_bytes: int
    time: float
    """When the step ended."""
    time_gather_start: float
    time_gather_end: float
    time_train_start: float
    time_train_end: float
    time_upload_start: float
    time_upload_end: float


@dataclass(frozen=True)
class Load:
    """One sample of the server's load."""

    time: float
    running: int


@dataclass(frozen=True)
class Run:
    """What a run wrote into its folder."""

    steps: tuple[Step, ...]
    load: tuple[Load, ...]


@dataclass(frozen=True)
class Answer:
    """What the first and the last weights answered to a prompt, sampled greedily."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Summary:
    """The figures of a run; `summary.json` has exactly these keys."""

    model: str
    task: str
    steps: int
    target: float | None
    """Mean reward at which the run was to end; None if it was to take all its steps."""
    target_reached: bool
    answers: tuple[Answer, ...]
    """To prompts that were not trained; empty if the server did not answer them."""
    reward_first: float
    reward_last: float
    reward_by_step: tuple[float, ...]
    lag_by_step: tuple[float, ...]
    lag_max: int
    tokens_masked: int
    """Tokens too old to train, over all steps."""
    pause_seconds_by_step: tuple[float, ...]
    upload_bytes_by_step: tuple[int, ...]
    lora_rank: int
    """Rank of the trained adapter; zero if all weights were trained."""
    seconds: float
    """From the server's start to the trainer's end."""
    tokens_per_second: float
    """Policy tokens that reached the trainer, per second from its first step on."""

    def as_table(self) -> Table:
        from rich.table import Table

        table = Table(title=f"{self.model} on {self.task}", show_header=False, title_justify="left")
        table.add_column(style="dim")
        table.add_column()
        lag = fmean(self.lag_by_step)
        pause = median(self.pause_seconds_by_step)
        first, last = min(FIRST_STEPS, self.steps), min(LAST_STEPS, self.steps)
        table.add_row("reward, first", f"{self.reward_first:.3f} (mean of {first} steps)")
        table.add_row("reward, last", f"{self.reward_last:.3f} (mean of {last} steps)")
        if self.target is not None:
            reached = "reached" if self.target_reached else "not reached"
            table.add_row("target", f"{self.target:g}, {reached} in {self.steps} steps")
        table.add_row("steps", f"{self.steps} in {self.seconds:.0f} s, start included")
        table.add_row("tokens", f"{self.tokens_per_second:.0f} per second")
        table.add_row(
            "lag",
            f"{lag:.2f} versions in the mean, at most {self.lag_max};"
            f" {self.tokens_masked} tokens masked for age",
        )
        size = median(self.upload_bytes_by_step) / 1e6
        what = f"an adapter of rank {self.lora_rank}" if self.lora_rank else "all weights"
        table.add_row("update", f"{what}: {size:.1f} MB in the median")
        table.add_row("pause", f"{1000 * pause:.0f} ms in the median")
        return table

    def answers_as_table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="Three prompts that were not trained", title_justify="left")
        for head in ("prompt", "before", "after"):
            table.add_column(head, overflow="fold")
        for one in self.answers:
            texts = (one.prompt, one.before, one.after)
            table.add_row(*(Text(textwrap.shorten(text, SHOWN_CHARACTERS)) for text in texts))
        return table


def read_run(folder: Path) -> Run:
    """Reads what trainer and demo wrote during the run."""
    return Run(
        # Lines of other kinds do not describe steps.
        steps=tuple(
            Step(**{field.name: line[field.name] for field in fields(Step)})
            for line in read_lines(folder / "metrics.jsonl")
            if line.get("kind", "step") == "step"
        ),
        load=tuple(
            Load(line["time"], line["running"]) for line in read_lines(folder / "activity.jsonl")
        ),
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of one JSON object a line; returns an empty list if the file does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarize(run: Run, plan: Plan, ended: Ended) -> Summary:
    """Computes the figures of a run that has at least one step."""
    before, after = ended.before, ended.after
    texts = zip(before.texts, after.texts, strict=True) if before and after else ()
    means = [step.reward_target_mean for step in run.steps[-plan.patience :]]
    rewards = tuple(step.reward_mean for step in run.steps)
    return Summary(
        model=plan.model_name,
        task=plan.task,
        steps=len(run.steps),
        target=plan.target,
        target_reached=plan.target is not None
        and all(mean is not None and mean >= plan.target for mean in means),
        answers=tuple(
            Answer(prompt, *pair) for prompt, pair in zip(held_out(plan.task), texts, strict=False)
        ),
        reward_first=fmean(rewards[:FIRST_STEPS]),
        reward_last=fmean(rewards[-LAST_STEPS:]),
        reward_by_step=rewards,
        lag_by_step=tuple(step.lag_mean for step in run.steps),
        lag_max=max(step.lag_max for step in run.steps),
        tokens_masked=sum(step.tokens_masked for step in run.steps),
        pause_seconds_by_step=tuple(step.pause_seconds for step in run.steps),
        upload_bytes_by_step=tuple(step.upload_bytes for step in run.steps),
        lora_rank=LORA_RANK if plan.lora else 0,
        seconds=ended.seconds,
        tokens_per_second=(
            sum(step.tokens for step in run.steps) / sum(step.seconds for step in run.steps)
        ),
    )
