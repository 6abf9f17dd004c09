"""Unmodified functions written for slime, verl and TRL, against a real server with the fake engine."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import random
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.client import Message, Purpose, SamplingParams, Task, Worker, WorkerSettings, connect
from penstock.client.calls import Calls, Patience
from penstock.client.plugins import modules
from penstock.client.plugins.data_source import RolloutMisused
from penstock.client.plugins.episode import Episode, find_episode
from penstock.client.plugins.router import RequestUnsupported
from penstock.client.plugins.samples import Sample
from penstock.client.plugins.slime import SlimeAgent
from penstock.client.plugins.slime_functions import SingletonMeta, post
from penstock.client.plugins.styles import Style, load_functions
from penstock.client.plugins.whole_rollout import WholeRollout
from penstock.client.plugins.worker import load_worker
from penstock.client.scoring import BadFunction
from penstock.client.values import from_struct
from penstock.trainer.batching.batching import read_group
from penstock.v1 import trajectory_pb2, weights_pb2
from penstock.wire import codec
from penstock.wire.agent_marks import (
    UNTRAINED,
    MarkInvalid,
    metadata_is_whole,
    read_status,
    read_untrained,
    read_unwanted,
    write_untrained,
)
from penstock.wire.branches import shared_prefixes
from tests.support.fakes import expected_tokens
from tests.support.harness import Exchange, Harness, Outcome, hello, serve
from tests.support.tiny_model import make_byte_tokenizer

PLUGINS = "tests.support.slime_plugins"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the fake engine's tokenizer, in which a token is a byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def forget_state() -> None:
    SingletonMeta.clear_all_instances()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Harness]:
    async with serve(tmp_path, step_seconds=0.001) as harness:
        yield harness


def arguments(folder: Path, tokenizer: Path, **given: object) -> Path:
    path = folder / "args.toml"
    lines = [f"hf_checkpoint = '{tokenizer}'", "reward_key = 'score'"]
    lines += [f"{key} = {str(value).lower()}" for key, value in given.items()]
    path.write_text("\n".join(lines))
    return path


def tasks(count: int = 1, size: int = 1, **fields: Any) -> list[Task]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return [
        Task(
            f"t{index}",
            **{
                "prompt": (Message("user", f"sum {index}"),),
                "metadata": {"label": str(index)},
                "group_size": size,
                "index": index,
                "sampling": sampling,
                **fields,
            },
        )
        for index in range(count)
    ]


class Rig:
    """Plugins that work on a server, and the trainer's end that receives their groups."""

    def __init__(self, server: Harness, exchange: Exchange, folder: Path, tokenizer: Path) -> None:
        self.server, self.exchange = server, exchange
        self._folder, self._tokenizer = folder, tokenizer

    async def run(
        self,
        generate: str | None = None,
        reward: str | None = None,
        *,
        style: str = "slime",
        whole: str | None = None,
        work: Iterable[Task] = (),
        attempts: int | None = None,
        groups: bool = False,
        concurrency: int = 8,
        **args: object,
    ) -> Any:
        """Work on the tasks until all attempts are made; return the statistics."""
        work = list(work) or tasks()
        path = arguments(self._folder, self._tokenizer, **args)
        count = attempts or sum(task.group_size for task in work)
        settings = WorkerSettings(concurrency, attempts=count, group_reward=groups)
        names = [f"{PLUGINS}:{name}" if name else None for name in (generate, reward, whole)]
        make = load_worker(style, names[0], names[1], names[2], path, settings)
        calls = Calls(self.server.address, Patience())
        try:
            async with connect(self.server.address) as client:
                await client.submit_tasks(work)
            return await asyncio.wait_for(make(calls).run(), 60)
        finally:
            await calls.close()

    async def call(self, generate: Any, work: list[Task]) -> Any:
        """Work on tasks with a function object instead of an import path; return the statistics."""
        agent = SlimeAgent(generate, None, {}, group_reward=False)
        calls = Calls(self.server.address, Patience())
        agent.connect(calls)
        settings = WorkerSettings(8, attempts=len(work))
        tokenizer = make_byte_tokenizer()
        try:
            async with connect(self.server.address) as client:
                await client.submit_tasks(work)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(
                    "penstock.client.plugins.slime.find_tokenizer", lambda name: tokenizer
                )
                worker = Worker(calls, agent.generate, None, settings)
                return await asyncio.wait_for(worker.run(), 60)
        finally:
            await calls.close()

    async def group(self, purpose: Any = trajectory_pb2.PURPOSE_TRAIN) -> Any:
        """The next finished group."""
        self.exchange.send(demand={"group_count": 1, "purpose": purpose})
        return (await self.exchange.receive("delivery", 20)).group


