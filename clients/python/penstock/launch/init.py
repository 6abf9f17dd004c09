"""`penstock init`: writes a recipe, with a person's own model, data and reward in it.

The recipes are the files of the package `penstock.recipes`; the first line of each describes it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli_w

from penstock.common.answers import Exit, complain
from penstock.common.settings import Place, line_of
from penstock.common.suggestions import did_you_mean
from penstock.launch.errors import LaunchInvalid


def recipes() -> Mapping[str, str]:
    """The text of each recipe by its name."""
    found = {
        Path(file.name).stem: file
        for file in files("penstock.recipes").iterdir()
        if file.name.endswith(".toml")
    }
    return {name: found[name].read_text() for name in sorted(found)}


def init(file: Path, recipe: str, model: str | None, data: str | None, reward: str | None) -> int:
    """Writes the file; returns the exit status."""
    try:
        text = fill(recipe, model, data, reward)
        with file.open("x") as target:
            target.write(text)
    except LaunchInvalid as error:
        return complain("penstock init", error)
    except FileExistsError:
        return complain("penstock init", f"{file} is there already; name another file")
    except OSError as error:
        return complain("penstock init", f"{file}: {error.strerror}")
    sys.stderr.write(f"penstock init: wrote {file}; to train: penstock up {file}\n")
    return Exit.DONE


def fill(recipe: str, model: str | None, data: str | None, reward: str | None) -> str:
    """The text of a recipe with the values that are given. Raises LaunchInvalid."""
    known = recipes()
    if recipe not in known:
        described = [f"{name}: {text.partition(chr(10))[0][2:]}" for name, text in known.items()]
        there = "\n".join(["there are:", *described])
        raise LaunchInvalid(
            f"--recipe {recipe}: no such recipe{did_you_mean(recipe, known)}\n{there}"
        )
    text = known[recipe]
    values: dict[str, tuple[Place, str | None]] = {
        "--model": (("serve", "engine", "model"), model),
        "--reward": (("rollout", "reward"), reward),
        "--data": (("train", "data", _source(text), "path"), data),
    }
    for option, (place, value) in values.items():
        if value is not None:
            text = _replace(text, place, value, f"{option}: the recipe {recipe}")
    if data is not None:
        kind = "parquet" if data.endswith(".parquet") else "jsonl"
        text = text.replace(f"[train.data.{_source(text)}]", f"[train.data.{kind}]")
        text = _without_evaluation(text)
    return text


def _source(text: str) -> str:
    table: Any = tomllib.loads(text)["train"]["data"]
    return next((name for name in ("jsonl", "parquet") if name in table), "jsonl")


def _without_evaluation(text: str) -> str:
    """Comments out the recipe's evaluation, whose questions are of other data."""
    head, header, tail = text.partition("[[train.evaluation]]\n")
    if not header:
        return text
    own, following, rest = tail.partition("\n[")
    quoted = "".join(f"# {line}\n" for line in (header + own).rstrip("\n").split("\n"))
    return f"{head}# To evaluate on questions of your own, held out of the data:\n{quoted}{following}{rest}"


def _replace(text: str, place: Place, value: str, where: str) -> str:
    number = line_of(text, place)
    if number is None:
        raise LaunchInvalid(f"{where} has no {'.'.join(map(str, place))}")
    lines = text.split("\n")
    written = tomli_w.dumps({"x": value}).strip().removeprefix("x = ")
    lines[number - 1] = re.sub(r'"[^"]*"', lambda _: written, lines[number - 1], count=1)
    return "\n".join(lines)
