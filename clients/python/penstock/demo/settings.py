"""What the demo runs: model and task sizes, threads of each process, and the three commands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import tomli_w

from penstock.machine.processor import cores
from penstock.up.cast import ENVIRONMENT, penstock
from penstock.up.placement import share_devices

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.up.supervisor import Listens

SUMS = "sums"
"""The task's name on the command line: "What is a + b?", with a and b from 1 to 20."""

PRINTABLE = "printable"
"""The reward is the share of printable characters: one of the few things that random weights can learn."""

# Server and trainer share few cores. The server samples in small steps that gain little from a second
# thread. With a small model it is idle long before the trainer, which may use all the cores.
SERVER_THREADS = 1
TRAINER_THREADS = max(1, int(cores()))

SHARED_GPU = 0.4
"""The server's share of a GPU's memory, if the trainer computes on the same one."""

TARGET = 0.8
"""Mean reward at which a run on `sums` ends."""

TARGET_STEPS = 4
"""Steps over which the reward is averaged for the target."""

PATIENCE_SECONDS = 600
"""How long trainer and worker wait for a restarted server; loading a model takes a while."""

PROBE_TOLERANCE = 1e-3
"""In nats, for float32 on both sides."""

LORA_RANK = 8
LORA_ALPHA = 16.0


@dataclass(frozen=True)
class Scale:
    """Sizes that suit a model and a task."""

    steps: int
    """Optimizer steps; the command line can override them."""
    groups_per_step: int
    """Prompts in one step."""
    group_size: int
    """Answers to each prompt."""
    max_tokens: int
    max_model_len: int
    """Maximum tokens in prompt and answer together."""
    learning_rate: float
    lora_learning_rate: float
    """The same for an adapter: it has far fewer parameters, so each must move further."""
    warmup_steps: int
    max_lag: int
    """Maximum versions that a trained token may lag behind."""
    dtype: str | None = None
    """Of the server's weights and the trainer's arithmetic; None picks what is fast on this machine."""
    probe_tokens: int = 0
    """Length of the probe sequence that verifies each version on the engine; zero disables the probe."""
    kv_cache_bytes: int | None = None
    """Memory that the engine reserves for its cache; None leaves it to `penstock serve`."""

    @property
    def attempts_in_flight(self) -> int:
        """Attempts that the rollout worker runs at once: the answers of one step."""
        return self.groups_per_step * self.group_size


SMALL_MODEL = Scale(
    steps=50,
    groups_per_step=8,
    group_size=8,
    max_tokens=24,
    max_model_len=256,
    # Higher than for other tasks, so that few steps suffice. At 5e-5 the reward rises as fast, but one run
    # fell from 0.8 to 0.3 afterwards, once the policy had hardly any entropy left.
    learning_rate=3e-5,
    lora_learning_rate=4e-4,
    warmup_steps=2,
    max_lag=4,
)
"""SmolLM2-135M-Instruct on sums, or a model of that size given with --model."""

SMALL_MODEL_LONG_TASK = replace(SMALL_MODEL, steps=40, max_tokens=128, max_model_len=1024)
"""The same on a data set of reasoning-gym, whose prompts and answers are longer."""

TINY_MODEL = Scale(
    steps=8,
    groups_per_step=4,
    group_size=4,
    max_tokens=16,
    max_model_len=512,
    dtype="float32",
    learning_rate=1e-2,
    lora_learning_rate=3e-2,
    warmup_steps=0,
    max_lag=4,
    probe_tokens=16,
    # To clear the default of gigabytes takes seconds.
    kv_cache_bytes=64 << 20,
)
"""Random weights, for tests."""


@dataclass(frozen=True)
class Plan:
    """One run of the demo, with every choice made."""

    model: Path
    model_name: str
    """As people are shown it."""
    out: Path
    """Folder for everything the run writes."""
    task: str
    """SUMS, PRINTABLE, or a data set of reasoning-gym."""
    steps: int
    seed: int
    listen: str
    """Address on which the server listens; port 0 picks a free one."""
    scale: Scale
    lora: bool = False
    durability: str = "fsync"
    ranks: int = 1
    backend: str = "fsdp"
    tensor_parallel: int = 1
    """Ranks over which each tensor is split; megatron only."""
    pipeline_parallel: int = 1
    """Ranks over which the layers are divided; megatron only."""
    target: float | None = None
    """Mean reward at which the run ends; None if it takes all its steps."""
    patience: int = 1
    """Steps for which the reward must be at the target."""
    gpus: int = 0
    """GPUs of the machine; zero if server and trainer compute on the CPU."""

    @property
    def shares_gpu(self) -> bool:
        """Whether server and trainer compute on the same GPU."""
        return 0 < self.gpus <= self.ranks

    @property
    def reward(self) -> str:
        names = {SUMS: "last_integer_is_answer", PRINTABLE: "printable_share"}
        return f"penstock.demo.rewards:{names.get(self.task, 'reasoning_gym_score')}"

    @property
    def has_tasks_file(self) -> bool:
        """Whether the task is the demo's own."""
        return self.task in {SUMS, PRINTABLE}

    @property
    def tasks_file(self) -> Path:
        """The prompts, if the task is the demo's own."""
        return self.out / "tasks.jsonl"

    @property
    def trainer_config_file(self) -> Path:
        return self.out / "trainer.toml"


