"""A dynamic sampling filter written for slime, as a filter of the trainer's groups.

    TrainingGroup, Delivered -> samples, as slime nests them -> filter(args, samples) -> a reason, or None

| of a sample | is |
|---|---|
| `tokens`, `loss_mask`, `rollout_log_probs` | what was delivered, whatever its age |
| `response_length` | from the first token that the policy wrote |
| `status` | what the function said of it, else why its last turn ended |
| `reward` | a number; a table again where the options name its entry by `reward_key` |
| `prompt`, `label`, `metadata`, `index` and the like | the task's, made as a worker makes them |
| `response` | its tokens, decoded |

What cannot be had raises NotDelivered when it is read, which ends the run: a filter that takes an empty
text for the answer drops every group, and nobody hears of it. Failed attempts are not among the samples. An
attempt of several trajectories is a list of those that have a token to train, and where a group has one
such, all its attempts are lists.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.client.blocking import is_async
from penstock.client.plugins import modules
from penstock.client.plugins.arguments import make_arguments
from penstock.client.plugins.samples import Sample, read_filter_output
from penstock.client.plugins.slime import make_sample
from penstock.client.plugins.tokenizers import load_tokenizer
from penstock.client.tasks import read_task
from penstock.client.values import from_struct
from penstock.common.functions import FunctionInvalid, find_function
from penstock.v1 import trajectory_pb2
from penstock.wire import codec
from penstock.wire.agent_marks import (
    OWN_PREFIX,
    MarkInvalid,
    metadata_is_whole,
    read_status,
    read_untrained,
)

if TYPE_CHECKING:
    from argparse import Namespace

    from numpy.typing import NDArray

    from penstock.v1 import task_service_pb2

# Made when they are first read: most filters look at rewards alone.
_LATE = frozenset(("group_index", "index", "rollout_id", "prompt", "label", "metadata", "response"))
_STATUSES = {
    trajectory_pb2.FINISH_REASON_LENGTH: Sample.Status.TRUNCATED,
    trajectory_pb2.FINISH_REASON_ABORTED: Sample.Status.ABORTED,
}


class NotDelivered(Exception):
    """A filter asks for what the trainer does not have."""


class GroupSample(Protocol):
    """A trajectory as the trainer has read it; arrays have shape [n]."""

    @property
    def trajectory_id(self) -> str:
        """Its id."""
        ...

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens."""
        ...

    @property
    def behaviour_logprobs(self) -> NDArray[np.float32]:
        """Log-probability each was sampled with; zero where there is none."""
        ...

    @property
    def reward(self) -> float:
        """As the agent gave it."""
        ...


class Group(Protocol):
    """A delivered group."""

    @property
    def samples(self) -> Sequence[GroupSample]:
        """Those of its trajectories that did not fail."""
        ...


@dataclass(frozen=True, slots=True)
class Delivered:
    """A group as it came, and the task that it answers."""

    group: trajectory_pb2.TrajectoryGroup
    """Read as a twin."""
    task: task_service_pb2.Task | None
    """None where it is not of this run."""


def slime_filter(
    name: str, options: Mapping[str, object], known: Mapping[str, object], *, model: str
) -> Callable[[Group, Delivered], str | None]:
    """The filter that `name` leads to. Its `args` are those that `--generate` and `--reward` are given,
    with what the trainer knows of itself, and `options`, which win. `model` has the tokenizer.

    Raises FunctionInvalid. A call raises NotDelivered, TypeError for what is no answer, and whatever the
    function raises.
    """
    modules.install()
    function = cast("Callable[..., Any]", find_function(name, ("args", "samples")))
    if is_async(function):
        # What it returns would be awaited by nobody, and is true: it would keep every group.
        raise FunctionInvalid("a dynamic sampling filter is a plain function, not an async one")
    given = {"dynamic_sampling_filter_path": name, **known, **options}
    args = make_arguments(given, model=model, max_context_length=None)

    def reason(group: Group, delivered: Delivered) -> str | None:
        output: Any = function(args, _samples(group, delivered, args))
        if output is None:
            raise TypeError("it returned None, which is neither to keep a group nor to drop it")
        output = read_filter_output(output)
        return None if output.keep else output.reason or "DROPPED"

    return reason


def _samples(group: Group, delivered: Delivered, args: Namespace) -> list[Any]:
    """The attempts of a group, each a sample, or a list of them where the function made several of one."""
    read = {sample.trajectory_id: sample for sample in group.samples}
    sent = {trajectory.trajectory_id: trajectory for trajectory in delivered.group.trajectories}
    attempts: dict[str, list[_DeliveredSample]] = defaultdict(list)
    for trajectory in sent.values():
        own = trajectory
        for _ in sent:
            own = sent.get(own.parent_trajectory_id, own)
        if trajectory.trajectory_id in read and own.trajectory_id in read:
            found = read[trajectory.trajectory_id]
            sample = _DeliveredSample(trajectory, own, found, delivered.task, args)
            attempts[own.trajectory_id].append(sample)
    nested: list[list[_DeliveredSample]] = []
    for siblings in attempts.values():
        # A request that no sample was of is closed as a branch without a token to train.
        trained = [sample for sample in siblings if not sample.remove_sample]
        nested.append(trained or siblings[:1])
    if any(len(siblings) > 1 for siblings in nested):
        return list(nested)
    return [siblings[0] for siblings in nested]


