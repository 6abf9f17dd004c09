"""When a run has reached its target."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.config.trainer import TargetConfig
from penstock.trainer.state.checkpoint import TrainerState, read_state, save_checkpoint
from penstock.trainer.state.ending import Ending

rewards = st.floats(-2, 2)
steps = st.lists(st.lists(rewards, max_size=6), max_size=12)
targets = st.builds(
    TargetConfig,
    reward=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), rewards),
    attempts=st.integers(1, 12),
    patience=st.integers(1, 4),
)


def after(history: list[list[float]], target: TargetConfig, begin: Ending | None = None) -> Ending:
    ending = begin or Ending()
    for step in history:
        ending = ending.after(step, target)
    return ending


def mean_after(history: list[list[float]], attempts: int) -> float | None:
    """The same mean by its definition: the fewest latest steps with enough attempts."""
    for first in reversed(range(len(history))):
        window = [reward for step in history[first:] for reward in step]
        if len(window) >= attempts:
            sums = [math.fsum(step) for step in history[first:]]
            return math.fsum(sums) / len(window)
    return None


@given(steps, targets)
def test_it_is_reached_if_the_mean_of_the_latest_attempts_was_there_for_long_enough(
    history: list[list[float]], target: TargetConfig
) -> None:
    means = [mean_after(history[: count + 1], target.attempts) for count in range(len(history))]
    ending = after(history, target)
    assert ending.mean == (means[-1] if means else None)
    held = means[-target.patience :]
    expected = len(held) == target.patience and all(
        mean is not None and mean >= target.reward for mean in held
    )
    assert ending.reached(target) == expected


@given(steps, targets, st.randoms())
def test_the_order_within_a_step_changes_nothing(
    history: list[list[float]], target: TargetConfig, random: object
) -> None:
    shuffled = [sorted(step, key=lambda _: random.random()) for step in history]  # type: ignore[attr-defined]
    assert after(shuffled, target) == after(history, target)


@given(steps, steps, targets)
def test_a_resumed_run_ends_exactly_where_another_would(
    before: list[list[float]], later: list[list[float]], target: TargetConfig
) -> None:
    saved = json.loads(json.dumps(asdict(after(before, target))))
    window = tuple((count, total) for count, total in saved["window"])
    restored = Ending(window, tuple(saved["means"]))
    assert after(later, target, restored) == after(before + later, target)


@given(steps, targets)
def test_it_holds_no_more_than_it_needs(history: list[list[float]], target: TargetConfig) -> None:
    ending = after(history, target)
    assert len(ending.means) <= target.patience
    assert sum(count for count, _ in ending.window[1:]) < target.attempts


def test_a_checkpoint_holds_it_bit_for_bit(tmp_path: Path) -> None:
    target = TargetConfig(reward=0.5, attempts=3, patience=2)
    ending = after([[0.1, 0.2], [0.3, 1 / 3], [2 / 3]], target)
    assert ending.means
    state = TrainerState("run", 3, 3, next_index=3, outstanding=(), ending=ending)
    assert read_state(save_checkpoint(tmp_path, state, lambda _: None, keep=1)) == state


def test_a_checkpoint_of_an_older_version_has_none(tmp_path: Path) -> None:
    state = TrainerState("run", 3, 3, next_index=3, outstanding=())
    folder = save_checkpoint(tmp_path, state, lambda _: None, keep=1)
    content = json.loads((folder / "state.json").read_text())
    del content["ending"]
    (folder / "state.json").write_text(json.dumps(content))
    assert read_state(folder).ending == Ending()


def test_a_higher_target_given_to_a_resumed_run_is_not_reached_yet() -> None:
    low, high = (TargetConfig(reward=reward, attempts=2) for reward in (0.5, 0.9))
    ending = after([[1.0, 0.4]], low)
    assert ending.reached(low)
    assert not ending.reached(high)
    assert after([[1.0, 1.0]], high, ending).reached(high)
