"""The processes that `test_megatron_policy` starts.

    python -m tests.support.megatron_worker FOLDER PART

    rank 0, alone:  rollouts and ten steps of the default policy for each case; megatron-core on one rank
    all:            the same steps on the cases' layouts; the checkpoints of one rank

Rank 0 writes its results to FOLDER/found.json, by the name of the case; the test judges them.
Loading megatron-core takes seconds, so one start runs everything, and the ranks are forked from a
process that has loaded it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from penstock.trainer.algorithms.objective import Objective
from penstock.trainer.batching.planning import StepPlan, plan_step
from penstock.trainer.config.algorithm import AlgorithmConfig
from penstock.trainer.config.trainer import ModelConfig, TrainConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.policy.fsdp import FsdpPolicy
from penstock.trainer.policy.megatron import hook as megatron_hook
from penstock.trainer.policy.process_group import end_with_parent
from tests.support.policy_rollouts import roll_out
from tests.support.tiny_model import make_byte_tokenizer

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Odd, so that it must be padded before two ranks can share it.
VOCABULARY = 265
STEPS = 10
RESUMED = ("tensor", "pipeline")
RESUMED_OF_MORE = ("critic of stages",)
RESUMED_BY_FOUR = ("tensor and pipeline",)
EVERYTHING = {
    "kl": {"kind": "loss", "coefficient": 0.1},
    "correction": {"level": "token", "mode": "clip", "threshold": 2.0},
    "entropy_coefficient": 0.01,
}
PENALIZED = {
    "advantage": {"kind": "reinforce_plus_plus"},
    "kl": {"kind": "reward", "coefficient": 0.1},
}
GAE = {"kind": "gae", "trace": 0.5, "critic": {"learning_rate": 1e-3}}
LEAVES_OUT = {"kl": {"kind": "reward", "coefficient": 0.1}}


@dataclass
class Case:
    """One model, trained by the default policy and by megatron-core."""

    family: str
    tied: bool
    tensor: int
    pipeline: int
    algorithm: dict[str, Any] = field(default_factory=dict)
    updates: int = 1
    gradient_checkpointing: bool = False
    ranks: int = 2

    def policy_arguments(self, folder: Path, *, megatron: bool, alone: bool = False) -> Any:
        backend: Any = {"kind": "fsdp"}
        if megatron:
            sizes = (1, 1) if alone else (self.tensor, self.pipeline)
            backend = {
                "kind": "megatron",
                "tensor_parallel": sizes[0],
                "pipeline_parallel": sizes[1],
            }
        model = ModelConfig(
            path=str(folder),
            dtype="float32",
            backend=backend,
            gradient_checkpointing=megatron and self.gradient_checkpointing,
        )
        train = TrainConfig(
            learning_rate=2e-5,
            weight_decay=0.1,
            warmup_steps=2,
            schedule="cosine",
            updates_per_step=self.updates,
        )
        algorithm = AlgorithmConfig.model_validate(self.algorithm)
        options = {"total_steps": STEPS, "seed": 0, "algorithm": algorithm}
        return (model, train), options


CASES = {
    "tensor": Case("qwen2", tied=False, tensor=2, pipeline=1),
    "pipeline": Case("qwen3", tied=True, tensor=1, pipeline=2, algorithm=EVERYTHING, updates=2),
    "data": Case(
        "llama", tied=False, tensor=1, pipeline=1, algorithm=PENALIZED, gradient_checkpointing=True
    ),
}
MORE_CASES = {
    # The reference's scores are known only to the last stage, yet they
    # also enter the critic's targets.
    "critic of stages": Case(
        *("qwen3", False, 1, 2),
        algorithm={"advantage": GAE, "kl": {"kind": "reward", "coefficient": 0.1}},
    ),
    # Each step has an answer that the reference scores but that is left out of the update.
    "left out of stages": Case("qwen2", tied=False, tensor=1, pipeline=2, algorithm=LEAVES_OUT),
    "left out": Case("qwen2", tied=False, tensor=1, pipeline=1, algorithm=LEAVES_OUT),
    "critic of tensor": Case(
        "llama", tied=True, tensor=2, pipeline=1, algorithm={"advantage": GAE}, updates=2
    ),
    "critic of data": Case("qwen2", tied=True, tensor=1, pipeline=1, algorithm={"advantage": GAE}),
}
CASES_OF_FOUR = {
    "tensor and pipeline": Case("qwen3", tied=True, tensor=2, pipeline=2, updates=2, ranks=4),
    "tensor and data": Case(
        "llama", tied=False, tensor=2, pipeline=1, algorithm=EVERYTHING, ranks=4
    ),
    "pipeline and data": Case(
        "qwen2", tied=True, tensor=1, pipeline=2, algorithm=PENALIZED, ranks=4
    ),
    "critic of stages and data": Case(
        "llama", tied=False, tensor=1, pipeline=2, algorithm={"advantage": GAE}, ranks=4
    ),
}


@dataclass(frozen=True)
class Part:
    """The work of one start of the processes."""

    ranks: int
    cases: dict[str, Case]
    resumed: tuple[str, ...] = ()
    """Cases that are interrupted and resumed."""
    one_rank: bool = False
    """Whether to compare one rank's results with transformers, and to check the refusals."""