class _DeliveredSample(Sample):
    """A trajectory as a filter sees it."""

    def __init__(
        self,
        trajectory: trajectory_pb2.Trajectory,
        own: trajectory_pb2.Trajectory,
        read: GroupSample,
        task: task_service_pb2.Task | None,
        args: Namespace,
    ) -> None:
        """`own` is the trajectory that stands for its attempt; it may be this one."""
        count = len(read.token_ids)
        written = _written(trajectory, count)
        start = int(written.argmax()) if written.any() else count
        try:
            untrained = read_untrained(trajectory.outcome.metadata, count)
        except MarkInvalid:
            # The trainer trains nothing of it.
            untrained = written
        mask = written if untrained is None else written & ~untrained
        super().__init__(
            tokens=read.token_ids.tolist(),
            response_length=count - start,
            loss_mask=mask[start:].astype(int).tolist(),
            rollout_log_probs=read.behaviour_logprobs[start:].tolist(),
            reward=_reward(trajectory, read, args.reward_key),
            remove_sample=not mask.any(),
            status=_status(trajectory),
            weight_versions=_versions(trajectory),
            session_id=trajectory.trajectory_id,
        )
        self._sources = trajectory, own, task, args
        for name in _LATE:
            del self.__dict__[name]

    def __getattribute__(self, name: str) -> Any:
        if name in _LATE and name not in super().__getattribute__("__dict__"):
            self._make(name)
        return super().__getattribute__(name)

    def to_dict(self) -> dict[str, Any]:
        """Its fields, those too that nobody has read yet. Raises NotDelivered."""
        for name in _LATE:
            getattr(self, name)
        made = super().to_dict()
        del made["_sources"]
        return made

    def _make(self, name: str) -> None:
        trajectory, own, task, args = self._sources
        if name == "response":
            tokens = self.tokens[len(self.tokens) - self.response_length :]
            special = bool(args.rollout_skip_special_tokens)
            tokenizer: Any = load_tokenizer(args.hf_checkpoint)
            self.response = str(tokenizer.decode(tokens, skip_special_tokens=special))
            return
        if task is None:
            raise NotDelivered(
                f"sample.{name}: the group of {trajectory.trajectory_id} answers no task of this run"
            )
        row = read_task(task)
        if name == "label" and args.label_key not in row.metadata:
            raise NotDelivered(
                f"sample.label: the row has no {args.label_key!r}, only {', '.join(row.metadata)}: name "
                "it by label_key in groups.filter.options"
            )
        made = make_sample(row, own, args)
        said = from_struct(trajectory.outcome.metadata)
        told = {key: value for key, value in said.items() if not key.startswith(OWN_PREFIX)}
        metadata = {**made.metadata, **told}
        whole = metadata_is_whole(trajectory.outcome.metadata)
        made.metadata = metadata if whole else _Metadata(metadata)
        setattr(self, name, getattr(made, name))


class _Metadata(dict[str, Any]):
    """What the trainer knows of a sample's metadata where it may not be all. Whether a key that is not
    there was there once it cannot know: reading one raises NotDelivered."""

    def __missing__(self, key: str) -> Any:
        raise NotDelivered(
            f"sample.metadata has no {key!r}: here it is the row's fields, and what an agent gave as "
            "Outcome.metadata. What a function of slime's wrote into it came along only as far as JSON has "
            "it, in 64 KiB, and not what it removed"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """The entry; without one it raises, for the default may not be what it was."""
        return self[key]

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            self.__missing__(str(key))
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Metadata:
        return _Metadata(copy.deepcopy(dict(self), memo))


def _written(trajectory: trajectory_pb2.Trajectory, count: int) -> NDArray[np.bool_]:
    """Which of its `count` tokens the policy wrote, those shared with a parent left out."""
    written = np.zeros(count, np.bool_)
    at = trajectory.parent_token_count
    for segment in trajectory.segments:
        length = len(codec.token_ids(segment))
        written[at : at + length] = segment.author == trajectory_pb2.AUTHOR_POLICY
        at += length
    return written


def _reward(trajectory: trajectory_pb2.Trajectory, read: GroupSample, key: str | None) -> Any:
    """The number, or the table that it was the entry `key` of: the other numbers came as metrics."""
    return {**trajectory.outcome.metrics, key: read.reward} if key else read.reward


def _status(trajectory: trajectory_pb2.Trajectory) -> Sample.Status:
    """As its function says, else why its last turn ended."""
    said = read_status(trajectory.outcome.metadata)
    for status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED):
        if said == status.value:
            return status
    return _STATUSES.get(trajectory.finish_reason, Sample.Status.COMPLETED)


def _versions(trajectory: trajectory_pb2.Trajectory) -> list[str]:
    """Of each turn the last version that wrote of it."""
    turns = {
        segment.turn_index: str(segment.weight_version)
        for segment in trajectory.segments
        if segment.author == trajectory_pb2.AUTHOR_POLICY
    }
    return list(turns.values())