@pytest.fixture
async def rig(server: Harness, tmp_path: Path, tokenizer: Path) -> Rig:
    exchange = await hello(server.wire, groups_per_step=16)
    return Rig(server, exchange, tmp_path, tokenizer)


def policy(trajectory: Any) -> list[Any]:
    return [s for s in trajectory.segments if s.author == trajectory_pb2.AUTHOR_POLICY]


def tokens_of(trajectory: Any) -> list[int]:
    return [int(t) for segment in trajectory.segments for t in codec.token_ids(segment)]


def check_sampled(trajectory: Any, group: Any = None) -> None:
    """Check that every policy token is the one its weight version samples there, with its
    log-probability.

    A branch may begin with tokens of its parent, which must be in `group`.
    """
    context: list[int] = []
    if group is not None:
        context = shared_prefixes(group)[trajectory.trajectory_id].tolist()
    for segment in trajectory.segments:
        ids = [int(t) for t in codec.token_ids(segment)]
        if segment.author == trajectory_pb2.AUTHOR_POLICY:
            wanted, logprobs = expected_tokens(context, [segment.weight_version] * len(ids))
            assert ids == wanted
            assert codec.logprobs(segment).tolist() == np.float32(logprobs).tolist()
        context += ids


def trained(group: Any) -> list[list[int]]:
    """The token ids of each trajectory that the trainer trains on."""
    read = read_group(group, trainer_version=0, max_lag=0)
    return [s.token_ids[s.trained].tolist() for s in read.samples]


# What functions return, and which of it is trained


async def test_a_single_turn_with_tokens_is_recorded_as_it_was_sampled(rig: Rig) -> None:
    statistics = await rig.run("generate", "length_reward")
    assert statistics.failures == {}
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    assert tokens_of(trajectory)[:5] == list(b"sum 0")
    assert trajectory.outcome.reward == 8.0
    assert UNTRAINED not in trajectory.outcome.metadata.fields
    assert trained(group) == [tokens_of(trajectory)[5:]]


@pytest.mark.parametrize("keeps_handle", [False, True], ids=["whole", "not all of it"])
async def test_what_a_function_writes_into_metadata_comes_with_its_outcome(
    rig: Rig, keeps_handle: bool
) -> None:
    await rig.run("notes", "length_reward", keeps_handle=keeps_handle)
    (trajectory,) = (await rig.group()).trajectories
    said = trajectory.outcome.metadata
    assert from_struct(said)["calls"] == {"count": 8, "names": ["search"]}
    # The row's own fields are already with the task.
    assert "label" not in said.fields
    assert metadata_is_whole(said) is not keeps_handle


async def test_tool_turns_are_one_trajectory_with_the_tools_tokens_masked(rig: Rig) -> None:
    await rig.run("tools", "reward_func", max_turns=3)
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    written = policy(trajectory)
    assert trajectory.turn_count == len(written) == 3
    assert trained(group) == [[int(t) for s in written for t in codec.token_ids(s)]]
    # A reward table: one entry is the reward, the others become metrics.
    assert dict(trajectory.outcome.metrics) == {"turns": 3.0}
    assert trajectory.outcome.reward > 8


@pytest.mark.parametrize("own_key", [True, False])
async def test_a_function_is_told_of_an_evaluation_whose_reward_may_be_another_entry(
    rig: Rig, own_key: bool
) -> None:
    work = [*tasks(), *tasks(purpose=Purpose.EVAL)]
    work[1] = dataclasses.replace(work[1], task_id="e0")
    given = {"eval_reward_key": "'acc'"} if own_key else {}
    statistics = await rig.run("told", "told_reward", work=work, **given)
    assert statistics.failures == {}
    (trained,) = (await rig.group()).trajectories
    (measured,) = (await rig.group(trajectory_pb2.PURPOSE_EVAL)).trajectories
    check_sampled(measured)
    assert trained.outcome.reward == 1.0
    assert dict(trained.outcome.metrics) == {"acc": 0.25, "evaluation": 0.0}
    others = {"score": 1.0} if own_key else {"acc": 0.25}
    assert measured.outcome.reward == (0.25 if own_key else 1.0)
    assert dict(measured.outcome.metrics) == {**others, "evaluation": 1.0}


@pytest.mark.parametrize("function", ["told_always", "told_by_name"])
async def test_a_function_that_has_to_be_told_of_evaluations_is_one(
    rig: Rig, function: str
) -> None:
    statistics = await rig.run(function, "told_reward")
    assert statistics.failures == {}
    (trained,) = (await rig.group()).trajectories
    assert trained.outcome.metrics["evaluation"] == 0.0


async def test_turns_with_text_never_encode_the_policys_tokens_again(rig: Rig) -> None:
    await rig.run("search", "length_reward")
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    assert trajectory.turn_count == 2
    assert len(trained(group)[0]) == 16
    # Special tokens spelled in the text are encoded as special tokens.
    assert tokens_of(trajectory)[:7] == [257, *b"sum 0", 258]


