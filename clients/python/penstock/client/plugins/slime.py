"""Functions written for slime, as an agent of a worker.

    task -> Sample, args, sampling_params -> generate(args, sample, sampling_params)
         -> Sample or list of them -> reward(args, sample) -> settled against what was sampled -> Outcome

`generate` finds its router in `slime.utils.http_utils.post`: see `router` for what a request becomes, and
`claims` for what has to hold of the samples it returns. Each trajectory of the attempt is closed with the
reward of the sample it is of; those of no sample carry no gradient, and their reward is the attempt's.

What the samples say decides how the attempt ends:

| it | then |
|---|---|
| raises, or returns what does not fit | it failed, with the exception's name as the reason |
| returns a sample that is ABORTED or FAILED | it failed, with that as the reason |
| returns a reward | that counts, and the reward function is not asked |
| returns `remove_sample` | the reward counts in the baseline, no token is trained |

A failed attempt is made again by the server, up to its bound.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.client.conversation import PromptKind
from penstock.client.outcome import Failed, Outcome
from penstock.client.plugins.arguments import make_arguments
from penstock.client.plugins.episode import Episode, current_episode
from penstock.client.plugins.rewards import RewardMissing, call_plugin, messages_of
from penstock.client.plugins.router import AttemptRouter
from penstock.client.plugins.samples import Sample, flatten
from penstock.client.plugins.sampling import sampling_arguments, write_sampling_params
from penstock.client.plugins.slime_functions import load_function
from penstock.client.plugins.tokenizers import find_tokenizer, load_tokenizer
from penstock.client.tasks import Purpose

if TYPE_CHECKING:
    from penstock.client.calls import Calls
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory

LENGTH = "rollout_max_response_len"


class FanOutUnderGroupReward(Exception):
    """Several samples of one attempt, where a reward compares attempts."""


class SlimeAgent:
    """`generate` and `reward_group`, as a worker calls them."""

    def __init__(
        self,
        generate: Callable[..., Any] | None,
        reward: Callable[..., Any] | None,
        given: Mapping[str, Any],
        *,
        group_reward: bool,
    ) -> None:
        """`given` is the file of `--args`. Without `generate`, there too, it is one turn on the task's
        prompt."""
        self._generate, self._reward = generate, reward
        self._given = {**given, "group_rm": group_reward}
        self._group_reward = group_reward
        self._calls: Calls | None = None
        self._args: Namespace | None = None
        self._asking = asyncio.Lock()
        self._before: dict[str, Any] = {}
        """Of what a task said of sampling, as `args` had it."""
        self._trains = False
        """Whether that was a task to train on."""

    def connect(self, calls: Calls) -> None:
        """Says which server's functions they are."""
        self._calls = calls

    async def args(self) -> Namespace:
        """The one namespace of this process; the server is asked for its part the first time."""
        async with self._asking:
            if self._args is None:
                assert self._calls is not None
                info = await self._calls.get_server_info()
                args = make_arguments(
                    self._given, model=info.model, max_context_length=info.max_context_length
                )
                # It takes seconds, which leases would miss on the loop.
                await asyncio.to_thread(find_tokenizer, args.hf_checkpoint)
                self._args = args
            return self._args

    async def use_sampling(self, task: Task) -> None:
        """Has `args` say what this task does of sampling, where the file of `--args` does not, once: the
        tasks of a run sample alike, and what a function sets on `args` stays.

        Before a task to train on, an evaluation says the length of an answer, and nothing else: functions
        reckon with it, and there is none to begin with."""
        args = await self.args()
        if self._trains:
            return
        said = sampling_arguments(task.sampling)
        told = {name: value for name, value in said.items() if name not in self._given}
        if task.purpose is Purpose.EVAL:
            told = {name: value for name, value in told.items() if name == LENGTH}
        else:
            self._trains = True
            vars(args).update(self._before)
        for name in told:
            self._before.setdefault(name, getattr(args, name))
        vars(args).update(told)

    async def begin(self, task: Task, trajectory: Trajectory) -> Episode:
        """An attempt that its function has not seen yet."""
        await self.use_sampling(task)
        args = await self.args()
        sample = make_sample(task, trajectory, args)
        router = AttemptRouter(trajectory, partial(find_tokenizer, args.hf_checkpoint))
        key = args.reward_key
        if task.purpose is Purpose.EVAL:
            key = args.eval_reward_key or key
        # What this task leaves open is not for another one to say.
        usual = Namespace(**{**vars(args), **self._before})
        params = write_sampling_params(task.sampling, usual)
        return Episode(trajectory, sample, router, key, params)

    async def generate(self, task: Task, trajectory: Trajectory) -> Outcome | Failed | None:
        """One attempt; None where it is scored with its siblings."""
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
            # Of a table its entries would never go: an episode has its trajectory.
            trajectory.attached = episode
        return outcome

    async def _complete(self, task: Task, episode: Episode) -> Outcome | Failed | None:
        returned = await self._run(task, episode)
        episode.returned = flatten(returned)
        if not episode.returned:
            raise TypeError("the function returned no sample")
        failed = episode.failed is not None
        if not (failed or self._group_reward):
            await self._score(episode.returned, whole=isinstance(returned, list))
        await episode.router.stop()
        if failed or not self._group_reward:
            return await episode.settle()
        if len(episode.returned) > 1:
            raise FanOutUnderGroupReward(
                f"{len(episode.returned)} samples of one attempt: score them in generate"
            )
        await episode.check()
        return None

    async def reward_group(
        self, task: Task, trajectories: Sequence[Trajectory]
    ) -> list[Outcome | Failed]:
        """Scores siblings: `reward(args, samples)` returns a list."""
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
        """Asks for the rewards that are not there, of one sample, or of several at once."""
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
                    raise RewardMissing("generate set no reward, and there is no --reward")
                sample.reward = await call_plugin(one, args, sample)
            return
        rewards: Any = await call_plugin(function, args, missing)
        if not hasattr(rewards, "__len__") or len(rewards) != len(missing):
            raise RewardMissing(f"{len(missing)} samples, and the function returned {rewards!r}")
        for sample, reward in zip(missing, rewards, strict=True):
            sample.reward = reward


def takes_evaluation(function: Callable[..., Any]) -> bool:
    """Whether a function's signature names `evaluation`, which it is then given by its name."""
    try:
        return "evaluation" in inspect.signature(function).parameters
    except ValueError:
        # Some functions written in C have none.
        return False


class Attempted(Protocol):
    """An attempt at a task: its trajectory as an agent has it, or as it was delivered."""

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        ...

    @property
    def sample_index(self) -> int:
        """Its place in the group."""
        ...


def make_sample(task: Task, trajectory: Attempted, args: Namespace) -> Sample:
    """The sample of an attempt, as slime's data source makes it of a row."""
    row = dict(task.metadata)
    nested = row.get(args.metadata_key)
    metadata = dict(cast("Mapping[str, Any]", nested)) if isinstance(nested, Mapping) else row
    if task.tools:
        functions = [
            {"name": t.name, "description": t.description, "parameters": dict(t.parameters)}
            for t in task.tools
        ]
        metadata["tools"] = [{"type": "function", "function": function} for function in functions]
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
    """What the row's prompt was: a text, rendered where `args.apply_chat_template` says so, or messages."""
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
    # A row's text is one user's message by the time it is a task.
    if len(messages) == 1 and messages[0]["role"] == "user":
        return str(messages[0]["content"])
    return messages
