"""A dynamic sampling filter written for slime, as a filter of the trainer's groups.

    TrainingGroup -> samples, failed siblings not among them -> filter(args, samples) -> a reason, or None

Of a sample there is what the trainer has: tokens, the mask of those that are trained, the log-probabilities
they were sampled with, the reward. Its response runs from the first token that is trained. Text, label and
metadata stay with the worker; a filter that needs them belongs there, in a whole rollout.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from penstock.client.plugins import modules
from penstock.client.plugins.samples import DynamicFilterOutput, Sample
from penstock.wire.functions import find_function

if TYPE_CHECKING:
    from numpy.typing import NDArray


class GroupSample(Protocol):
    """A trajectory as the trainer has read it; arrays have shape [n]."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Its tokens."""
        ...

    @property
    def trained(self) -> NDArray[np.bool_]:
        """Those that carry a gradient."""
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


def slime_filter(name: str, options: Mapping[str, object]) -> Callable[[Group], str | None]:
    """The filter that `name` leads to; `options` are attributes of its `args`. Raises FunctionInvalid."""
    modules.install()
    function = cast("Callable[..., Any]", find_function(name, ("args", "samples")))
    # Which entry of a reward counts was settled by the worker.
    args = Namespace(**{**copy.deepcopy(dict(options)), "reward_key": None})

    def reason(group: Group) -> str | None:
        output: Any = function(args, [_sample(sample) for sample in group.samples])
        if not isinstance(output, DynamicFilterOutput):
            output = DynamicFilterOutput(output)
        return None if output.keep else output.reason or "DROPPED"

    return reason


def _sample(read: GroupSample) -> Sample:
    trained = read.trained
    start = int(trained.argmax()) if trained.any() else len(trained)
    return Sample(
        tokens=read.token_ids.tolist(),
        response_length=len(trained) - start,
        loss_mask=trained[start:].astype(int).tolist(),
        rollout_log_probs=read.behaviour_logprobs[start:].tolist(),
        reward=read.reward,
        status=Sample.Status.COMPLETED,
    )