async def test_vimes_endpoint_is_the_same_turns(rig: Rig) -> None:
    statistics = await rig.run("vime", "length_reward")
    assert statistics.failures == {}
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    assert trajectory.turn_count == 2
    assert (len(trained(group)[0]), trajectory.outcome.reward) == (16, 17.0)


async def test_samples_of_one_attempt_are_branches_each_with_its_reward(rig: Rig) -> None:
    await rig.run("solvers", num_parallel=3)
    trajectories = (group := await rig.group()).trajectories
    assert len(trajectories) == 3
    assert sorted(t.outcome.reward for t in trajectories) == [0.0, 1.0, 2.0]
    root = trajectories[0].trajectory_id
    assert [t.parent_trajectory_id for t in trajectories] == ["", root, root]
    for trajectory in trajectories:
        check_sampled(trajectory, group)
    assert [len(ids) for ids in trained(group)] == [8, 8, 8]


async def test_a_sample_for_each_turn_is_one_trajectory(rig: Rig) -> None:
    await rig.run("turns")
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    assert trajectory.turn_count == 3
    assert len(trained(group)[0]) == 24


async def test_what_is_taken_back_carries_no_gradient(rig: Rig) -> None:
    await rig.run("strips", "length_reward")
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    assert trained(group) == [tokens_of(trajectory)[5:-2]]
    assert trajectory.outcome.reward == 6.0


async def test_a_removed_sample_counts_in_the_baseline_only(rig: Rig) -> None:
    await rig.run("removed", "length_reward")
    group = await rig.group()
    assert trained(group) == [[]]
    assert read_group(group, trainer_version=0, max_lag=0).rewards == (8.0,)


async def test_a_removed_sample_has_its_metrics_too(rig: Rig) -> None:
    await rig.run("removed", "table_reward")
    (trajectory,) = (group := await rig.group()).trajectories
    assert trained(group) == [[]]
    assert (trajectory.outcome.reward, dict(trajectory.outcome.metrics)) == (1.0, {"acc": 0.25})


async def test_without_generate_it_is_one_turn_of_the_servers(rig: Rig) -> None:
    await rig.run(None, "length_reward")
    (trajectory,) = (await rig.group()).trajectories
    check_sampled(trajectory)
    assert trajectory.outcome.reward == 8.0


@pytest.mark.parametrize("prompt", [None, np.array(list(b"sum 0"), np.int32)])
async def test_the_text_is_all_that_the_policy_wrote(rig: Rig, prompt: Any) -> None:
    work = tasks() if prompt is None else tasks(prompt=prompt)
    statistics = await rig.run(None, "decoded", work=work)
    assert statistics.failures == {}
    (trajectory,) = (await rig.group()).trajectories
    assert trajectory.outcome.reward == 1.0


async def test_arguments_say_how_the_tasks_sample(rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0.5, ignore_eos=True)
    statistics = await rig.run("limits", "length_reward", work=tasks(2, sampling=sampling))
    assert statistics.failures == {}


async def test_until_something_is_trained_arguments_have_the_length_of_an_evaluation(
    rig: Rig,
) -> None:
    # The evaluation is leased first.
    sampling = SamplingParams(max_tokens=5, temperature=0.5)
    (trained,), (measured,) = tasks(), tasks(sampling=sampling, purpose=Purpose.EVAL)
    work = [trained, dataclasses.replace(measured, task_id="e0")]
    statistics = await rig.run("shows_length", work=work, concurrency=1)
    assert statistics.failures == {}
    for purpose, length in ((Purpose.EVAL, 5.0), (Purpose.TRAIN, 8.0)):
        group = await rig.group(getattr(trajectory_pb2, f"PURPOSE_{purpose.name}"))
        assert group.trajectories[0].outcome.reward == length


async def test_what_a_task_leaves_open_is_as_the_arguments_had_it(rig: Rig) -> None:
    """The arguments' own values apply, not those of whichever task comes first."""
    (first,), (second,) = tasks(sampling=SamplingParams(max_tokens=8, temperature=0.5)), tasks()
    work = [first, dataclasses.replace(second, task_id="t1", index=1)]
    statistics = await rig.run("shows_temperature", work=work, concurrency=1)
    assert statistics.failures == {}
    rewards = [(await rig.group()).trajectories[0].outcome.reward for _ in work]
    assert rewards == [0.5, 1.0]


