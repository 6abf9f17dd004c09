"""The migration guide names options that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.__main__ import rollout
from penstock.common.settings import apply_setting
from penstock.trainer.config.trainer import TrainerConfig

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "migrate.md"
SCHEMA = TrainerConfig.model_json_schema()


def ours() -> Iterator[str]:
    """The names in the last column of each table."""
    for line in PAGE.read_text().splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield from re.findall(r"`([^`]+)`", line.rstrip("| ").rpartition(" | ")[2])


SETTINGS = sorted({s for s in ours() if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+( = .+)?", s)})
OPTIONS = sorted({s for s in ours() if s.startswith("--")})


def forms(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema, and every schema that it reaches through a union or a reference."""
    if "$ref" in schema:
        yield from forms(SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]])
        return
    for alternative in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from forms(alternative)
    yield schema


def found(path: list[str]) -> list[dict[str, Any]]:
    """Schemas of the setting at this path."""
    here = [SCHEMA]
    for key in path:
        here = [
            f["properties"][key] for s in here for f in forms(s) if key in f.get("properties", {})
        ]
    return here


def allows(schema: dict[str, Any], value: object) -> bool:
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"string": str, "integer": int, "number": (int, float), "array": list}
    return schema.get("type") in kinds and isinstance(value, kinds[schema["type"]])


@pytest.mark.parametrize(
    ("named", "needed"),
    [
        ('algorithm.loss.kind = "gspo"', 'algorithm.aggregation.kind = "sequence_mean"'),
        # The row names it, or the other system already implies it.
        (
            'algorithm.advantage.kind = "dr_grpo"',
            '"fixed_length"|seq-mean-token-sum-norm|loss_type="dr_grpo"',
        ),
    ],
)
def test_half_of_a_papers_objective_names_the_other_half(named: str, needed: str) -> None:
    rows = [
        line for line in PAGE.read_text().splitlines() if line.startswith("|") and named in line
    ]
    assert len(rows) >= 3
    assert all(re.search(needed, row) for row in rows)


def test_the_guide_names_many() -> None:
    assert len(SETTINGS) > 50
    assert len(OPTIONS) >= 4


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_guide_is_there(setting: str) -> None:
    path, _, value = setting.partition(" = ")
    schemas = found(path.split("."))
    assert schemas
    if value:
        document: dict[str, Any] = {}
        apply_setting(document, f"here={value}")
        assert any(allows(f, document["here"]) for s in schemas for f in forms(s))


def test_an_option_of_the_guide_is_the_workers() -> None:
    known = {name for parameter in rollout.params for name in parameter.opts}
    assert set(OPTIONS) <= known


def test_a_path_that_is_not_there_is_noticed() -> None:
    assert not found(["train", "batch_size"])
    assert not any(allows(f, "ppo") for s in found(["algorithm", "loss", "kind"]) for f in forms(s))
