"""Functions written for slime, as an agent of a worker.

    task -> Sample, args, sampling_params -> generate(args, sample, sampling_params)
         -> Sample or list of them -> reward(args, sample) -> settled against what was sampled -> Outcome

`generate` reaches its router through `slime.utils.http_utils.post`. `router` describes how a
request becomes a turn, and `claims` what must hold of the returned samples. Each trajectory of the
attempt is closed with the reward of its sample. A trajectory without a sample carries no gradient
and gets the attempt's reward.

The function decides how the attempt ends:

- It raises, or returns something invalid: the attempt fails, with the exception's name as the reason.
- It returns a sample that is ABORTED or FAILED: the attempt fails, with that status as the reason.
- It returns a reward: that reward counts, and the reward function is not called.
- It returns `remove_sample`: the reward counts in the baseline, but no token is trained.

The server makes a failed attempt again, up to its bound.
"""

from __future__ import annotations

import asyncio
import copy
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.client.conversation import PromptKind, write_chat_tool
from penstock.client.outcome import Failed, Outcome
from penstock.client.plugins.arguments import make_arguments
from penstock.client.plugins.episode import Episode, current_episode
from penstock.client.plugins.rewards import RewardMissing, call_plugin, messages_of
from penstock.client.plugins.router import AttemptRouter
from penstock.client.plugins.samples import Sample, flatten
from penstock.client.plugins.sampling import sampling_arguments, write_sampling_params
from penstock.client.plugins.slime_functions import load_function, takes_evaluation
from penstock.client.plugins.tokenizers import find_tokenizer, load_tokenizer
from penstock.client.tasks import Purpose

if TYPE_CHECKING:
    from penstock.client.calls import Calls
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory
    from penstock.v1 import trajectory_pb2


class FanOutUnderGroupReward(Exception):
    """An attempt returned several samples although a group reward compares attempts."""


