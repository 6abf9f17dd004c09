"""The megatron-core backend compared with the default one and transformers, on one, two and four
ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.megatron_worker import CASES, FAMILIES, PARTS, RESUMED

ROOT = Path(__file__).parents[3]
SECONDS = 270


def run_part(folder: Path, part: str, seconds: float) -> dict[str, Any]:
    """Run a part's processes; return their results by the name of each check."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.megatron_worker", str(folder), part],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of two ranks."""
    return run_part(tmp_path_factory.mktemp("megatron"), "two", SECONDS)


def largest_difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    """The largest difference over all steps and figures."""
    assert len(found) == len(expected)
    return max(
        abs((own[name] or 0.0) - (value or 0.0))
        for own, other in zip(found, expected, strict=True)
        for name, value in other.items()
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_and_exports_what_transformers_does(
    found: dict[str, Any], family: str, tied: bool
) -> None:
    one = found["logits"][f"{family}-{tied}"]
    assert one["logits"] <= 1e-5
    assert one["score"] <= 1e-5
    assert one["bitwise"]


def check_as_one(found: dict[str, Any], name: str) -> None:
    """Check that a case's losses and weights equal those of one process with the default backend."""
    expected, own = found["default"][name], found[name]
    assert len(own["results"]) == 10
    assert largest_difference(own["results"], expected["results"]) <= 2e-5
    assert own["weights"] <= 1e-6
    # The weights moved by much more than that.
    assert own["moved"] >= 5e-5
    assert own["untrained"] and own["exported"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_of_the_default_does(
    found: dict[str, Any], name: str
) -> None:
    check_as_one(found, name)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["more", "four"])
def test_other_layouts_train_as_one_process_of_the_default_does(part: str, tmp_path: Path) -> None:
    found = run_part(tmp_path, part, 800)
    for name in PARTS[part].cases:
        check_as_one(found, name)
        if name.startswith("critic"):
            check_critic(found, name)
    for name in PARTS[part].resumed:
        check_alone(found, name)
        check_resumed(found, name)


def check_critic(found: dict[str, Any], name: str) -> None:
    losses = [result["critic_loss"] for result in found[name]["results"]]
    explained = [result["critic_explained_variance"] for result in found[name]["results"]]
    assert min(losses) > 0
    assert abs(explained[0]) < 1e-6 < abs(explained[-1])


def check_alone(found: dict[str, Any], name: str) -> None:
    """Check a case of one rank: it resumes exactly, and a gradient that is not finite moves nothing."""
    own = found[f"alone {name}"]
    assert own["exact"]
    # A checkpoint from before the first step resumes with the first step.
    assert own["begun anew"] == pytest.approx(2e-5 / 2)
    assert {tuple(settings) for settings in own["settings"]} == {(0.5, 0.75, 1e-6)}
    assert own["stayed"]


@pytest.mark.parametrize("name", RESUMED)
def test_one_rank_resumes_exactly_and_throws_away_what_is_not_finite(
    found: dict[str, Any], name: str
) -> None:
    check_alone(found, name)


def test_bfloat16_is_the_arithmetic_and_not_the_weights(found: dict[str, Any]) -> None:
    own, expected = found["rounded"], found["default"]["tensor"]["results"][:3]
    assert own["untrained"] and own["exact"]
    for name, bound in (("loss", 1e-2), ("entropy", 2e-2), ("grad_norm", 0.1)):
        far = [abs(a[name] - b[name]) for a, b in zip(own["results"], expected, strict=True)]
        assert 0 < max(far) < bound, name


def check_resumed(found: dict[str, Any], name: str) -> None:
    own = found[f"resumed {name}"]
    assert own["loaded"]
    assert largest_difference(own["results"], found[f"alone {name}"]["rest"]) <= 2e-5
    assert own["weights"] <= 1e-6
    assert own["kept"]


@pytest.mark.parametrize("name", RESUMED)
def test_ranks_go_on_from_the_checkpoint_of_one(found: dict[str, Any], name: str) -> None:
    check_resumed(found, name)


def test_what_cannot_be_shared_is_refused_with_its_reason(found: dict[str, Any]) -> None:
    said = found["refusals"]
    for name, words in (
        ("heads", ["tensor_parallel", "1 heads of keys and values", "not divisible by 2"]),
        ("layers", ["pipeline_parallel", "3 layers", "not divisible by 2"]),
        ("ranks", ["tensor_parallel 3", "number of ranks, which is 2"]),
        ("vocabulary", ["tensor_parallel", "a vocabulary of 1 tokens", "too few for 2 ranks"]),
        ("kind", ["'gpt2'", "llama, qwen2, qwen3"]),
        ("rope", ["rotary embedding of kind 'dynamic'"]),
    ):
        for word in words:
            assert word in said[name]