async def test_each_sample_ends_as_the_function_says(rig: Rig) -> None:
    (*_, third), _ = expected_tokens(list(b"sum 0!"), [0] * 3)
    statistics = await rig.run("ends_otherwise", stop=f"'{chr(third)}'")
    assert statistics.failures == {}
    trajectories = (group := await rig.group()).trajectories
    ends = [t.finish_reason for t in trajectories]
    assert ends == [trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH]
    pairs = zip(trajectories, trained(group), strict=True)
    told = [read_status(t.outcome.metadata) for t, tokens in pairs if tokens]
    assert told == ["completed", "completed"]


async def test_a_turn_that_is_made_once_more_trains_with_what_led_to_it(rig: Rig) -> None:
    statistics = await rig.run("asks_again", "length_reward")
    assert statistics.failures == {}
    root, branch = (group := await rig.group()).trajectories
    assert branch.parent_trajectory_id == root.trajectory_id
    for trajectory in (root, branch):
        check_sampled(trajectory, group)
        assert trajectory.outcome.reward == root.outcome.reward
    # The first turn is trained where it was sampled; of the second turn, only the answer that was kept.
    first, thrown_away = (list(codec.token_ids(s)) for s in policy(root))
    (second,) = (list(codec.token_ids(s)) for s in policy(branch))
    assert thrown_away != second
    assert trained(group) == [first, second]


@pytest.mark.parametrize("function", ["changes_form", "too_long_first"])
async def test_requests_that_differ_are_turns_all_the_same(rig: Rig, function: str) -> None:
    # Contains a character of two tokens.
    work = tasks(prompt=(Message("user", "süm 0"),))
    statistics = await rig.run(function, "length_reward", work=work)
    assert statistics.failures == {}
    (trajectory,) = (group := await rig.group()).trajectories
    check_sampled(trajectory)
    written = [int(t) for s in policy(trajectory) for t in codec.token_ids(s)]
    assert trained(group) == [written]
    assert trajectory.turn_count == (2 if function == "changes_form" else 1)


async def test_a_stop_is_cut_from_the_text_where_sglang_cuts_it(rig: Rig) -> None:
    statistics = await rig.run("stops", "length_reward")
    assert statistics.failures == {}


async def test_an_attempt_that_was_scored_with_its_siblings_is_forgotten(
    rig: Rig, tmp_path: Path, tokenizer: Path
) -> None:
    def held() -> int:
        gc.collect()
        return sum(isinstance(kept, Episode) for kept in gc.get_objects())

    others = held()
    args = {"hf_checkpoint": str(tokenizer), "max_turns": 2, "reward_key": "score"}
    names = f"{PLUGINS}:tools", f"{PLUGINS}:batched_reward"
    functions = load_functions(Style.SLIME, *names, args, whole_group=True)
    calls = Calls(rig.server.address, Patience())
    functions.connect(calls)
    settings = WorkerSettings(8, attempts=6, group_reward=True)
    async with connect(rig.server.address) as client:
        await client.submit_tasks(tasks(2, 3))
    worker = Worker(calls, functions.generate, functions.reward, settings)
    assert (await asyncio.wait_for(worker.run(), 60)).failures == {}
    del worker
    await calls.close()
    assert held() <= others
    # `functions` knows the attempts while the worker runs, so keep it alive until here.
    assert functions.reward is not None


async def test_a_group_reward_scores_siblings_at_once(rig: Rig) -> None:
    await rig.run("tools", "batched_reward", work=tasks(2, 3), groups=True, max_turns=2)
    for _ in range(2):
        group = await rig.group()
        assert [t.outcome.reward for t in group.trajectories] == [0.0, 1.0, 2.0]
        for trajectory in group.trajectories:
            check_sampled(trajectory)