class SlimeAgent:
    def __init__(
        self,
        generate: Callable[..., Any] | None,
        reward: Callable[..., Any] | None,
        given: Mapping[str, Any],
        *,
        group_reward: bool,
    ) -> None:
        """`given` is the content of the `--args` file. If neither it nor `generate` names a
        function, the agent takes one turn on the task's prompt."""
        self._generate, self._reward = generate, reward
        self._given = {**given, "group_rm": group_reward}
        self._group_reward = group_reward
        self._calls: Calls | None = None
        self._args: Namespace | None = None
        self._asking = asyncio.Lock()
        self._before: dict[str, Any] = {}
        """Original values in `args` of the sampling settings that a task replaced."""
        self._trains = False
        """Whether the last such task was a training task."""

    def connect(self, calls: Calls) -> None:
        self._calls = calls

    async def args(self) -> Namespace:
        """Returns the one namespace of this process. The first call asks the server."""
        async with self._asking:
            if self._args is None:
                assert self._calls is not None
                info = await self._calls.get_server_info()
                args = make_arguments(
                    self._given, model=info.model, max_context_length=info.max_context_length
                )
                # Loading takes seconds. On the event loop it would delay the renewal of leases.
                await asyncio.to_thread(find_tokenizer, args.hf_checkpoint)
                self._args = args
            return self._args

    async def use_sampling(self, task: Task) -> None:
        """Copies the task's sampling settings to `args`, once, except those that the `--args` file sets.

        All tasks of a run sample alike, and values that a function sets on `args` must stay. Before
        the first training task, an evaluation task sets only the response length. Functions compute
        with it, and it has no default.
        """
        args = await self.args()
        if self._trains:
            return
        said = sampling_arguments(task.sampling)
        told = {name: value for name, value in said.items() if name not in self._given}
        if task.purpose is Purpose.EVAL:
            length = "rollout_max_response_len"
            told = {length: told[length]} if length in told else {}
        else:
            self._trains = True
            vars(args).update(self._before)
        for name in told:
            self._before.setdefault(name, getattr(args, name))
        vars(args).update(told)

    async def begin(
        self,
        task: Task,
        trajectory: Trajectory,
        on_dropped: Callable[[Episode], object] | None = None,
    ) -> Episode:
        """Makes the episode for an attempt before its function has seen it."""
        await self.use_sampling(task)
        args = await self.args()
        sample = make_sample(task, trajectory, args)
        router = AttemptRouter(trajectory, partial(find_tokenizer, args.hf_checkpoint))
        key = args.reward_key
        if task.purpose is Purpose.EVAL:
            key = args.eval_reward_key or key
        # Settings that this task leaves open must not come from another task.
        usual = Namespace(**{**vars(args), **self._before})
        params = write_sampling_params(task.sampling, usual)
        return Episode(trajectory, sample, router, key, params, on_dropped=on_dropped)

    async def generate(self, task: Task, trajectory: Trajectory) -> Outcome | Failed | None:
        """Runs one attempt. Returns None if it is to be scored with its siblings."""
        episode = await self.begin(task, trajectory)
        mark = current_episode.set(episode)
        try:
            outcome = await self._complete(task, episode)
        except asyncio.CancelledError:
            episode.router.cancel()
            raise
        except Exception:
            await episode.router.stop()
            raise
        finally:
            current_episode.reset(mark)
        if outcome is None:
            # The episode holds its trajectory, so an entry in a table would never be freed.
            trajectory.attached = episode
        return outcome

    async def _complete(self, task: Task, episode: Episode) -> Outcome | Failed | None:
        returned = await self._run(task, episode)
        episode.returned = flatten(returned)
        if not episode.returned:
            raise TypeError("the function returned no samples")
        failed = episode.failed is not None
        if not (failed or self._group_reward):
            await self._score(episode.returned, whole=isinstance(returned, list))
        await episode.router.stop()
        if failed or not self._group_reward:
            return await episode.settle()
        if len(episode.returned) > 1:
            raise FanOutUnderGroupReward(
                f"one attempt returned {len(episode.returned)} samples under a group reward: "
                "score them in generate"
            )
        await episode.check()
        return None

    async def reward_group(
        self, task: Task, trajectories: Sequence[Trajectory]
    ) -> list[Outcome | Failed]:
        """Scores siblings. `reward(args, samples)` returns a list."""
        episodes = [cast("Episode", trajectory.attached) for trajectory in trajectories]
        await self._score([episode.returned[0] for episode in episodes], whole=True)
        return [await episode.settle() for episode in episodes]

    async def _run(self, task: Task, episode: Episode) -> Any:
        args = await self.args()
        function = self._generate
        if function is None and args.custom_generate_function_path:
            function = load_function(args.custom_generate_function_path)
        if function is None:
            await episode.trajectory.turn()
            await episode.fill()
            return episode.sample
        params = dict(episode.sampling)
        named = {"evaluation": task.purpose is Purpose.EVAL} if takes_evaluation(function) else {}
        return await call_plugin(function, args, episode.sample, params, **named)

    async def _score(self, samples: Sequence[Sample], *, whole: bool) -> None:
        """Computes the missing rewards, per sample or for several at once."""
        missing = list(samples) if self._group_reward else [s for s in samples if s.reward is None]
        if not missing:
            return
        args = await self.args()
        function = self._reward
        if function is None and args.custom_rm_path:
            function = load_function(args.custom_rm_path)
        if not (whole and function):
            for sample in missing:
                of_its_own = sample.custom_rm_path
                one = load_function(of_its_own) if of_its_own else function
                if one is None:
                    raise RewardMissing("generate set no reward, and no --reward is given")
                sample.reward = await call_plugin(one, args, sample)
            return
        rewards: Any = await call_plugin(function, args, missing)
        if not hasattr(rewards, "__len__") or len(rewards) != len(missing):
            raise RewardMissing(
                f"{len(missing)} samples need a reward each, but the function returned {rewards!r}"
            )
        for sample, reward in zip(missing, rewards, strict=True):
            sample.reward = reward


def make_sample(
    task: Task, trajectory: Trajectory | trajectory_pb2.Trajectory, args: Namespace
) -> Sample:
    """Makes the sample of an attempt, as slime's data source makes it from a row."""
    row = dict(task.metadata)
    nested = row.get(args.metadata_key)
    metadata = dict(cast("Mapping[str, Any]", nested)) if isinstance(nested, Mapping) else row
    if task.tools:
        metadata["tools"] = [write_chat_tool(tool) for tool in task.tools]
    index = task.index * task.group_size + trajectory.sample_index
    return Sample(
        group_index=task.index,
        index=index,
        rollout_id=index,
        prompt=_prompt(task, args, metadata.get("tools")),
        label=row.get(args.label_key),
        metadata=copy.deepcopy(metadata),
        session_id=trajectory.trajectory_id,
    )


def _prompt(task: Task, args: Namespace, tools: Any) -> str | list[dict[str, Any]]:
    """Restores the row's prompt. Text is rendered if `args.apply_chat_template` is set."""
    if isinstance(task.prompt, np.ndarray):
        tokenizer: Any = load_tokenizer(args.hf_checkpoint)
        return str(tokenizer.decode(task.prompt.tolist()))
    if task.prompt_kind is not PromptKind.MESSAGES:
        return task.prompt if isinstance(task.prompt, str) else ""
    messages = messages_of(task)
    if args.apply_chat_template:
        tokenizer = load_tokenizer(args.hf_checkpoint)
        kwargs: Mapping[str, Any] = args.apply_chat_template_kwargs or {}
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
            )
        )
    # A row's text became a single user's message when it was made a task.
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return messages
