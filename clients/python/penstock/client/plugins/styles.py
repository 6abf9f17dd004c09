"""How the functions of a command line are called: `penstock rollout --style`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

from penstock.client.functions import BadFunction
from penstock.client.plugins import modules
from penstock.client.plugins.rewards import trl_reward, verl_reward
from penstock.client.plugins.slime import SlimeAgent, takes_evaluation
from penstock.client.scoring import Agent, group_reward, single_turn
from penstock.common.functions import FunctionInvalid, find_function

if TYPE_CHECKING:
    from penstock.client.calls import Calls


class Style(StrEnum):
    """Whose signatures functions have."""

    PENSTOCK = "penstock"
    """`generate(task, trajectory)`, `reward(task, trajectory)`."""
    SLIME = "slime"
    """`generate(args, sample, sampling_params)`, `reward(args, sample)`; and vime's."""
    VERL = "verl"
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`."""
    TRL = "trl"
    """`reward(completions, **kwargs)`."""


@dataclass(frozen=True)
class Functions:
    """What a worker calls."""

    generate: Agent
    reward: Agent | None
    connect: Callable[[Calls], None]
    """Says which server it is, before the first attempt."""


def load_functions(
    style: Style,
    generate: str | None,
    reward: str | None,
    args: Mapping[str, Any],
    *,
    whole_group: bool,
) -> Functions:
    """The functions of another system by their names, `pkg.module:function`. Raises BadFunction."""
    if style is Style.SLIME:
        agent = load_slime(generate, reward, args, whole_group=whole_group)
        if whole_group and reward is None:
            raise BadFunction("--group-reward says how --reward is called: give it too")
        scores = group_reward(_bound(agent)) if whole_group else None
        return Functions(agent.generate, scores, agent.connect)
    if reward is None:
        raise BadFunction(f"--style {style} is about reward functions: give --reward")
    if generate is not None:
        raise BadFunction(
            f"--style {style} is about reward functions: --generate has no such style"
        )
    if style is Style.TRL:
        scores = trl_reward(find(reward, "--reward", None), whole_group=whole_group)
    elif whole_group:
        raise BadFunction("--style verl scores one attempt at a time, not a group")
    else:
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        function = find(reward, "--reward", (), dict.fromkeys(names))
        scores = verl_reward(function, args)
    return Functions(single_turn, scores, lambda calls: None)


def load_slime(
    generate: str | None,
    reward: str | None,
    args: Mapping[str, Any],
    *,
    whole_group: bool,
) -> SlimeAgent:
    """Functions of slime's. Raises BadFunction."""
    if args.get("group_rm") and not whole_group:
        raise BadFunction("--args: group_rm, which --group-reward says here")
    modules.install()
    found = [
        _find_generate(generate) if generate else None,
        find(reward, "--reward", ("args", "sample")) if reward else None,
    ]
    # By these functions of ours, such as `generate_and_rm`, find them.
    paths = {"custom_generate_function_path": generate, "custom_rm_path": reward}
    given = {**{name: path for name, path in paths.items() if path}, **args}
    return SlimeAgent(found[0], found[1], given, group_reward=whole_group)


def _find_generate(name: str) -> Callable[..., Any]:
    """Raises BadFunction."""
    function = find(name, "--generate", None)
    # It need not have a default: whoever names it is told.
    named = {"evaluation": False} if takes_evaluation(function) else None
    return find(name, "--generate", ("args", "sample", "sampling_params"), named)


def find(
    name: str,
    option: str,
    positional: tuple[str, ...] | None,
    named: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The function that an option names. Raises BadFunction."""
    try:
        return cast("Callable[..., Any]", find_function(name, positional, named))
    except FunctionInvalid as error:
        raise BadFunction(f"{option} {name}: {error}") from error


def _bound(agent: SlimeAgent) -> Agent:
    # A mark cannot be set on a bound method.
    async def reward(task: Any, trajectories: Any) -> Any:
        return await agent.reward_group(task, trajectories)

    return reward
