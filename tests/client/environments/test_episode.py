"""Multi-turn episodes: what the policy is shown, what ends them, what they cost, and how
environments are named.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.client import FinishReason, Message, Task, Trajectory, Turn, connect
from penstock.client.environments import EnvironmentInvalid, EpisodeLimits, Step, TaskUnusable, play
from penstock.client.environments.naming import choose, load_agent
from penstock.client.environments.settings import EnvironmentSettings
from penstock.client.environments.threads import CallThreads, StepTimeout
from penstock.client.scoring import BadFunction
from penstock.client.turns import SegmentView
from penstock.trainer.config.data import EnvironmentConfig, LevelConfig, SamplingConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.episodes import EpisodeSource
from penstock.trainer.data.sources.problem import Finite
from penstock.trainer.data.tasks import describe_problem
from tests.support.harness import SubmitTasksRequest, serve

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "environments.md"


def turn_of(text: str, finish: FinishReason = FinishReason.STOP) -> Turn:
    tokens = np.arange(len(text), dtype=np.int32)
    segment = SegmentView(tokens, np.zeros(len(text), np.float32), 1, 0)
    return Turn(0, (segment,), finish, text)


class Policy:
    """A trajectory whose turns are scripted by the test."""

    def __init__(self, texts: Iterator[str] | Sequence[str], gate: asyncio.Event | None = None):
        self.texts, self.gate = iter(texts), gate
        self.shown: list[Any] = []
        self.waiting = 0

    async def turn(self, shown: Any = None) -> Turn:
        self.shown.append(shown)
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
        text = next(self.texts)
        return turn_of(text) if text else turn_of("", FinishReason.LENGTH)

    async def resume(self) -> Turn:
        raise AssertionError("nothing was aborted")


class Countdown:
    """Ends after `options["length"]` actions. The action "nonsense" is invalid."""

    def __init__(self) -> None:
        self.closed = False

    def reset(self, *, seed: int, options: Any) -> str:
        self.left = options.get("length", 3)
        return f"begin {seed}"

    def step(self, action: str) -> Step:
        if action == "nonsense":
            return Step("what?", invalid=True)
        self.left -= 1
        return Step(
            f"{self.left} left", reward=0.25, done=not self.left, metrics={"left": self.left}
        )

    def close(self) -> None:
        self.closed = True


class AsyncCountdown(Countdown):
    """The same environment with coroutines."""

    async def reset(self, *, seed: int, options: Any) -> str:
        assert threading.current_thread() is threading.main_thread()
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        return super().step(action)


def task(**metadata: Any) -> Task:
    return Task("task", metadata=metadata, index=7)


def as_trajectory(policy: Policy) -> Trajectory:
    return cast("Trajectory", policy)


@pytest.mark.parametrize("make", [Countdown, AsyncCountdown])
async def test_an_episode_is_turns_and_steps_until_it_is_done(make: Callable[[], Countdown]):
    policy, environment = Policy(["one", "nonsense", "two", "three"]), make()
    asked = task(seed=5, options={"length": 3})
    outcome = await play(environment, asked, as_trajectory(policy))
    assert policy.shown == [[Message("user", "begin 5")], "2 left", "what?", "1 left"]
    assert outcome.turn_rewards == (0.25, 0.0, 0.25, 0.25) and outcome.reward == 0.75
    assert outcome.metrics == {"left": 0, "turns": 4, "invalid_actions": 1, "at_a_limit": 0}
    assert outcome.metadata == {"ended": "DONE", "environment": make.__name__, "seed": 5}
    assert environment.closed


@pytest.mark.parametrize(
    ("limits", "texts", "ended", "rewards"),
    [
        ({"turns": 2}, ["a"] * 9, "TURNS", (0.25, 0.25)),
        ({"invalid_actions": 1}, ["nonsense"] * 9, "INVALID_ACTIONS", (0.0, 0.0)),
        ({"invalid_actions": 0, "invalid_penalty": 0.5}, ["nonsense"], "INVALID_ACTIONS", (-0.5,)),
        ({"seconds": 1e-9}, ["a"] * 9, "SECONDS", (0.25,)),
        ({}, ["a", ""], "CONTEXT", (0.25,)),
    ],
)
async def test_limits_end_an_episode_with_what_it_earned(limits, texts, ended, rewards):
    outcome = await play(
        Countdown(),
        task(options={"length": 99}),
        as_trajectory(Policy(texts)),
        limits=EpisodeLimits(**limits),
    )
    assert (outcome.metadata["ended"], outcome.turn_rewards) == (ended, rewards)
    assert outcome.reward == sum(rewards) and outcome.metrics["at_a_limit"] == 1


@pytest.mark.parametrize(
    "wrong", [{"turns": 0}, {"invalid_actions": -1}, {"seconds": 0}, {"invalid_penalty": -1.0}]
)
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match="episode: "):
        EpisodeLimits(**wrong)


async def test_the_tasks_prompt_stands_before_what_reset_returns():
    class Silent(Countdown):
        def reset(self, *, seed: int, options: Any) -> None:
            super().reset(seed=seed, options=options)

    system = Message("system", "Play well.")
    policy = Policy(["a"])
    asked = Task("task", prompt=[system], metadata={"options": {"length": 1}}, index=7)
    await play(Countdown(), asked, as_trajectory(policy))
    assert policy.shown == [[system, Message("user", "begin 7")]]
    policy = Policy(["a"])
    await play(Silent(), asked, as_trajectory(policy))
    # An empty first observation: the first turn then uses the task's own prompt.
    assert policy.shown == [None]
    with pytest.raises(TaskUnusable, match="no prompt"):
        await play(Silent(), task(), as_trajectory(Policy(["a"])))
    with pytest.raises(TaskUnusable, match="no room"):
        await play(Countdown(), Task("t", prompt="text"), as_trajectory(Policy(["a"])))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"seed": "1"}, "metadata.seed .* '1'"),
        ({"environment": 3}, "metadata.environment .* 3"),
        ({"options": [1]}, r"metadata.options .* \[1\]"),
    ],
)
async def test_a_task_that_cannot_be_read_is_named(metadata, words):
    with pytest.raises(TaskUnusable, match=words):
        await play(Countdown(), task(**metadata), as_trajectory(Policy([])))


async def test_what_is_no_environment_or_answers_wrongly_is_an_error():
    class Wrong(Countdown):
        def step(self, action: str) -> Any:
            return ("observation", 1.0) if action == "tuple" else Step(reward=float("nan"))

    with pytest.raises(EnvironmentInvalid, match="no reset and step"):
        await play(cast("Any", object()), task(), as_trajectory(Policy([])))
    for action, words in (("tuple", "not a tuple"), ("nan", "finite")):
        environment = Wrong()
        with pytest.raises(EnvironmentInvalid, match=words):
            await play(environment, task(), as_trajectory(Policy([action])))
        assert environment.closed


@pytest.mark.parametrize("places", [0, 1, 2])
async def test_a_step_that_takes_too_long_is_a_failure_and_not_an_outcome(places: int):
    release = threading.Event()

    class Stuck(Countdown):
        def step(self, action: str) -> Step:
            release.wait(60)
            return super().step(action)

    environment = Stuck()
    playing = play(
        environment,
        task(),
        as_trajectory(Policy(["a"])),
        limits=EpisodeLimits(step_seconds=0.05),
        threads=CallThreads(places) if places else None,
    )
    try:
        with pytest.raises(StepTimeout, match=r"step took more than 0.05 s"):
            await asyncio.wait_for(playing, 20)
        assert environment.closed
    finally:
        release.set()


async def test_an_episode_that_is_cancelled_in_a_step_that_hangs_ends():
    begun, release = threading.Event(), threading.Event()

    class Stuck(Countdown):
        def step(self, action: str) -> Step:
            begun.set()
            release.wait(60)
            return super().step(action)

    environment = Stuck()
    playing = asyncio.create_task(play(environment, task(), as_trajectory(Policy(["a"]))))
    try:
        await asyncio.to_thread(begun.wait, 20)
        playing.cancel()
        assert await asyncio.wait([playing], timeout=20) == ({playing}, set())
        assert playing.cancelled() and environment.closed
    finally:
        release.set()


async def test_a_blocking_step_does_not_hold_the_event_loop():
    answered = threading.Event()

    class Blocking(Countdown):
        def step(self, action: str) -> Step:
            # The event loop sets this, so it has to keep running during the step.
            assert answered.wait(30)
            return Step(done=True, reward=1.0)

    async def answer() -> None:
        answered.set()

    outcome, _ = await asyncio.gather(
        play(Blocking(), task(), as_trajectory(Policy(["a"]))), answer()
    )
    assert outcome.reward == 1.0


async def test_an_attempt_that_waits_for_the_policy_has_no_thread():
    gate, threads = asyncio.Event(), CallThreads(4)
    policies = [Policy(["a"], gate) for _ in range(500)]
    before = threading.active_count()
    playing = [
        asyncio.create_task(
            play(Countdown(), task(options={"length": 1}), as_trajectory(p), threads=threads)
        )
        for p in policies
    ]
    most = 0
    while sum(p.waiting for p in policies) < len(policies):
        most = max(most, threading.active_count())
        await asyncio.sleep(0)
    # At most four threads ran resets at a time. A thread that has just finished may still be alive.
    assert most <= before + 8
    gate.set()
    assert [outcome.reward for outcome in await asyncio.gather(*playing)] == [0.25] * 500


async def test_the_limit_of_a_step_begins_with_its_thread():
    threads, release = CallThreads(1), threading.Event()
    before = asyncio.create_task(threads.run(lambda: release.wait(30)))
    policy = Policy(["a"])
    limits = EpisodeLimits(step_seconds=5.0)
    playing = asyncio.create_task(
        play(
            Countdown(),
            task(options={"length": 1}),
            as_trajectory(policy),
            limits=limits,
            threads=threads,
        )
    )
    # Move the loop's clock past the limit of a step.
    loop = asyncio.get_running_loop()
    real = loop.time
    await asyncio.sleep(0)
    loop.time = lambda: real() + 100.0  # type: ignore[method-assign]
    try:
        await asyncio.sleep(0.01)
        release.set()
        assert (await playing).reward == 0.25 and await before
    finally:
        loop.time = real  # type: ignore[method-assign]


async def test_a_call_whose_caller_has_gone_keeps_its_place():
    threads, release = CallThreads(1), threading.Event()
    stuck = asyncio.create_task(threads.run(lambda: release.wait(30)))
    await asyncio.sleep(0)
    next_one = asyncio.create_task(threads.run(lambda: "next"))
    stuck.cancel()
    await asyncio.wait([stuck])
    await asyncio.sleep(0.05)
    assert not next_one.done()
    release.set()
    assert await next_one == "next"


@pytest.mark.parametrize(
    ("wanted", "names", "chosen"),
    [
        ("", ("a:B",), "a:B"),
        ("a:B", ("a:B", "c:D"), "a:B"),
        ("textarena:Nim-v0", ("textarena",), "textarena:Nim-v0"),
        ("textarena:Nim-v0", ("a:B", "textarena:Nim-v0"), "textarena:Nim-v0"),
    ],
)
def test_a_task_chooses_among_what_the_worker_has(wanted, names, chosen):
    assert choose(wanted, names) == chosen


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("", ("a:B", "c:D")),
        ("os:system", ("a:B",)),
        ("a:Other", ("a:B",)),
        ("textarena:Nim-v0", ("textarena:TicTacToe-v0",)),
        ("os:system", ("textarena",)),
    ],
)
def test_a_task_cannot_name_what_the_worker_was_not_given(wanted, names):
    with pytest.raises(TaskUnusable, match="but this worker offers"):
        choose(wanted, names)


@pytest.mark.parametrize(
    ("names", "settings", "words"),
    [
        (["nowhere:Game"], [], "cannot import nowhere"),
        (["tests.client.environments.test_episode:task"], [], "has no reset and step"),
        ([f"{__name__}:Countdown"], ["environment.depth=3"], "depth"),
        ([f"{__name__}:Countdown"], ["turns=3"], "the section must be one of episode"),
        ([f"{__name__}:Countdown"], ["episode.turns=0"], "turns 0"),
        ([f"{__name__}:Countdown"], ["episode.rounds=3"], "rounds"),
        (["textarena:NoSuchGame-v0"], [], "no game 'NoSuchGame-v0'"),
        (["textarena:TicTacToe-v0"], ["textarena.opponent=nowhere:play"], "cannot import nowhere"),
        (["reasoning_gym:no_such_set"], [], "no data set 'no_such_set'"),
        (["reasoning_gym:chain_sum"], ["reasoning_gym.tries=0"], "tries 0"),
    ],
)
def test_what_cannot_be_played_is_said_before_anything_is_leased(names, settings, words):
    with pytest.raises(BadFunction, match=words):
        load_agent(EnvironmentSettings(tuple(names), tuple(settings)))


def test_a_source_gives_each_level_its_seeds_in_turn():
    levels = tuple(LevelConfig(name=n, options={"length": i + 1}) for i, n in enumerate("abc"))
    source = EpisodeSource(EnvironmentConfig(name="x:Y", seed=100, levels=levels))
    problems = [source.problem(index) for index in range(7)]
    assert [p.data_source for p in problems] == [f"x:Y/{n}" for n in "abcabca"]
    assert [p.metadata["seed"] for p in problems] == [100, 100, 100, 101, 101, 101, 102]
    assert problems[4].metadata["options"] == {"length": 2} and problems[4].metadata["level"] == 1
    assert source.problem(3) == problems[3]
    sent = describe_problem(problems[0], "", SamplingConfig())
    assert sent.WhichOneof("prompt") is None and sent.metadata["seed"] == 100


@pytest.mark.parametrize("each", [1, 4, 6, 7])
def test_levels_that_join_later_miss_no_seed_and_repeat_none(each):
    levels = tuple(LevelConfig(name=n) for n in "abc")
    config = EnvironmentConfig(name="x:Y", levels=levels, prompts_per_level=each)
    source = EpisodeSource(config)
    places = [source.place(index) for index in range(40)]
    assert {level for level, _ in places[:each]} == {0}
    assert {level for level, _ in places[: 2 * each]} <= {0, 1}
    assert {level for level, _ in places[2 * each :]} == {0, 1, 2}
    for level in range(3):
        seeds = [seed for which, seed in places if which == level]
        assert seeds == list(range(len(seeds)))


def test_a_source_is_known_by_all_that_decides_its_episodes():
    first = EpisodeSource(EnvironmentConfig(name="x:Y"))
    assert first.identity == EpisodeSource(EnvironmentConfig(name="x:Y")).identity
    assert first.identity != EpisodeSource(EnvironmentConfig(name="x:Y", seed=1)).identity
    assert first.problem(0).data_source == "x:Y"
    small = EpisodeSource(EnvironmentConfig(name="x:Y", size=2))
    assert [small.problem(i).metadata["seed"] for i in range(4)] == [0, 1, 0, 1]
    assert isinstance(small, Finite) and small.size == 2
    levels = (LevelConfig(name="a"), LevelConfig(name="b"), LevelConfig(name="c"))
    config = EnvironmentConfig(name="x:Y", size=2, levels=levels)
    several = EpisodeSource(config)
    assert isinstance(several, Finite) and several.size == 6
    assert len({str(several.problem(i)) for i in range(6)}) == 6
    assert several.problem(6) == several.problem(0)
    # Levels that start earlier would wrap around before the last one does.
    joined = EpisodeSource(config.model_copy(update={"prompts_per_level": 2}))
    assert not isinstance(joined, Finite)
    twice = (LevelConfig(name="a"), LevelConfig(name="a"))
    with pytest.raises(ConfigInvalid, match="the same name"):
        EpisodeSource(EnvironmentConfig(name="x:Y", levels=twice))


async def test_episodes_over_the_wire_are_exact_to_the_token(tmp_path: Path):
    """The policy's turns and the observations form one token sequence at the server."""
    agent = load_agent(EnvironmentSettings((f"{__name__}:Countdown",), ("episode.turns=4",)))
    records: list[Any] = []

    async def recording(task: Task, trajectory: Trajectory) -> Any:
        outcome = await agent(task, trajectory)
        records.append((await trajectory.get(), list(trajectory.turns), outcome))
        return outcome

    async with serve(tmp_path) as harness, connect(harness.address) as penstock:
        source = EpisodeSource(EnvironmentConfig(name=f"{__name__}:Countdown", seed=3))
        tasks = []
        for index in range(4):
            sent = describe_problem(source.problem(index), "Play.", SamplingConfig(max_tokens=12))
            sent.task_id, sent.group_size, sent.index = f"run/{index}", 1, index
            tasks.append(sent)
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))
        statistics = await penstock.work(recording, concurrency=2, attempts=4)
    assert (statistics.scored_count, statistics.failed_count) == (4, 0)
    assert statistics.reward_sum == pytest.approx(4 * 0.75)
    for record, turns, outcome in records:
        assert outcome.metrics["turns"] == len(turns) == record.turn_count == 3
        for number, turn in enumerate(turns):
            written = [int(t) for s in record.policy_segments(number) for t in s.token_ids]
            assert written == turn.token_ids.tolist()
        context = bytes(
            int(t) for s in record.segments if not s.from_policy for t in s.token_ids if t < 256
        ).decode()
        for text in ("Play.", "begin", "2 left", "1 left"):
            assert text in context


async def test_the_environment_of_the_page_is_one():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(blocks), names)
    policy = Policy(["left", "right", "right"])
    outcome = await names["agent"](task(options={"length": 2}), as_trajectory(policy))
    assert outcome.turn_rewards == (0.0, 0.1, 0.1) and outcome.metrics["invalid_actions"] == 1
    assert policy.shown[1:] == ["A wall. Left or right?", "On you go."]


def test_the_page_says_the_defaults():
    table = dict(re.findall(r"\| `episode\.(\w+)` \| (\w+) \|", PAGE.read_text()))
    limits = EpisodeLimits()
    said = {name: "none" if v is None else f"{v:g}" for name, v in vars(limits).items()}
    assert table == said
