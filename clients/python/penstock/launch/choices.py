"""What a launch chooses, and the file of `penstock up` that holds it, with a reason in each line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import tomli_w

from penstock.common.settings import SettingInvalid, Table, apply_setting
from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import Layout
from penstock.launch.model import Model
from penstock.machine.devices import Machine

STEPS = 100
GROUP_SIZE = 8
CHECKPOINTS = 5
"""In a run."""
LORA_RANK, LORA_ALPHA = 32, 64.0
LORA_FACTOR = 20
"""By which an adapter's learning rate is larger: it has far fewer parameters."""
RATES = ((3e8, 2e-5), (1e9, 5e-6))
"""Learning rates of models with fewer parameters than that; `RATE` for larger ones."""
RATE = 1e-6
MAX_LAG = 4
"""The trainer's default."""
ROUNDED_TO = 64


@dataclass(frozen=True)
class Choice:
    value: object
    why: str


Choices = dict[str, Choice]
"""By the dotted key in the file."""


@dataclass(frozen=True)
class Launch:
    """What is asked for; None leaves the choice to the machine, the model and the data."""

    model: str
    """A folder, or a name on the hub."""
    data: str
    """A file, a folder of tables, or a function."""
    reward: str | None
    """As pkg.module:function, or file.py:function. None if this process scores the answers itself."""
    columns: str | None = None
    out: Path | None = None
    steps: int | None = None
    group_size: int | None = None
    max_tokens: int | None = None
    learning_rate: float | None = None
    lora: bool | None = None
    ranks: int | None = None
    style: str | None = None
    overrides: tuple[str, ...] = ()
    """Settings of the file, as section.key=value."""


@dataclass(frozen=True)
class Data:
    """The prompts of a launch."""

    table: Table
    """The source, as it is in [train.data]."""
    rows: int | None
    """None if they have no end."""
    longest: int
    """Most tokens of a prompt."""


