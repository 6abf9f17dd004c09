"""Runs a dynamic sampling filter written for slime as a filter of the trainer's groups.

    TrainingGroup, Delivered -> samples, as slime nests them -> filter(args, samples) -> a reason, or None

The fields of a sample:

- `tokens`, `loss_mask`, `rollout_log_probs`: as delivered, whatever their age.
- `response_length`: counted from the first token that the policy wrote.
- `status`: as the function set it, else from the finish reason of the last turn.
- `reward`: a number; a table again if the option `reward_key` names its entry.
- `prompt`, `label`, `metadata`, `index` and similar: from the task, as a worker makes them.
- `response`: the decoded tokens.

Reading a field that is unavailable raises NotDelivered, which ends the run. Otherwise a filter that
takes an empty text for the answer would silently drop every group.

Failed attempts are not among the samples. An attempt with several trajectories is a list of those
that have a token to train. If a group has one such attempt, all its attempts are lists.
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
from penstock.client.plugins.samples import FINISHED, Sample, read_filter_output
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

# Made on first access, because most filters read only rewards.
_LATE = frozenset(("group_index", "index", "rollout_id", "prompt", "label", "metadata", "response"))
_STATUSES = {
    trajectory_pb2.FINISH_REASON_LENGTH: Sample.Status.TRUNCATED,
    trajectory_pb2.FINISH_REASON_ABORTED: Sample.Status.ABORTED,
}


class NotDelivered(Exception):
    """A filter reads something that the trainer does not have."""


class GroupSample(Protocol):
    """A trajectory as the trainer read it; arrays have shape [n]."""

    @property
    def trajectory_id(self) -> str: ...

    @property
    def token_ids(self) -> NDArray[np.int32]: ...

    @property
    def behaviour_logprobs(self) -> NDArray[np.float32]:
        """Zero for tokens that were not sampled."""
        ...

    @property
    def reward(self) -> float: ...


class Group(Protocol):
    @property
    def samples(self) -> Sequence[GroupSample]:
        """Its trajectories that did not fail."""
        ...


@dataclass(frozen=True, slots=True)
class Delivered:
    """A group as it was delivered, and the task it answers."""

    group: trajectory_pb2.TrajectoryGroup
    """Read as a twin (`penstock.wire.codec`)."""
    task: task_service_pb2.Task | None
    """None if the task is not from this run."""


def slime_filter(
    name: str, options: Mapping[str, object], known: Mapping[str, object], *, model: str
) -> Callable[[Group, Delivered], str | None]:
    """Loads the filter `name`.

    Its `args` are those of `--generate` and `--reward`, plus what the trainer knows and `options`,
    which take precedence. `model` has the tokenizer.

    Raises FunctionInvalid. A call raises NotDelivered, TypeError for an invalid result, and what
    the function raises.
    """
    modules.install()
    function = cast("Callable[..., Any]", find_function(name, ("args", "samples")))
    if is_async(function):
        # Its coroutine would never be awaited, and it is truthy, so every group would be kept.
        raise FunctionInvalid(
            "a dynamic sampling filter must be a plain function, not an async one"
        )
    given = {"dynamic_sampling_filter_path": name, **known, **options}
    args = make_arguments(given, model=model, max_context_length=None)

    def reason(group: Group, delivered: Delivered) -> str | None:
        output: Any = function(args, _samples(group, delivered, args))
        if output is None:
            raise TypeError("the filter returned None, which neither keeps nor drops the group")
        output = read_filter_output(output)
        return None if output.keep else output.reason or "DROPPED"

    return reason


def _samples(group: Group, delivered: Delivered, args: Namespace) -> list[Any]:
    """Returns one sample per attempt, or lists if a function made several of one."""
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
        # A request that no sample claims is closed as a branch without a token to train.
        trained = [sample for sample in siblings if not sample.remove_sample]
        nested.append(trained or siblings[:1])
    if any(len(siblings) > 1 for siblings in nested):
        return list(nested)
    return [siblings[0] for siblings in nested]


class _DeliveredSample(Sample):
    def __init__(
        self,
        trajectory: trajectory_pb2.Trajectory,
        own: trajectory_pb2.Trajectory,
        read: GroupSample,
        task: task_service_pb2.Task | None,
        args: Namespace,
    ) -> None:
        """`own` is the trajectory that represents the attempt; it can be this one."""
        count = len(read.token_ids)
        written = _written(trajectory, count)
        start = int(written.argmax()) if written.any() else count
        try:
            untrained = read_untrained(trajectory.outcome.metadata, count)
        except MarkInvalid:
            # The trainer trains none of it.
            untrained = written
        mask = written if untrained is None else written & ~untrained
        # The other numbers of a table arrived as metrics.
        key: str | None = args.reward_key
        super().__init__(
            tokens=read.token_ids.tolist(),
            response_length=count - start,
            loss_mask=mask[start:].astype(int).tolist(),
            rollout_log_probs=read.behaviour_logprobs[start:].tolist(),
            reward={**trajectory.outcome.metrics, key: read.reward} if key else read.reward,
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
        """Includes fields not read yet. Raises NotDelivered."""
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
                f"sample.{name}: the group of {trajectory.trajectory_id} belongs to no task of this run"
            )
        row = read_task(task)
        if name == "label" and args.label_key not in row.metadata:
            raise NotDelivered(
                f"sample.label: the row has no {args.label_key!r}, only {', '.join(row.metadata)}: set "
                "label_key in groups.filter.options"
            )
        made = make_sample(row, own, args)
        said = from_struct(trajectory.outcome.metadata)
        told = {key: value for key, value in said.items() if not key.startswith(OWN_PREFIX)}
        metadata = {**made.metadata, **told}
        whole = metadata_is_whole(trajectory.outcome.metadata)
        made.metadata = metadata if whole else _Metadata(metadata)
        setattr(self, name, getattr(made, name))


class _Metadata(dict[str, Any]):
    """Metadata of which the trainer may know only a part. So reading a missing key, which may have
    been set, raises NotDelivered."""

    def __missing__(self, key: str) -> Any:
        raise NotDelivered(
            f"sample.metadata has no {key!r}: the trainer has only the row's fields and Outcome.metadata. "
            "Changes by a slime function arrive only if JSON can hold them, up to 64 KiB, and without "
            "removed keys"
        )

    def get(self, key: str, default: Any = None) -> Any:
        """Raises if the entry is missing, because the default might differ from its value."""
        return self[key]

    def __contains__(self, key: object) -> bool:
        if not super().__contains__(key):
            self.__missing__(str(key))
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> _Metadata:
        return _Metadata(copy.deepcopy(dict(self), memo))


def _written(trajectory: trajectory_pb2.Trajectory, count: int) -> NDArray[np.bool_]:
    """Returns a mask of the tokens that the policy wrote, without those shared with a parent."""
    written = np.zeros(count, np.bool_)
    at = trajectory.parent_token_count
    for segment in trajectory.segments:
        length = len(codec.token_ids(segment))
        written[at : at + length] = segment.author == trajectory_pb2.AUTHOR_POLICY
        at += length
    return written


def _status(trajectory: trajectory_pb2.Trajectory) -> Sample.Status:
    """Returns the status that its function set, else one from the last turn's finish reason."""
    said = read_status(trajectory.outcome.metadata)
    for status in FINISHED:
        if said == status.value:
            return status
    return _STATUSES.get(trajectory.finish_reason, Sample.Status.COMPLETED)


def _versions(trajectory: trajectory_pb2.Trajectory) -> list[str]:
    """Returns, per turn, the last version that wrote part of it."""
    turns = {
        segment.turn_index: str(segment.weight_version)
        for segment in trajectory.segments
        if segment.author == trajectory_pb2.AUTHOR_POLICY
    }
    return list(turns.values())