PARTS = {
    "two": Part(2, CASES, RESUMED, one_rank=True),
    "more": Part(2, MORE_CASES, RESUMED_OF_MORE),
    "four": Part(4, CASES_OF_FOUR, RESUMED_BY_FOUR),
}


def make_model(folder: Path, family: str, *, tied: bool) -> Path:
    """A random model whose heads, layers and vocabulary two ranks can share."""
    configuration, architecture = FAMILIES[family]
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 258,
        "initializer_range": 0.1,
    }
    if family != "qwen2":
        shape["head_dim"] = 16  # Not hidden_size / num_attention_heads.
    if family == "llama":
        shape["rope_parameters"] = LLAMA3_ROPE
    torch.manual_seed(len(family) + tied)
    model = architecture(configuration(**shape))
    if family == "qwen2":
        # transformers initializes biases to zero.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


def train_default(case: Case, folder: Path) -> dict[str, Any]:
    """Train the default policy for ten steps on its own samples; keep
    the plans for the other runs."""
    arguments, options = case.policy_arguments(folder, megatron=False)
    policy = FsdpPolicy(*arguments, **options)
    objective, rng = Objective(options["algorithm"]), np.random.default_rng(0)
    plans, results = [], []
    for _ in range(STEPS):
        plan = plan_step(
            roll_out(policy, rng),
            objective,
            token_budget=60,
            update_count=case.updates,
            ranks=case.ranks // (case.tensor * case.pipeline),
        )
        plans.append(plan)
        results.append(numbers(policy.step(plan)))
    torch.save(plans, folder / "plans")
    save_file(copied(policy), folder / "trained.safetensors")
    return {"results": results}


def numbers(result: Any) -> dict[str, float]:
    names = ("loss", "grad_norm", "learning_rate", "entropy", "kl_reference", "clip_fraction")
    critic = ("critic_loss", "critic_explained_variance")
    return {name: getattr(result, name) for name in (*names, *critic)}


def share(plan: StepPlan, policy: Any, rank: int) -> StepPlan:
    return plan.share(policy.data_rank(rank), policy.data_ranks)


def train_megatron(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """Train the same steps on the case's layout."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    arguments, options = case.policy_arguments(folder, megatron=True)
    policy = MegatronPolicy(*arguments, **options)
    untrained = copied(policy)
    plans: list[StepPlan] = torch.load(folder / "plans", weights_only=False)
    begun = time.perf_counter()
    results = [numbers(policy.step(share(plan, policy, rank))) for plan in plans]
    seconds = time.perf_counter() - begun
    trained = copied(policy)
    policy.save_model(folder / "exported")
    if rank:
        assert not trained
        return {}
    return {
        "results": results,
        "untrained": bitwise(untrained, load_file(folder / "model.safetensors")),
        "weights": distance(trained, load_file(folder / "trained.safetensors")),
        "moved": distance(trained, untrained),
        "exported": bitwise(trained, load_file(folder / "exported" / "model.safetensors")),
        "seconds_per_step": seconds / STEPS,
    }


def copied(policy: Any) -> dict[str, Tensor]:
    """A copy of the policy's current weights, which are live."""
    return {name: tensor.clone() for name, tensor in policy.weights()}


def bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return set(found) == set(expected) and all(
        torch.equal(t, expected[name]) for name, t in found.items()
    )


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) == set(expected)
    return max(float((t - expected[name]).abs().max()) for name, t in found.items())


