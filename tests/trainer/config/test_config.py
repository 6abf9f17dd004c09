"""The trainer's configuration: which settings it refuses, and with which message."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from penstock.trainer.__main__ import train
from penstock.trainer.config.advice import advise
from penstock.trainer.config.algorithm import PpoClip
from penstock.trainer.config.trainer import TrainerConfig, load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid

MINIMAL = """
[model]
path = "some/model"
[data.reasoning_gym]
name = "basic_arithmetic"
config = { min_digits = 1, max_digits = 2 }
"""
CORRECTED = "algorithm.correction={level='token', mode='clip', threshold=2.0}"
TWO_UPDATES = "train={groups_per_step = 2, updates_per_step = 2}"


def write(folder: Path, text: str = MINIMAL) -> Path:
    path = folder / "trainer.toml"
    path.write_text(text)
    return path


def test_everything_has_a_default_but_model_and_data(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config.algorithm.loss == PpoClip(clip_high=0.28)
    assert config.staleness.late_policy == "mask"
    assert config.data.reasoning_gym is not None
    assert config.data.reasoning_gym.config == {"min_digits": 1, "max_digits": 2}


def test_the_synchronous_loop_has_nothing_to_schedule(tmp_path: Path) -> None:
    for policy in ("mask", "wait", "requeue", "drop"):
        settings = [f"staleness.late_policy={policy}", "staleness.max_lag=0"]
        config = load_config(write(tmp_path), settings)
        assert config.staleness.applied_policy == ("mask" if policy == "wait" else policy)
        config = load_config(write(tmp_path), settings[:1])
        assert config.staleness.applied_policy == policy


def test_overrides_win_and_need_no_quotes(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path),
        [
            "train.learning_rate=1e-5",
            "run.out=some/folder",
            "train.betas=[0.8, 0.9]",
            "data.sampling.stop=['x']",
            "run.save_model=false",
            "train.learning_rate=2e-5",
        ],
    )
    assert config.train.learning_rate == 2e-5
    assert config.run.out == Path("some/folder")
    assert config.train.betas == (0.8, 0.9)
    assert config.data.sampling.stop == ("x",)
    assert config.run.save_model is False


def test_the_rendered_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = load_config(write(tmp_path), ["train.groups_per_step=3"])
    again = load_config(write(tmp_path, render_config(config)))
    assert again == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rate=-1", ["train.learning_rate", "-1"]),
        ("train.learning_rate=nan", ["train.learning_rate", "nan"]),
        (
            "train.lerning_rate=1",
            ["--set train.lerning_rate: unknown setting; did you mean train.learning_rate?"],
        ),
        ("staleness.max_lag=true", ["staleness.max_lag: expected a whole number, got true"]),
        ("staleness.late_policy=maybe", ["staleness.late_policy", "'maybe'"]),
        ("model.dtype=float16", ["model.dtype", "'float16'"]),
        (
            "model.backend=deepspeed",
            ["model.backend: there is no kind 'deepspeed'", "fsdp, megatron"],
        ),
        (
            "model.backend={kind = 'fsdp', tensor_parallel = 2}",
            ["backend.tensor_parallel: unknown setting of fsdp; megatron has it"],
        ),
        ("model.backend={kind = 'megatron', pipeline_parallel = 0}", ["pipeline_parallel", "0"]),
        ("data.group_size=0", ["data.group_size", "0"]),
        ("data.group_size=1", ["data.group_size = 1", '"grpo"', '"reinforce_plus_plus"']),
        (
            "data={reasoning_gym={name='chain_sum'}, group_size=1}",
            ["data.group_size = 1", "at least 2"],
        ),
        ("weights.transport=inline", ["weights.transport", "'inline'", "'stream'"]),
        ("weights.probe.tokens=1", ["weights.probe.tokens", "at least 2", "1"]),
        ("weights.anchor_every=0", ["weights.anchor_every", "0"]),
        ("weights={transport = 'checkpoint', delta = 'on'}", ["weights", 'delta = "on"']),
        ("weights.keep=4", ["weights", 'keep means nothing with transport = "auto"', "checkpoint"]),
        (
            "weights={transport = 'stream', collective = {world_size = 4}}",
            ["weights", 'collective means nothing with transport = "stream"'],
        ),
        (
            "train={groups_per_step = 2, updates_per_step = 8}",
            ["train", "updates_per_step must be at most groups_per_step = 2", "8", "whole groups"],
        ),
        (
            "groups.max_replacements=5",
            ["groups", 'max_replacements has no effect with failed_siblings = "keep"', "replace"],
        ),
        (
            "evaluation=[{name = 'a', jsonl = {path = 'x'}, every_versions = 0, at_start = false, "
            "at_end = false}]",
            ["evaluation.0", "never due", "at_start"],
        ),
        (
            "evaluation=[{name = 'a', jsonl = {path = 'x'}, every_versions = 1001, at_start = false, "
            "at_end = false}]",
            ["'a' is never due", "every_versions = 1001", "at_start"],
        ),
        ("data.jsonl.path=x", ["data", "exactly one", "reasoning_gym", "jsonl"]),
        ("data.mixture=[{weight = 0, jsonl = {path = 'x'}}]", ["data.mixture.0.weight", "0"]),
        ("data.mixture=[{weight = 1}]", ["data.mixture.0", "exactly one"]),
        ("data.python.function=x", ["data.python.function", "'x'"]),
        (
            "data.sampling.temperature=0",
            ["data.sampling", "temperature = 0 leaves nothing to learn from", "[[evaluation]]"],
        ),
        (
            "algorithm.loss.kind=reinforce",
            ["train.updates_per_step = 2", '"reinforce"', "second update", '"cispo"', "= 1"],
        ),
        ("train", ["section.key=value", "'train'"]),
        ("run.seed.deep=1", ["run.seed"]),
    ],
)
def test_a_refusal_names_the_field_and_the_value(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    before = {"run.seed.deep=1": "run.seed=1", "algorithm.loss.kind=reinforce": TWO_UPDATES}
    overrides = [before[override], override] if override in before else [override]
    with pytest.raises(ConfigInvalid) as caught:
        load_config(write(tmp_path), overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["weights={transport = 'checkpoint', keep = 4}"],
        ["weights={transport = 'collective', collective = {world_size = 4}}"],
        [TWO_UPDATES, "algorithm.loss.kind=ppo_clip"],
        ["algorithm.loss.kind=reinforce"],
        # The file of a long run, tried for one step.
        ["run.steps=1", "train.warmup_steps=100"],
        ["groups={failed_siblings = 'replace', max_replacements = 5}"],
        ["evaluation=[{name = 'a', jsonl = {path = 'x'}, sampling = {temperature = 0}}]"],
        ["evaluation=[{name = 'a', jsonl = {path = 'x'}, every_versions = 0, at_start = false}]"],
        ["data.group_size=1", "algorithm.advantage.kind=reinforce_plus_plus"],
        ["data.group_size=1", "algorithm.advantage.kind=gae", "groups.attempts=3"],
        # A whole-rollout function may drop groups without any filter of the trainer.
        ["groups.then=stop"],
    ],
)
def test_what_makes_sense_is_taken_and_reads_back(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(write(tmp_path), overrides)
    assert load_config(write(tmp_path, render_config(config))) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], []),
        (["algorithm.loss.kind=reinforce"], ["staleness.max_lag = 4", "algorithm.correction"]),
        (["algorithm.loss.kind=reinforce", "staleness.max_lag=0"], []),
        (
            [
                "algorithm.loss.kind=reinforce",
                CORRECTED,
            ],
            [],
        ),
        # Neither correction leaves weights behind, and this loss has no ratio.
        (
            [
                "algorithm.loss.kind=reinforce",
                "algorithm.correction={level='token', mode='mask', quantity='kl', threshold=0.5}",
            ],
            ["staleness.max_lag = 4", "a mode that weighs"],
        ),
        (
            [
                "algorithm.loss.kind=reinforce",
                "algorithm.correction={level='sequence', mode='mask', quantity='ratio', "
                "threshold=[0.5, 2.0], weighted=false}",
            ],
            ["staleness.max_lag = 4", "a mode that weighs"],
        ),
        (["algorithm.correction={level='token', mode='mask', quantity='kl', threshold=0.5}"], []),
        (["algorithm.correction={level='off', ratio_to='proximal'}"], ["staleness.max_lag = 4"]),
        (
            [
                "evaluation=[{name='a', reasoning_gym={name='basic_arithmetic', size=9, "
                "config={min_digits=1, max_digits=2}}}]"
            ],
            ["'a'", "the same problems", "another seed"],
        ),
        (["evaluation=[{name='a', reasoning_gym={name='basic_arithmetic', seed=1}}]"], []),
        (["algorithm.correction={level='off', ratio_to='proximal'}", "staleness.max_lag=0"], []),
        (["algorithm.loss.kind=gspo"], ['"gspo"', "sequence_mean"]),
        (["algorithm.loss.kind=gspo", "algorithm.aggregation.kind=sequence_mean"], []),
        (["algorithm.loss={kind='custom', function='a:b'}"], []),
        # With one update, the ratio to the policy at the step's beginning is always 1, so it never clips.
        (
            ["algorithm.loss.clip_high=0.3", CORRECTED],
            ["bounds of algorithm.loss", "updates_per_step = 1"],
        ),
        (["algorithm.loss.dual_clip=3.0", CORRECTED], ["nothing is ever clipped"]),
        (["algorithm.loss.clip_high=0.28", CORRECTED], []),
        (["algorithm.loss.clip_high=0.3", CORRECTED, TWO_UPDATES], []),
        (["algorithm.loss.clip_high=0.3"], []),
        (
            ["run.steps=10", "train.warmup_steps=10"],
            ["train.warmup_steps = 10", "run.steps = 10", "train.learning_rate"],
        ),
        (["run.steps=10", "train.warmup_steps=9"], []),
    ],
)
def test_what_hardly_anybody_means_is_advised_against(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    said = advise(load_config(write(tmp_path), overrides))
    assert len(said) == bool(words)
    assert all(word in said[0] for word in words)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"missing\.toml: No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigInvalid, match=r"trainer\.toml"):
        load_config(write(tmp_path, "= nothing"))


def test_the_command_says_so_and_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(write(tmp_path), ["algorithm.loss.clip_low=7"], False, False) == 2
    assert "algorithm.loss.clip_low" in capsys.readouterr().err
    assert train(write(tmp_path), [], False, True) == 0
    shown = capsys.readouterr().out
    assert 'name = "basic_arithmetic"' in shown
    for line in ('transport = "auto"', 'delta = "auto"', "anchor_every = 50", "tolerance = 0.1"):
        assert line in shown


def test_every_field_explains_itself() -> None:
    def walk(model: type) -> None:
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, f"{model.__name__}.{name}"
            for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if hasattr(inner, "model_fields"):
                    walk(inner)

    walk(TrainerConfig)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.lora={rank = 4, alpha = 8}", ["lora", "PEFT"]),
        ("model.cpu_offload=true", ["cpu_offload", "over more devices"]),
        ("train.reduce_each_micro_batch=true", ["reduce_each_micro_batch", "whole"]),
    ],
)
def test_what_megatron_has_not_is_refused_with_its_reason(
    tmp_path: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_config(write(tmp_path), ["model.backend=megatron", override])
    for word in ('"megatron"', *words):
        assert word in str(caught.value)


def test_a_backend_is_a_table_or_its_kind_alone(tmp_path: Path) -> None:
    alone = load_config(write(tmp_path), ["model.backend=megatron"])
    table = load_config(write(tmp_path), ["model.backend={kind = 'megatron', tensor_parallel = 1}"])
    assert alone == table
    assert load_config(write(tmp_path)).model.backend.kind == "fsdp"


def test_a_server_is_an_address_and_several_are_a_list(tmp_path: Path) -> None:
    one = load_config(write(tmp_path), ["server.address=hub:1"])
    assert one.server.addresses == ("hub:1",)
    two = load_config(write(tmp_path), ["server.address=['hub-0:1', 'hub-1:1']"])
    assert two.server.addresses == ("hub-0:1", "hub-1:1")
    again = load_config(write(tmp_path, render_config(two)))
    assert again == two


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["server.address=[]"], ["server.address", "a list of at least one"]),
        (["server.address=['a:1', '']"], ["server.address", "reads HOST:PORT"]),
        (["server.address=['a:1', 'b:1', 'a:1']"], ["server.address", "a:1 is listed twice"]),
        (["server.address=localhost"], ["server.address", "reads HOST:PORT", "'localhost'"]),
        (['server.address=["a:1", "b:99999"]'], ["server.address", "reads HOST:PORT"]),
        (
            ["server.address=['a:1', 'b:1', 'c:1']", "train.groups_per_step=2"],
            ["train.groups_per_step must be at least 3", "got 2"],
        ),
        (
            ["server.address=['a:1', 'b:1']", "weights.transport=collective"],
            ['"collective" supports only one server', "has 2"],
        ),
    ],
)
def test_a_run_that_cannot_be_divided_is_refused_with_its_reason(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_config(write(tmp_path), overrides)
    for word in words:
        assert word in str(caught.value)


def test_what_is_printed_holds_no_secret_of_a_tracker(tmp_path: Path) -> None:
    trackers = (
        '[[metrics.trackers]]\nkind = "mlflow"\ntracking_uri = "https://me:hunter2@mlflow.example"\n'
        '[[metrics.trackers]]\nkind = "custom"\nfunction = "a:b"\n'
        'options = { api_key = "hunter2", host = "https://u:hunter2@h/", team = "blue" }\n'
    )
    config = load_config(write(tmp_path, MINIMAL + trackers))
    printed = render_config(config)
    assert "hunter2" not in printed
    mlflow, own = tomllib.loads(printed)["metrics"]["trackers"]
    assert mlflow["tracking_uri"] == "https://***@mlflow.example"
    assert own["options"] == {"api_key": "***", "host": "https://***@h/", "team": "blue"}
    # Only the printed copy hides secrets. The run itself uses the real values.
    assert "hunter2" in str(config.metrics.trackers)