async def test_versions_are_the_servers_where_weights_change_between_turns(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.install()
    from tests.support import slime_plugins

    asked = 0

    async def post(url: str, payload: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            await rig.server.upload(1)
        return await modules.own.post(url, payload)

    monkeypatch.setattr(slime_plugins, "post", post)
    await rig.run("tools", "length_reward", max_turns=2)
    (trajectory,) = (await rig.group()).trajectories
    first, second = policy(trajectory)
    assert (first.weight_version, second.weight_version) == (0, 1)
    ids = tokens_of(trajectory)
    start = ids.index(ord("<"))
    wanted, _ = expected_tokens(ids[: len(ids) - 8], [1] * 8)
    assert start and codec.token_ids(second).tolist() == wanted


async def test_a_turn_that_a_switch_aborts_goes_on_and_no_function_sees_it(rig: Rig) -> None:
    (work,) = tasks(sampling=SamplingParams(max_tokens=200, ignore_eos=True))
    rig.server.engine.freeze_at = 20
    running = asyncio.ensure_future(rig.run("generate", "length_reward", work=[work]))
    while not (turns := rig.server.serving.turns.in_flight):
        await asyncio.sleep(0.005)
    await rig.server.sampled(turns[0].record.trajectory_id)
    await rig.server.upload(1, in_flight=weights_pb2.IN_FLIGHT_POLICY_ABORT)
    rig.server.engine.freeze_at = None
    assert (await running).failures == {}
    (trajectory,) = (group := await rig.group()).trajectories
    versions = [
        segment.weight_version for segment in policy(trajectory) for _ in codec.token_ids(segment)
    ]
    assert sorted(set(versions)) == [0, 1] and len(versions) == 200
    ids = tokens_of(trajectory)
    assert ids[5:] == expected_tokens(ids[:5], versions)[0]
    assert trajectory.outcome.reward == 200.0
    # Tokens of older versions are too late for a trainer that holds version 1 with `max_lag` 0.
    (sample,) = read_group(group, trainer_version=1, max_lag=0).samples
    assert sample.trained.sum() == versions.count(1)


async def test_agents_that_do_as_they_please_train_every_token_once(rig: Rig) -> None:
    """Agents grow several conversations side by side, cut, edit and revisit them, while weights
    change.
    """
    sampled: dict[str, int] = {}
    begun = asyncio.Event()

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> list[Sample]:
        rng = random.Random(sample.index)
        known = [list(sample.prompt.encode())]
        found: list[Sample] = []

        async def ask() -> None:
            base = rng.choice(known)
            base = rng.choice([base, [*base, 33], [*base, 33, 33], base[:-1], [*base[:-1], 35]])
            params = {**sampling_params, "max_new_tokens": rng.randint(1, 12)}
            payload = {"input_ids": base, "sampling_params": params, "return_logprob": True}
            output = await post(f"http://{args.sglang_router_ip}/generate", payload)
            pairs = output["meta_info"]["output_token_logprobs"]
            one = copy.deepcopy(sample)
            one.tokens, one.reward = list(base), 0.5
            one.append_response_tokens(
                args, tokens=[t for _, t, _ in pairs], log_probs=[p for p, _, _ in pairs]
            )
            found.append(one)
            known.append(one.tokens)
            sampled[str(sample.session_id)] = sampled.get(str(sample.session_id), 0) + len(pairs)

        for _ in range(rng.randint(1, 8)):
            await asyncio.gather(*(ask() for _ in range(rng.randint(1, 3))))
            begun.set()
        rng.shuffle(found)
        return found

    working = asyncio.ensure_future(rig.call(generate, tasks(16)))
    await begun.wait()
    await rig.server.upload(1)
    assert (await working).failures == {}
    versions: set[int] = set()
    for _ in range(16):
        group = await rig.group()
        for trajectory in group.trajectories:
            check_sampled(trajectory, group)
            versions |= {segment.weight_version for segment in policy(trajectory)}
        root = group.trajectories[0].trajectory_id
        read = read_group(group, trainer_version=1, max_lag=1)
        assert sum(int(s.trained.sum()) for s in read.samples) == sampled[root]
    assert 1 in versions


@pytest.mark.parametrize("request_of", ["the attempt", "a branch", "a later turn"])
async def test_of_a_request_that_its_function_cancels_nothing_is_trained(
    rig: Rig, request_of: str
) -> None:
    kept: list[int] = []
    rig.server.engine.freeze_at = 20

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        root, prompt = str(sample.session_id), list(sample.prompt.encode())

        async def ask(tokens: list[int], most: int = 8) -> list[int]:
            params = {**sampling_params, "max_new_tokens": most}
            payload = {"input_ids": tokens, "sampling_params": params}
            return (await post(f"http://{args.sglang_router_ip}/generate", payload))["output_ids"]

        async def give_up(name: str, tokens: list[int]) -> None:
            asked = asyncio.ensure_future(ask(tokens, 400))
            # The engine freezes at 20 tokens, so the turn does not end without the agent.
            turns = rig.server.serving.turns
            while name not in [turn.record.trajectory_id for turn in turns.in_flight]:
                await asyncio.sleep(0.005)
            await rig.server.sampled(name)
            if request_of == "the attempt":
                kept.extend(await ask(prompt))
            asked.cancel()

        if request_of == "the attempt":
            await give_up(root, [*prompt, 33])
        else:
            kept.extend(await ask(prompt))
            if request_of == "a branch":
                await give_up(f"{root}/1", [33, *prompt])
            else:
                await give_up(root, [*prompt, *kept, 33])
        sample.tokens, sample.reward = prompt, 0.5
        sample.append_response_tokens(args, tokens=kept, log_probs=[0.0] * len(kept))
        return sample

    assert (await rig.call(generate, tasks())).failures == {}
    group = await rig.group()
    for trajectory in group.trajectories:
        check_sampled(trajectory, group)
    assert sum(len(codec.token_ids(s)) for t in group.trajectories for s in policy(t)) > 8
    assert [ids for ids in trained(group) if ids] == [kept]
    root = next(t for t in group.trajectories if not t.parent_trajectory_id)
    assert root.outcome.reward == 0.5
    assert rig.server.serving.store.open_count == 0


async def test_what_a_function_left_running_begins_no_turn(rig: Rig) -> None:
    refused: list[Exception] = []
    left: list[asyncio.Task[None]] = []

    async def generate(args: Any, sample: Sample, sampling_params: Any) -> Sample:
        url = f"http://{args.sglang_router_ip}/generate"
        prompt = list(sample.prompt.encode())
        payload = {"input_ids": prompt, "sampling_params": sampling_params}
        ids = (await post(url, payload))["output_ids"]

        async def goes_on() -> None:
            episode = find_episode(sample)
            assert episode is not None
            while not episode.router._stopped:
                await asyncio.sleep(0)
            try:
                await post(url, {**payload, "input_ids": [*prompt, *ids, 33]})
            except RequestUnsupported as error:
                refused.append(error)

        left.append(asyncio.create_task(goes_on()))
        sample.tokens, sample.reward = prompt, 0.5
        sample.append_response_tokens(args, tokens=ids, log_probs=[0.0] * len(ids))
        return sample

    assert (await rig.call(generate, tasks())).failures == {}
    await asyncio.wait(left)
    (trajectory,) = (group := await rig.group()).trajectories
    assert trajectory.turn_count == 1 and len(trained(group)[0]) == 8
    assert [str(error) for error in refused] == [
        "/generate for an attempt whose function has returned"
    ]


# Refused arguments


async def test_arguments_do_not_say_that_siblings_are_scored_together(rig: Rig) -> None:
    with pytest.raises(BadFunction, match="--args sets group_rm: use --group-reward instead"):
        await rig.run(None, "length_reward", group_rm=True)


@pytest.mark.parametrize(
    ("generate", "reward", "reason"),
    [
        ("cuts", "length_reward", "TOKENS_DIFFER"),
        ("unmasked", "length_reward", "TOKENS_NOT_SAMPLED"),
        ("gives_up", "length_reward", "ABORTED"),
        ("breaks", "length_reward", "CONNECTION_ERROR"),
        ("penalized", "length_reward", "SAMPLING_UNSUPPORTED"),
        ("generate", "batched_reward", "TYPE_ERROR"),
        ("generate", None, "REWARD_MISSING"),
    ],
)
async def test_what_does_not_fit_fails_the_attempt_with_a_reason(
    rig: Rig, generate: str, reward: str | None, reason: str
) -> None:
    statistics = await rig.run(generate, reward, attempts=3, max_turns=2)
    assert statistics.failures == {reason: 3}
    trajectories = (await rig.group()).trajectories
    assert {t.outcome.failure.reason for t in trajectories} == {reason}
    assert rig.server.serving.store.open_count == 0


async def test_an_attempt_that_takes_too_long_is_closed_with_its_branches(
    rig: Rig, tmp_path: Path, tokenizer: Path
) -> None:
    rig.server.engine.freeze_at = 4
    path = arguments(tmp_path, tokenizer, num_parallel=3)
    settings = WorkerSettings(1, attempts=3, attempt_seconds=0.5)
    make = load_worker("slime", f"{PLUGINS}:solvers", None, None, path, settings)
    calls = Calls(rig.server.address, Patience())
    async with connect(rig.server.address) as client:
        await client.submit_tasks(tasks())
    statistics = await asyncio.wait_for(make(calls).run(), 60)
    await calls.close()
    assert statistics.failures == {"ATTEMPT_TIMEOUT": 3}
    assert rig.server.serving.store.open_count == 0
    failed = (await rig.group()).trajectories
    assert {t.outcome.failure.reason for t in failed} == {"ATTEMPT_TIMEOUT"}


async def test_several_samples_under_a_group_reward_are_refused(rig: Rig) -> None:
    statistics = await rig.run("solvers", "batched_reward", groups=True, attempts=3, num_parallel=2)
    assert statistics.failures == {"FAN_OUT_UNDER_GROUP_REWARD": 3}


# Whole rollouts


@pytest.mark.parametrize("gives_back", [False, True])
async def test_a_whole_rollout_takes_groups_and_returns_them(rig: Rig, gives_back: bool) -> None:
    statistics = await rig.run(
        "tools",
        "length_reward",
        whole="whole",
        work=tasks(4, 2),
        max_turns=2,
        rollout_batch_size=2,
        gives_back=gives_back,
        filtered=False,
    )
    assert (statistics.scored_count, statistics.failures) == (8, {})
    for _ in range(4):
        group = await rig.group()
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            check_sampled(trajectory)
        assert all(ids for ids in trained(group))


async def test_a_sample_that_a_function_made_itself_is_its_attempts(rig: Rig) -> None:
    """In a whole rollout, siblings are recognised even if their samples share an index and nothing
    else.
    """
    statistics = await rig.run(
        "fresh",
        "length_reward",
        whole="whole",
        work=tasks(2, 3),
        rollout_batch_size=2,
        gives_back=False,
        filtered=False,
    )
    assert (statistics.scored_count, statistics.failures) == (6, {})
    for _ in range(2):
        group = await rig.group()
        assert [t.outcome.reward for t in group.trajectories] == [8.0] * 3
        assert [len(ids) for ids in trained(group)] == [8] * 3


async def test_what_a_whole_rollout_drops_is_marked_for_the_trainer(rig: Rig) -> None:
    await rig.run(
        None,
        "length_reward",
        whole="whole",
        work=tasks(2, 2),
        gives_back=False,
        filtered=True,
    )
    dropped: dict[str, str] = {}
    for _ in range(2):
        group = await rig.group()
        # The length comes from the tasks: no argument gives one.
        assert [len(codec.token_ids(s)) for t in group.trajectories for s in policy(t)] == [8, 8]
        dropped[group.task_id] = read_unwanted(group.trajectories[0].outcome.metadata)
        assert all(trained(group)) == (not dropped[group.task_id])
    assert dropped == {"t0": "FILTERED", "t1": ""}


async def test_of_a_group_that_a_whole_rollout_returns_in_part_the_rest_is_closed(rig: Rig) -> None:
    statistics = await rig.run(None, "length_reward", whole="best", work=tasks(2, 3))
    assert (statistics.scored_count, statistics.failures) == (6, {})
    for _ in range(2):
        group = await rig.group()
        assert [t.outcome.reward for t in group.trajectories] == [8.0, 8.0, 8.0]
        assert [bool(ids) for ids in trained(group)].count(True) == 1


async def test_what_a_sample_says_of_its_end_and_its_reward_counts(rig: Rig) -> None:
    await rig.run("says_otherwise", "length_reward")
    (trajectory,) = (await rig.group()).trajectories
    assert trajectory.outcome.reward == 7.0
    assert trajectory.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
    assert read_status(trajectory.outcome.metadata) == "completed"


async def test_a_reward_that_only_args_name_is_found(rig: Rig) -> None:
    statistics = await rig.run(None, None, custom_rm_path="'tests.support.slime_plugins.seven'")
    assert (statistics.scored_count, statistics.failures) == (1, {})
    assert (await rig.group()).trajectories[0].outcome.reward == 7.0


async def test_a_generate_that_only_args_name_is_found(rig: Rig) -> None:
    path = "'tests.support.slime_plugins.turns'"
    statistics = await rig.run(None, None, custom_generate_function_path=path)
    assert (statistics.scored_count, statistics.failures) == (1, {})
    assert (await rig.group()).trajectories[0].turn_count == 3


async def test_several_samples_are_scored_at_once_by_what_only_args_name(rig: Rig) -> None:
    path = "'tests.support.slime_plugins.batched_reward'"
    statistics = await rig.run("unscored", None, custom_rm_path=path, num_parallel=3)
    assert statistics.failures == {}
    trajectories = (await rig.group()).trajectories
    assert sorted(t.outcome.reward for t in trajectories) == [0.0, 1.0, 2.0]


async def test_a_whole_rollout_of_a_coroutine_by_a_plain_function_is_awaited(rig: Rig) -> None:
    statistics = await rig.run(
        None,
        "decorated_reward",
        whole="whole_by_coroutine",
        work=tasks(2, 2, sampling=SamplingParams(temperature=0.5, max_tokens=6, ignore_eos=True)),
        gives_back=False,
        filtered=False,
    )
    assert (statistics.scored_count, statistics.failures) == (4, {})
    for _ in range(2):
        for trajectory in (await rig.group()).trajectories:
            # The function reads the temperature from its arguments.
            assert trajectory.outcome.reward == 0.5
            assert [len(codec.token_ids(s)) for s in policy(trajectory)] == [6]


async def test_a_whole_rollout_that_asks_for_too_much_is_told(rig: Rig) -> None:
    with pytest.raises(RolloutMisused, match="--concurrency is 4"):
        await rig.run(None, "length_reward", whole="greedy", work=tasks(4, 2), concurrency=4)


async def test_a_whole_rollout_that_is_stopped_gives_everything_back(
    rig: Rig, tmp_path: Path, tokenizer: Path
) -> None:
    path = arguments(tmp_path, tokenizer, rollout_batch_size=5, gives_back=False, filtered=False)
    settings = WorkerSettings(8)
    make = load_worker(
        "slime", None, f"{PLUGINS}:length_reward", f"{PLUGINS}:whole", path, settings
    )
    calls = Calls(rig.server.address, Patience())
    worker = make(calls)
    assert isinstance(worker, WholeRollout)
    async with connect(rig.server.address) as client:
        await client.submit_tasks(tasks(2, 2))
        running = asyncio.ensure_future(worker.run())
        # Wait until the function has made both groups and waits for a third.
        store = rig.server.serving.store
        while len(done := [r for r in store.records() if r.turn]) < 4 or any(
            record.turn.in_flight for record in done if record.turn
        ):
            await asyncio.sleep(0.005)
        assert not worker.stopping
        worker.stop()
        statistics = await asyncio.wait_for(running, 20)
    await calls.close()
    assert statistics.failures == {"WORKER_STOPPED": 4}
    assert rig.server.serving.store.open_count == 0


# Rewards of verl and TRL


async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    assert extra_info == {"split": "train"}
    return {"score": float(len(solution_str)), "acc": ground_truth == "0"}


def trl(completions, answer, **kwargs):
    assert all(message[0]["role"] == "assistant" for message in completions)
    assert kwargs["prompts"] == [[{"role": "user", "content": "sum 0"}]] * len(completions)
    return [float(a) + index if index < 2 else None for index, a in enumerate(answer)]


async def test_a_score_of_verls_is_a_reward(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"reward_model": {"ground_truth": "0"}, "extra_info": {"split": "train"}}
    monkeypatch.setattr(
        "tests.client.plugins.test_plugins.PLUGINS", "tests.client.plugins.test_plugins"
    )
    work = tasks(metadata=row, data_source="sums")
    await rig.run(None, "compute_score", style="verl", work=work)
    (trajectory,) = (await rig.group()).trajectories
    assert trajectory.outcome.reward == 8.0
    assert dict(trajectory.outcome.metrics) == {"acc": 1.0}


@pytest.mark.parametrize("groups", [False, True])
async def test_a_reward_of_trls_is_called_with_lists(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, groups: bool
) -> None:
    monkeypatch.setattr(
        "tests.client.plugins.test_plugins.PLUGINS", "tests.client.plugins.test_plugins"
    )
    work = tasks(size=3, metadata={"answer": "3"})
    attempts = 5 if groups else 3
    await rig.run(None, "trl", style="trl", work=work, groups=groups, attempts=attempts)
    outcomes = [t.outcome for t in (await rig.group()).trajectories]
    if groups:
        assert [o.reward for o in outcomes[:2]] == [3.0, 4.0]
        assert outcomes[2].failure.reason == "REWARD_MISSING"
    else:
        assert [o.reward for o in outcomes] == [3.0, 3.0, 3.0]


# Marks


def test_marks_come_back_as_they_were_written() -> None:
    for bits in range(1 << 6):
        untrained = np.array([bits >> i & 1 for i in range(6)], np.bool_)
        outcome = Outcome(reward=1.0)
        outcome.metadata.update(write_untrained(untrained))
        found = read_untrained(outcome.metadata, 6)
        assert (np.zeros(6, np.bool_) if found is None else found).tolist() == untrained.tolist()


def test_a_mark_of_what_may_still_grow_covers_what_came_later_and_nothing_else() -> None:
    for bits in range(1 << 6):
        untrained = np.array([bits >> i & 1 for i in range(6)], np.bool_)
        for count in range(9):
            outcome = Outcome(reward=1.0)
            mark = write_untrained(untrained, grows=True)
            outcome.metadata.update(mark)
            if any(end > count for span in mark[UNTRAINED] for end in span[1:]):
                continue
            found = read_untrained(outcome.metadata, count)
            assert found is not None
            assert found.tolist() == np.r_[untrained, np.ones(3, np.bool_)][:count].tolist()


@pytest.mark.parametrize(
    "spans",
    [
        "all",
        *([[2, 1]], [[0, 9]], [[-1, 2]], [[3, 4], [1, 2]], [[0.5, 2]], [1, 2], [[]], [[0, 1, 2]]),
        *([[0], [3, 4]], [[-1]], [[0.5]], [[1, 3], [2]]),
    ],
)
def test_of_a_trajectory_with_an_unreadable_mark_nothing_is_trained(spans: Any) -> None:
    outcome = Outcome(reward=1.0)
    outcome.metadata.update({UNTRAINED: spans})
    with pytest.raises(MarkInvalid):
        read_untrained(outcome.metadata, 6)
    segment = {
        "author": trajectory_pb2.AUTHOR_POLICY,
        "token_ids": codec.array_bytes(np.arange(6, dtype=np.int32)),
        "logprobs": codec.array_bytes(np.zeros(6, np.float32), codec.LOGPROB),
    }
    group = codec.twin(trajectory_pb2.TrajectoryGroup)()
    group.trajectories.add(trajectory_id="a", outcome=outcome).segments.add(**segment)
    assert trained(group) == [[]]