def choose(
    given: Launch, out: Path, machine: Machine, model: Model, layout: Layout, data: Data
) -> Choices:
    """Raises LaunchInvalid if no answer fits into the model's context."""
    on_gpu = bool(machine.gpus)
    steps, size = given.steps or STEPS, given.group_size or GROUP_SIZE
    groups = 32 if on_gpu else 8
    tokens = given.max_tokens or min(1024 if on_gpu else 256, model.context - data.longest)
    if data.longest + tokens > model.context:
        raise LaunchInvalid(
            f"--max-tokens {tokens}: the longest prompt has {data.longest} tokens, and the model's "
            f"context {model.context}; at most {model.context - data.longest} remain for an answer"
        )
    length = -(-(data.longest + tokens) // ROUNDED_TO) * ROUNDED_TO
    passes = (
        "" if data.rows is None else f", {_count(steps * groups / data.rows)} passes of the data"
    )
    number = f"{model.parameters / 1e6:,.0f} million parameters"
    has = "has" if machine.bfloat16 else "has no"
    chosen: dict[str, tuple[object, str]] = {
        "up.out": (str(out), "logs, figures, checkpoints and the trained model"),
        "serve.listen": ("127.0.0.1:0", "a free port"),
        "serve.engine.model": (str(model.folder), number),
        "serve.engine.max-model-len": (
            min(length, model.context),
            f"the longest prompt, {data.longest} tokens at most, and an answer",
        ),
        "serve.engine.max-num-seqs": (groups * size, "the answers of a step"),
        **_devices(layout, machine),
        **_rollout(given.reward),
        **({"rollout.style": (given.style, "as given")} if given.style else {}),
        "rollout.concurrency": (groups * size, "answers in flight: those of a step"),
        "train.run.steps": (steps, f"{steps * groups} prompts{passes}"),
        "train.model.dtype": (
            "auto",
            f"{machine.dtype}: the machine {has} instructions for bfloat16",
        ),
        **_training(given, layout, model, on_gpu),
        **{f"train.data.{key}": (value, "") for key, value in _flat(data.table)},
        "train.data.group_size": (size, "answers to each prompt, which are compared"),
        "train.data.sampling.max_tokens": (tokens, "of an answer"),
        "train.train.groups_per_step": (groups, f"prompts of a step: {groups * size} answers"),
        "train.checkpoint.every_steps": (max(1, steps // CHECKPOINTS), "so that it can resume"),
    }
    choices = {key: Choice(value, why) for key, (value, why) in chosen.items()}
    for setting in given.overrides:
        _override(choices, setting)
    return choices


def whole(function: str) -> str:
    """The name of a function, with the whole path of its file, so that it is found from any folder."""
    file, _, name = function.partition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else function


def _rollout(reward: str | None) -> dict[str, tuple[object, str]]:
    if reward is None:
        return {"rollout.count": (0, "the reward is a function of the script that trains")}
    return {"rollout.reward": (whole(reward), "scores each answer")}


def _devices(layout: Layout, machine: Machine) -> dict[str, tuple[object, str]]:
    chosen: dict[str, tuple[object, str]] = {}
    if layout.ranks > 1:
        chosen["up.trainer_ranks"] = (layout.ranks, "processes that train")
        why = "gradients are divided too, which saves memory"
        chosen["train.train.reduce_each_micro_batch"] = (True, why)
    if not machine.gpus:
        return chosen
    if layout.engine_share:
        why = "of the GPU's memory; the trainer has the rest"
        return {**chosen, "serve.engine.gpu-memory-utilization": (layout.engine_share, why)}
    if layout.engines > 1:
        chosen["engines.count"] = (layout.engines, f"one a GPU; {layout.ranks} GPUs train")
    chosen["cluster.engine.gpus"] = (1, "each engine has its own")
    chosen["cluster.trainer.gpus"] = (1, "and so has each process that trains")
    return chosen


def _training(
    given: Launch, layout: Layout, model: Model, on_gpu: bool
) -> dict[str, tuple[object, str]]:
    rate = next((rate for below, rate in RATES if model.parameters < below), RATE)
    rate = given.learning_rate or (rate * LORA_FACTOR if layout.lora else rate)
    chosen: dict[str, tuple[object, str]] = {}
    if layout.lora:
        why = (
            "an adapter" if given.lora else "an adapter: all weights need more memory than there is"
        )
        chosen |= {
            "serve.engine.enable-lora": (True, why),
            "serve.engine.max-lora-rank": (LORA_RANK, ""),
            "serve.engine.max-loras": (MAX_LAG + 2, "versions whose answers may still be trained"),
            "train.model.lora.rank": (LORA_RANK, why),
            "train.model.lora.alpha": (LORA_ALPHA, "twice the rank"),
        }
    if on_gpu:
        why = "computes activations twice, which saves memory"
        chosen["train.model.gradient_checkpointing"] = (True, why)
        chosen["train.train.micro_batch_tokens"] = (
            8192,
            "of one pass; lower it if memory runs out",
        )
    why = "as given" if given.learning_rate else "for a model of this size"
    return {**chosen, "train.train.learning_rate": (rate, why)}


def _count(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _flat(table: Mapping[str, object], above: str = "") -> list[tuple[str, object]]:
    """The values of a table by dotted key."""
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        inner = isinstance(value, dict)
        found += _flat(cast("Table", value), f"{above}{key}.") if inner else [(above + key, value)]
    return found


def _override(choices: Choices, setting: str) -> None:
    """Replaces a choice by a setting, and what is below it. Raises LaunchInvalid."""
    table: Table = {}
    try:
        names = apply_setting(table, setting)
    except SettingInvalid as error:
        raise LaunchInvalid(str(error)) from error
    key = ".".join(names)
    for other in [k for k in choices if k.startswith(f"{key}.")]:
        del choices[other]
    for name, value in _flat(table):
        choices[name] = Choice(value, "--set")


def render(choices: Choices, above: Sequence[str]) -> str:
    """The file as TOML, each value with its reason; `above` are comments for its beginning."""
    sections: dict[str, list[str]] = {}
    for key, choice in choices.items():
        section, _, name = key.rpartition(".")
        line = tomli_w.dumps({name: choice.value}).strip()
        why = f"    # {choice.why}" if choice.why and "\n" not in line else ""
        sections.setdefault(section, []).append(line + why)
    blocks = ["\n".join(f"# {line}".rstrip() for line in above)]
    blocks += [
        "\n".join([f"[{section}]"] * bool(section) + lines)
        for section, lines in sorted(sections.items(), key=lambda item: bool(item[0]))
    ]
    text = "\n\n".join(blocks) + "\n"
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LaunchInvalid(f"--set: a value is set as a table too: {error}") from error
    return text