def compare_logits(folder: Path, family: str, *, tied: bool) -> dict[str, Any]:
    """Compare one rank's logits, export and score with those of transformers."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    case = Case(family, tied, 1, 1)
    make_model(folder, family, tied=tied)
    arguments, options = case.policy_arguments(folder, megatron=True)
    policy = MegatronPolicy(*arguments, **options)
    reference = FAMILIES[family][1].from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(1))
    stage = policy._stage
    positions = torch.arange(40).expand(2, 40)
    stage._rotary.positions_BT, stage._sources_M = positions, None
    with torch.no_grad():
        logits = stage.module(input_ids=ids, position_ids=positions, attention_mask=None)
        expected = reference(input_ids=ids).logits
    weights = dict(policy.weights())
    scored = torch.log_softmax(expected[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
    score = torch.from_numpy(policy.score(weights, ids[0].tolist()))
    return {
        "logits": float((logits[..., :VOCABULARY] - expected).abs().max()),
        "bitwise": bitwise(weights, load_file(folder / "model.safetensors")),
        "score": float((score - scored).abs().max()),
    }


def save_and_resume(case: Case, folder: Path) -> dict[str, Any]:
    """On one rank, train half the steps, save a checkpoint and train the rest. Then repeat the rest
    with another policy that loads the checkpoint."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    arguments, options = case.policy_arguments(folder, megatron=True, alone=True)
    plans: list[StepPlan] = torch.load(folder / "plans", weights_only=False)
    first = MegatronPolicy(*arguments, **options)
    empty = folder / "empty"
    empty.mkdir()
    first.save(empty)
    for plan in plans[: STEPS // 2]:
        first.step(plan)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    first.save(checkpoint)
    rest = [numbers(first.step(plan)) for plan in plans[STEPS // 2 :]]
    second = MegatronPolicy(*arguments, **options)
    second.load(checkpoint)
    again = [numbers(second.step(plan)) for plan in plans[STEPS // 2 :]]
    trained, same = copied(first), copied(second)
    save_file(trained, folder / "resumed.safetensors")
    # A step with a non-finite gradient changes nothing, and the next step is unaffected.
    (update,) = plans[0].updates[:1]
    broken = [
        replace(b, behaviour_logprobs_N=b.behaviour_logprobs_N * torch.nan) for b in update.batches
    ]
    unfit = replace(plans[0], updates=(replace(update, batches=tuple(broken)),))
    refused = second.step(unfit)
    stayed = not refused.applied and bitwise(copied(second), same)
    second.load(empty)
    begun = second.step(plans[0]).learning_rate
    stayed = stayed and second.step(plans[1]).applied
    # The configuration overrides the optimizer settings stored in a checkpoint.
    model, train = arguments
    changed = train.model_copy(update={"betas": (0.5, 0.75), "epsilon": 1e-6})
    third = MegatronPolicy(model, changed, **options)
    third.load(checkpoint)
    third.step(plans[0])
    return {
        "settings": [(*group["betas"], group["eps"]) for group in third._optimizer.param_groups],
        "stayed": stayed,
        "rest": rest,
        "exact": again == rest and bitwise(same, trained),
        "begun anew": begun,
    }


def train_rounded(case: Case, folder: Path) -> dict[str, Any]:
    """On one rank, in bfloat16: train some steps and save a checkpoint. Then take one more step
    with this policy and with one that loaded the checkpoint."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    (model, train), options = case.policy_arguments(folder, megatron=True, alone=True)
    model = model.model_copy(update={"dtype": "bfloat16"})
    plans: list[StepPlan] = torch.load(folder / "plans", weights_only=False)
    first, second = (MegatronPolicy(model, train, **options) for _ in range(2))
    untrained = copied(first)
    results = [numbers(first.step(plan)) for plan in plans[:3]]
    checkpoint = folder / "rounded"
    checkpoint.mkdir()
    first.save(checkpoint)
    second.load(checkpoint)
    return {
        "untrained": bitwise(untrained, load_file(folder / "model.safetensors")),
        "results": results,
        "exact": numbers(first.step(plans[3])) == numbers(second.step(plans[3]))
        and bitwise(copied(first), copied(second)),
    }


def resume_elsewhere(case: Case, folder: Path, rank: int) -> dict[str, Any]:
    """On several ranks, train the remaining steps from the checkpoint of one rank."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    arguments, options = case.policy_arguments(folder, megatron=True)
    policy = MegatronPolicy(*arguments, **options)
    policy.load(folder / "checkpoint")
    loaded = copied(policy)
    plans: list[StepPlan] = torch.load(folder / "plans", weights_only=False)
    results = [numbers(policy.step(share(p, policy, rank))) for p in plans[STEPS // 2 :]]
    trained = copied(policy)
    # Several ranks can also load a checkpoint that several ranks saved.
    if rank == 0:
        (folder / "of-all").mkdir()
    distributed.barrier()
    policy.save(folder / "of-all")
    policy.load(folder / "of-all")
    again = dict(policy.weights())
    if rank:
        return {}
    return {
        "loaded": bitwise(loaded, load_file(folder / "checkpoint" / "model.safetensors")),
        "results": results,
        "weights": distance(trained, load_file(folder / "resumed.safetensors")),
        "kept": bitwise(again, trained),
    }


def refusals(folder: Path) -> dict[str, str]:
    """The errors for models that these ranks cannot share, or that the backend cannot compute."""
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    said: dict[str, str] = {}
    for name, changes, sizes in (
        ("heads", {"num_attention_heads": 3, "num_key_value_heads": 1}, (2, 1)),
        ("layers", {"num_hidden_layers": 3, "layer_types": None}, (1, 2)),
        ("ranks", {}, (3, 1)),
        ("vocabulary", {"vocab_size": 1}, (2, 1)),
        ("kind", {"model_type": "gpt2"}, (2, 1)),
        ("rope", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, (2, 1)),
    ):
        changed = folder / name
        changed.mkdir(exist_ok=True)
        document = json.loads((folder / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**document, **changes}))
        case = Case("qwen3", True, *sizes)
        arguments, options = case.policy_arguments(changed, megatron=True)
        try:
            MegatronPolicy(*arguments, **options)
        except ConfigInvalid as error:
            said[name] = str(error)
        forget_layout()
    return said


def forget_layout() -> None:
    """Destroy the layout, so that the next policy can divide the ranks differently."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def main(folder: Path, part: Part) -> int:
    """Run the part on its ranks; return 0 if each has done its work."""
    megatron_hook.install()
    torch.set_num_threads(1)
    from penstock.trainer.policy.megatron.policy import MegatronPolicy

    assert MegatronPolicy, "loaded once for all ranks"
    running = {fork(folder, rank, part) for rank in range(part.ranks)}
    failed = 0
    while running:
        pid, status = os.wait()
        running.remove(pid)
        if status and not failed:
            failed = 1
            # The others would wait for it forever.
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


def fork(folder: Path, rank: int, part: Part) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        end_with_parent()
        work(folder, rank, part)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def work(folder: Path, rank: int, part: Part) -> None:
    cases, resumed, ranks = part.cases, part.resumed, part.ranks
    found: dict[str, Any] = {"default": {}, "logits": {}}
    if rank == 0:
        for name, case in cases.items():
            make_model(folder / name, case.family, tied=case.tied)
            found["default"][name] = train_default(case, folder / name)
        for name in resumed:
            found[f"alone {name}"] = save_and_resume(cases[name], folder / name)
        if part.one_rank:
            for family in FAMILIES:
                for tied in (True, False):
                    name = f"{family}-{tied}"
                    found["logits"][name] = compare_logits(folder / name, family, tied=tied)
            found["rounded"] = train_rounded(CASES["tensor"], folder / "tensor")
        if distributed.is_initialized():
            forget_layout()
            distributed.destroy_process_group()
    store = distributed.FileStore(str(folder / "store"), ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    tasks: list[tuple[str, Callable[[], Any]]] = [
        *(
            (name, lambda name=name, case=case: train_megatron(case, folder / name, rank))
            for name, case in cases.items()
        ),
        *(
            (
                f"resumed {name}",
                lambda name=name: resume_elsewhere(cases[name], folder / name, rank),
            )
            for name in resumed
        ),
    ]
    if part.one_rank:
        tasks.append(("refusals", lambda: refusals(folder / "pipeline")))
    for name, task in tasks:
        begun = time.perf_counter()
        found[name] = task()
        forget_layout()
        sys.stderr.write(f"{name}: {time.perf_counter() - begun:.1f} s\n")
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), PARTS[sys.argv[2]]))
