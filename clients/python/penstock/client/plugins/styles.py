"""Calling conventions for the functions of a command line: `penstock rollout --style`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from penstock.client.plugins import modules
from penstock.client.plugins.rewards import trl_reward, verl_reward
from penstock.client.plugins.slime import SlimeAgent
from penstock.client.plugins.slime_functions import takes_evaluation
from penstock.client.scoring import Agent, BadFunction, find, single_turn

if TYPE_CHECKING:
    from penstock.client.calls import Calls


class Style(StrEnum):
    PENSTOCK = "penstock"
    """`generate(task, trajectory)`, `reward(task, trajectory)`."""
    SLIME = "slime"
    """`generate(args, sample, sampling_params)`, `reward(args, sample)`. vime uses the same."""
    VERL = "verl"
    """`compute_score(data_source, solution_str, ground_truth, extra_info)`."""
    TRL = "trl"
    """`reward(completions, **kwargs)`."""


@dataclass(frozen=True)
class Functions:
    generate: Agent
    reward: Agent | None
    connect: Callable[[Calls], None]
    """Sets the server, before the first attempt."""


def load_functions(
    style: Style,
    generate: str | None,
    reward: str | None,
    args: Mapping[str, Any],
    *,
    whole_group: bool,
) -> Functions:
    if style is Style.SLIME:
        agent = load_slime(generate, reward, args, whole_group=whole_group)
        if whole_group and reward is None:
            raise BadFunction("--group-reward requires --reward")
        scores = agent.reward_group if whole_group else None
        return Functions(agent.generate, scores, agent.connect)
    if reward is None:
        raise BadFunction(f"--style {style} requires --reward")
    if generate is not None:
        raise BadFunction(
            f"--style {style} applies to reward functions and cannot be combined with --generate"
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
    if args.get("group_rm") and not whole_group:
        raise BadFunction("--args sets group_rm: use --group-reward instead")
    scored_by = (
        generate,
        reward,
        args.get("custom_generate_function_path"),
        args.get("custom_rm_path"),
    )
    if args.get("rm_type") and not any(scored_by):
        raise BadFunction(
            f"--args sets rm_type = {args['rm_type']!r}, and Penstock has none of slime's own rewards; "
            "give a function with --reward, or custom_rm_path in --args"
        )
    modules.install()
    found = [
        _find_generate(generate) if generate else None,
        find(reward, "--reward", ("args", "sample")) if reward else None,
    ]
    # Replaced slime functions, such as `generate_and_rm`, find the user's functions by these paths.
    paths = {"custom_generate_function_path": generate, "custom_rm_path": reward}
    given = {**{name: path for name, path in paths.items() if path}, **args}
    return SlimeAgent(found[0], found[1], given, group_reward=whole_group)


def _find_generate(name: str) -> Callable[..., Any]:
    function = find(name, "--generate", None)
    # `evaluation` need not have a default, because every caller passes it if the signature names it.
    named = {"evaluation": False} if takes_evaluation(function) else None
    return find(name, "--generate", ("args", "sample", "sampling_params"), named)