def choose_scale(task: str, *, tiny: bool) -> Scale:
    if tiny:
        return TINY_MODEL
    return SMALL_MODEL if task in {SUMS, PRINTABLE} else SMALL_MODEL_LONG_TASK


def serve_command(plan: Plan, listens: Listens | None) -> tuple[str, ...]:
    """`penstock serve`; a restart listens on the addresses it had before."""
    cache = plan.scale.kv_cache_bytes
    return penstock(
        "serve",
        *("--model", str(plan.model)),
        *(listens.options() if listens else ("--listen", plan.listen)),
        *("--set", f"journal.folder={plan.out / 'journal'}"),
        *("--set", f"journal.durability={plan.durability}"),
        *(("--dtype", plan.scale.dtype) if plan.scale.dtype else ()),
        *(("--gpu-memory-utilization", str(SHARED_GPU)) if plan.shares_gpu else ()),
        *("--max-model-len", str(plan.scale.max_model_len)),
        *("--max-num-seqs", str(plan.scale.attempts_in_flight)),
        *(("--kv-cache-memory-bytes", str(cache)) if cache else ()),
        *(lora_options(plan.scale) if plan.lora else ()),
    )


def lora_options(scale: Scale) -> tuple[str, ...]:
    """Options of a server that accepts adapters."""
    # The new version, plus every older one whose turns may still be trained: none is evicted.
    most = scale.max_lag + 2
    return ("--enable-lora", "--max-lora-rank", str(LORA_RANK), "--max-loras", str(most))


def rollout_command(plan: Plan, address: str) -> tuple[str, ...]:
    return penstock(
        "rollout",
        *("--server", address),
        *("--reward", plan.reward),
        *("--concurrency", str(plan.scale.attempts_in_flight)),
        *("--reconnect-timeout", str(PATIENCE_SECONDS)),
        # Once the trainer has ended, attempts still in flight are of no use.
        *("--drain-timeout", "0"),
    )


def train_command(plan: Plan) -> tuple[str, ...]:
    ranks = ("--ranks", str(plan.ranks)) if plan.ranks > 1 else ()
    return penstock("train", str(plan.trainer_config_file), *ranks)


def target_section(plan: Plan) -> dict[str, object]:
    attempts = TARGET_STEPS * plan.scale.attempts_in_flight
    return {"reward": plan.target, "attempts": attempts, "patience": plan.patience}


def devices(plan: Plan, visible: Sequence[str] | None) -> dict[str, dict[str, str]]:
    """Environment variables that give server and trainer their GPUs, by process; empty on a CPU.

    `visible` are the names of the GPUs to choose from; None means all of the machine.
    """
    if not plan.gpus:
        return {}
    server = SHARED_GPU if plan.shares_gpu else 1
    trainer = 1 - SHARED_GPU if plan.shares_gpu else plan.ranks
    return share_devices({"server": server, "trainer": trainer}, visible)


def environment(threads: int) -> Mapping[str, str]:
    return {
        **ENVIRONMENT,
        "OMP_NUM_THREADS": str(threads),
        "TQDM_DISABLE": "1",
        # The model is a local folder by now; nothing should be looked up on the hub.
        "HF_HUB_OFFLINE": "1",
    }


def trainer_config(plan: Plan, address: str) -> str:
    """The trainer's configuration as TOML."""
    scale = plan.scale
    # The probe of an adapter needs the whole model, which several ranks do not have.
    probe_tokens = 0 if plan.lora and plan.ranks > 1 else scale.probe_tokens
    source: dict[str, object] = (
        {"jsonl": {"path": str(plan.tasks_file)}}
        if plan.has_tasks_file
        else {"reasoning_gym": {"name": plan.task, "seed": plan.seed}}
    )
    adapter = {"lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA}} if plan.lora else {}
    parallel = {
        "tensor_parallel": plan.tensor_parallel,
        "pipeline_parallel": plan.pipeline_parallel,
    }
    divided = {name: size for name, size in parallel.items() if size > 1}
    return tomli_w.dumps(
        {
            "server": {"address": address, "give_up_after_seconds": PATIENCE_SECONDS},
            "run": {
                "id": plan.out.name,
                "out": str(plan.out),
                "steps": plan.steps,
                "seed": plan.seed,
                "save_model": False,
                **({"target": target_section(plan)} if plan.target is not None else {}),
            },
            "model": {
                "path": str(plan.model),
                **({"dtype": scale.dtype} if scale.dtype else {}),
                "threads": max(1, TRAINER_THREADS // plan.ranks),
                "backend": {"kind": plan.backend, **divided} if divided else plan.backend,
                **adapter,
            },
            "data": {
                "group_size": scale.group_size,
                "sampling": {"temperature": 1.0, "max_tokens": scale.max_tokens},
                **source,
            },
            "train": {
                "groups_per_step": scale.groups_per_step,
                "learning_rate": scale.lora_learning_rate if plan.lora else scale.learning_rate,
                "warmup_steps": scale.warmup_steps,
                # Ends with small steps, so that the last rewards show what was learned, not noise.
                "schedule": "cosine",
            },
            "staleness": {"max_lag": scale.max_lag},
            "weights": {"probe": {"tokens": probe_tokens, "tolerance": PROBE_TOLERANCE}},
        }
    )
