"""The section `[algorithm]`: which settings it accepts and which it refuses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from penstock.trainer.algorithms.advantages import advantage_function
from penstock.trainer.algorithms.batches import RewardBatch, Sequences, StepCounts, TokenBatch
from penstock.trainer.algorithms.losses import TokenLoss, loss_function
from penstock.trainer.algorithms.objective import Objective, PolicyOutput
from penstock.trainer.config import algorithm as algorithm_config
from penstock.trainer.config.algorithm import (
    AlgorithmConfig,
    Cispo,
    ClippedWeight,
    CustomFunction,
    Gae,
    KlMask,
    PpoClip,
    RatioMask,
    Uncorrected,
)
from penstock.trainer.config.trainer import load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid
from tests.trainer.config.test_config import MINIMAL, write

LOSS, KL, CORRECTION = "algorithm.loss", "algorithm.kl", "algorithm.correction"


def load(folder: Path, text: str) -> AlgorithmConfig:
    return load_config(write(folder, f"{MINIMAL}\n{text}\n")).algorithm


def test_a_table_without_a_kind_is_of_the_default_kind(tmp_path: Path) -> None:
    assert load(tmp_path, "[algorithm.loss]\nclip_low = 0.1").loss == PpoClip(clip_low=0.1)
    assert load(tmp_path, "") == AlgorithmConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('level = "off"', Uncorrected()),
        ('ratio_to = "proximal"', Uncorrected(ratio_to="proximal")),
        (
            'level = "token"\nmode = "clip"\nthreshold = 2',
            ClippedWeight(level="token", mode="clip", threshold=2.0),
        ),
        (
            'level = "sequence"\nmode = "mask"\nquantity = "ratio"\nthreshold = [0.9, 1.1]',
            RatioMask(level="sequence", mode="mask", quantity="ratio", threshold=(0.9, 1.1)),
        ),
        (
            'level = "token"\nmode = "mask"\nquantity = "kl"\nthreshold = 0.1',
            KlMask(level="token", mode="mask", quantity="kl", threshold=0.1),
        ),
    ],
)
def test_a_correction_is_four_settings(tmp_path: Path, text: str, expected: BaseModel) -> None:
    assert load(tmp_path, f"[{CORRECTION}]\n{text}").correction == expected


@pytest.mark.parametrize(
    ("section", "text", "words"),
    [
        (
            "algorithm.advantage",
            "discount = 0.9",
            ["advantage.discount: unknown setting of grpo; gae has it"],
        ),
        (
            "algorithm.advantage.critic",
            "clip = 0.1",
            ["advantage.critic: unknown table of grpo; gae has it"],
        ),
        ("algorithm.advantage", 'kind = "gae"\ntrace = 1.1', ["advantage.trace", "1.1"]),
        (
            LOSS,
            'kind = "gspo"\ndual_clip = 3',
            ["loss.dual_clip: unknown setting of gspo; ppo_clip has it"],
        ),
        (
            LOSS,
            'kind = "reinforce"\nclip_low = 0.1',
            ["loss.clip_low: unknown setting of reinforce; ppo_clip has it"],
        ),
        (LOSS, "dual_clip = 0.5", ["loss.dual_clip", "0.5"]),
        (LOSS, "clip_low = 1.5", ["loss.clip_low", "1.5"]),
        (LOSS, 'kind = "best"', ["algorithm.loss", "no kind 'best'", "ppo_clip, gspo, cispo"]),
        (LOSS, 'kind = "custom"\nfunction = "no colon"', ["function", "'no colon'"]),
        ("algorithm.aggregation", 'kind = "fixed_length"', ["aggregation.length", "required"]),
        (
            "algorithm.aggregation",
            "length = 9",
            ["aggregation.length: unknown setting of token_mean"],
        ),
        (KL, "coefficient = 0.1", ["kl.coefficient: unknown setting of none; loss has it"]),
        (KL, 'kind = "loss"', ["kl.coefficient", "required"]),
        (KL, 'kind = "loss"\ncoefficient = 0', ["kl.coefficient", "0"]),
        (CORRECTION, "threshold = 2", ["algorithm.correction: 'level' is missing"]),
        (
            CORRECTION,
            'mode = "clip"\nthreshold = 2',
            ["algorithm.correction: 'level' is missing", "selects which other fields"],
        ),
        (
            CORRECTION,
            'level = "off"\nthreshold = 2',
            ["correction.threshold: unknown setting of off"],
        ),
        (CORRECTION, 'level = "token"\nmode = "clip"\nratio_to = "behaviour"', ["ratio_to"]),
        (
            CORRECTION,
            'level = "token"\nmode = "clip"\nquantity = "kl"\nthreshold = 1',
            ["correction.quantity", "'ratio'"],
        ),
        (
            CORRECTION,
            'level = "token"\nmode = "mask"\nquantity = "ratio"\nthreshold = 2',
            ["correction.threshold", "2"],
        ),
        (
            CORRECTION,
            'level = "token"\nmode = "mask"\nquantity = "ratio"\nthreshold = [2, 1]',
            ["correction.threshold", "below the largest"],
        ),
        (
            CORRECTION,
            'level = "token"\nmode = "mask"\nquantity = "ratio"\nthreshold = [2.0, 3.0]',
            ["correction.threshold", "1 must be between", "none of them would be trained"],
        ),
        (
            CORRECTION,
            'level = "sequence"\nmode = "mask"\nquantity = "ratio"\nthreshold = [0.5, 0.9]',
            ["correction.threshold", "1 must be between"],
        ),
        (
            CORRECTION,
            'level = "token"\nmode = "mask"\nquantity = "kl"\nthreshold = 1\nweighted = true',
            ["correction.weighted: unknown setting of token.mask.kl; mask.ratio has it"],
        ),
        (
            CORRECTION,
            'level = "off"\nratio_to = "proximal"\n[algorithm.loss]\nkind = "reinforce"',
            ["ratio_to", "reinforce", "no ratio"],
        ),
        (
            CORRECTION,
            'level = "token"\nmode = "clip"\nthreshold = 0.5',
            ["correction.threshold", "at least 1", "scaled down", "0.5"],
        ),
        *(
            (
                LOSS,
                f'kind = "{kind}"\nclip_low = 0\nclip_high = 0',
                ["algorithm.loss", "both 0", "reinforce"],
            )
            for kind in ("ppo_clip", "gspo", "cispo")
        ),
        ("train", "clip_low = 0.1", ["train.clip_low: unknown setting; [train] has"]),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, section: str, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(tmp_path, f"[{section}]\n{text}")
    for word in words:
        assert word in str(caught.value)


def test_what_is_written_reads_back_as_itself(tmp_path: Path) -> None:
    path = write(tmp_path)
    for overrides in (
        ["algorithm.loss.kind=cispo", "algorithm.entropy_coefficient=0.01"],
        ["algorithm.correction={level='token', mode='mask', quantity='ratio', threshold=[0.5, 5]}"],
        ["algorithm.loss={kind='custom', function='a.b:c', options={deep=true, by=2, name='x'}}"],
    ):
        config = load_config(path, overrides)
        assert load_config(write(tmp_path, render_config(config))) == config
        write(tmp_path)
    assert load_config(path, ["algorithm.loss.kind=cispo"]).algorithm.loss == Cispo(kind="cispo")


def relative(batch: TokenBatch) -> TokenLoss:
    return TokenLoss(-batch.advantages_N * (batch.logprobs_N - batch.old_logprobs_N).exp())


TRUNCATED = (["data.sampling.top_p=0.9"], ["data.sampling.top_k=20"])
CUSTOM = (
    "algorithm.loss={kind='custom', function='tests.trainer.config.test_algorithm_config:relative'}"
)
REINFORCE = "algorithm.loss.kind=reinforce"
PROXIMAL = "algorithm.correction={level='off', ratio_to='proximal'}"
CORRECTED = "algorithm.correction={level='token', mode='clip', threshold=2}"
MASKED = "algorithm.correction={level='token', mode='mask', quantity='kl', threshold=0.1}"
KL_IN_LOSS = "algorithm.kl={kind='loss', coefficient=0.1}"
KL_IN_REWARD = "algorithm.kl={kind='reward', coefficient=0.1}"
READS_BEHAVIOUR = [
    [],
    ["algorithm.loss.kind=gspo"],
    ["algorithm.loss.kind=cispo", KL_IN_LOSS],
    [CUSTOM],
    [CORRECTED],
    [MASKED],
    [REINFORCE, CORRECTED],
    [REINFORCE, KL_IN_REWARD],
    [PROXIMAL, KL_IN_REWARD],
]
IGNORES_BEHAVIOUR = [[PROXIMAL], [PROXIMAL, KL_IN_LOSS], [PROXIMAL, CUSTOM], [REINFORCE]]


def losses_and_penalties(algorithm: AlgorithmConfig, sampled: float) -> list[torch.Tensor]:
    """Loss and penalty of a token whose recorded log-probability is `sampled`, and whose current
    one is -1.
    """
    objective = Objective(algorithm)
    logprobs, behaviour = torch.tensor([-1.0], requires_grad=True), torch.tensor([sampled])
    reference = torch.tensor([-1.5])
    output = PolicyOutput(
        logprobs,
        torch.zeros(1),
        behaviour,
        None,
        reference if objective.needs_reference else None,
        torch.tensor([-1.0]),
        Sequences(torch.zeros(1).long(), 1),
    )
    loss, _ = objective.evaluate(output, StepCounts(1, 1))
    return [loss.detach(), objective.penalties(behaviour, reference)]


@pytest.mark.parametrize("overrides", [*READS_BEHAVIOUR, *IGNORES_BEHAVIOUR], ids=str)
def test_it_is_known_what_reads_the_recorded_logprobs(tmp_path: Path, overrides: list[str]) -> None:
    algorithm = load_config(write(tmp_path), overrides).algorithm
    found, other = (losses_and_penalties(algorithm, sampled) for sampled in (-1.0, -0.5))
    assert algorithm.reads_behaviour is (found != other) is (overrides in READS_BEHAVIOUR)


@pytest.mark.parametrize("truncated", TRUNCATED, ids=["top_p", "top_k"])
def test_truncated_sampling_is_refused_where_the_recorded_logprobs_are_read(
    tmp_path: Path, truncated: list[str]
) -> None:
    said = re.escape(truncated[0].replace("=", " = "))
    for overrides in READS_BEHAVIOUR:
        with pytest.raises(
            ConfigInvalid, match=f'{said} cannot be combined.*ratio_to = "proximal"'
        ):
            load_config(write(tmp_path), [*truncated, *overrides])
    for overrides in IGNORES_BEHAVIOUR:
        load_config(write(tmp_path), [*truncated, *overrides])


def test_evaluations_may_be_sampled_in_any_way(tmp_path: Path) -> None:
    (one,) = load_config(
        write(tmp_path),
        ["evaluation=[{name='a', jsonl={path='x'}, sampling={top_p=0.9, top_k=20}}]"],
    ).evaluation
    assert (one.sampling.top_p, one.sampling.top_k) == (0.9, 20)


def test_a_critic_without_a_clip_is_written_as_one(tmp_path: Path) -> None:
    path = write(tmp_path)
    overrides = ["algorithm.advantage.kind=gae", "algorithm.advantage.critic.clip=none"]
    config = load_config(path, overrides)
    assert isinstance(config.algorithm.advantage, Gae)
    assert config.algorithm.advantage.critic.clip == "none"
    assert load_config(write(tmp_path, render_config(config))) == config
    for wrong in ("0", "''", "unbounded"):
        with pytest.raises(ConfigInvalid, match=r"critic\.clip"):
            load_config(write(tmp_path), [*overrides, f"algorithm.advantage.critic.clip={wrong}"])


def test_every_field_of_every_kind_explains_itself() -> None:
    kinds = [
        found
        for found in vars(algorithm_config).values()
        if isinstance(found, type) and issubclass(found, BaseModel)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"


PAGE = (Path(__file__).parents[3] / "docs" / "concepts" / "algorithms.md").read_text()


def test_the_page_begins_with_the_defaults() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert AlgorithmConfig.model_validate(tomllib.loads(block)["algorithm"]) == AlgorithmConfig()


def test_the_algorithm_to_start_from_can_be_loaded(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "start" / "own-task.md").read_text()
    (block,) = [b for b in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "gspo" in b]
    assert load(tmp_path, block).correction == ClippedWeight(
        level="token", mode="clip", threshold=2.0
    )


def test_the_pages_functions_of_your_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "own_functions.py").write_text("".join(blocks))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def custom(name: str, **options: Any) -> CustomFunction:
        return CustomFunction(kind="custom", function=f"own_functions:{name}", options=options)

    rewards = RewardBatch(
        np.array([1.0, 3.0]), np.zeros(2, np.int64), np.ones(2, np.bool_), np.array([1, 2]),
        np.zeros(3),
    )  # fmt: skip
    found = advantage_function(custom("best_of_group", bonus=2.0))(rewards)
    assert found.tolist() == [0.0, 2.0, 2.0]
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = TokenBatch(
        logprobs, torch.tensor([-1.0, -1.0]), torch.ones(2), Sequences(torch.zeros(2).long(), 1)
    )
    loss = loss_function(custom("squared", weight=1.0))(tokens).loss_N
    assert loss.tolist() == [1.0, 3.0]
