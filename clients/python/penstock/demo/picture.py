"""Draws a run over time: reward, lag, and what server and trainer did meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.demo.settings import Plan
    from penstock.demo.summary import Run, Step

INK = "#22313f"
REWARD = "#1b7f5c"
LAG = "#c2571a"
SERVER = "#3b6fb6"
TRAINER = "#8e5bb5"
WAITING = "#e4dcec"
UPLOAD = "#d9a441"
TRAINER_ROW = (-0.5, 0.3)
"""Bottom and height of the trainer's bar. It is below the server's load, which ranges from 0 to 1."""


def draw_picture(path: Path, run: Run, plan: Plan) -> None:
    """Writes a PNG with three panels."""
    mpl.use("Agg")
    from matplotlib import pyplot

    plot: Any = pyplot  # matplotlib's own types leave most of its arguments open.
    figure, (reward, lag, activity) = plot.subplots(
        3, 1, figsize=(9, 7.2), sharex=True, height_ratios=(3, 2, 2), layout="constrained"
    )
    start = min(step.time_gather_start for step in run.steps)
    times = [step.time - start for step in run.steps]
    draw_reward(reward, times, run.steps)
    draw_lag(lag, times, run.steps, plan.scale.max_lag)
    draw_activity(activity, run, start, plan.scale.attempts_in_flight)
    reward.set_title(f"{plan.model_name} on {plan.task}: {len(run.steps)} steps", loc="left")
    activity.set_xlabel("seconds")
    activity.set_xlim(0, times[-1])
    for axes in (reward, lag, activity):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    figure.savefig(path, dpi=130)
    plot.close(figure)


def draw_reward(axes: Any, times: list[float], steps: tuple[Step, ...]) -> None:
    """Draws the mean reward of each step's groups."""
    rewards = [step.reward_mean for step in steps]
    axes.plot(times, rewards, color=REWARD, marker="o", markersize=3, linewidth=1.4, clip_on=False)
    axes.set_ylim(min(0.0, *rewards), max(1.0, *rewards) * 1.03)
    axes.set_ylabel("reward")
    axes.grid(axis="y", alpha=0.25)


def draw_lag(axes: Any, times: list[float], steps: tuple[Step, ...], max_lag: int) -> None:
    """Draws how many versions the trained tokens lagged: mean, maximum, and the configured bound."""
    axes.plot(times, [step.lag_mean for step in steps], color=LAG, label="mean")
    axes.plot(times, [step.lag_max for step in steps], color=LAG, alpha=0.35, label="largest")
    axes.axhline(max_lag, color=INK, linestyle=":", linewidth=1, label="bound")
    axes.set_ylim(0, 1.4 * max_lag if max_lag else 1)
    axes.set_ylabel("lag, versions")
    axes.legend(loc="upper left", ncols=3, frameon=False, fontsize="small")


def draw_activity(axes: Any, run: Run, start: float, in_flight: int) -> None:
    """Draws the turns that the server was sampling, and when the trainer waited, trained and uploaded."""
    load = [sample for sample in run.load if sample.time >= start]
    axes.fill_between(
        [sample.time - start for sample in load],
        [sample.running / in_flight for sample in load],
        step="post",
        color=SERVER,
        alpha=0.75,
        linewidth=0,
        label="server: turns being sampled",
    )
    spans = (
        ("trainer: waits", WAITING, "time_gather_start", "time_gather_end"),
        ("trains", TRAINER, "time_train_start", "time_train_end"),
        ("uploads", UPLOAD, "time_upload_start", "time_upload_end"),
    )
    for label, color, begin, end in spans:
        bars = [
            (getattr(step, begin) - start, getattr(step, end) - getattr(step, begin))
            for step in run.steps
        ]
        axes.broken_barh(bars, TRAINER_ROW, color=color, linewidth=0, label=label)
    axes.set_ylim(TRAINER_ROW[0] - 0.1, 1.45)
    axes.set_yticks([TRAINER_ROW[0] + TRAINER_ROW[1] / 2, 0, 1], ["trainer", "0", str(in_flight)])
    axes.set_ylabel("activity")
    axes.legend(loc="upper left", ncols=4, frameon=False, fontsize="small")
