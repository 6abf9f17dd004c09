"""The default policy: a Hugging Face causal language model and AdamW.

Of all weights, or of an adapter alone. The one module of the trainer that imports transformers. On one
process the model is held whole: `fully_shard` would add its hooks and shard nothing. Suffixes as in
`batching`.

Order of a step: log-probabilities of the reference and values of the critic, where the objective has them
-> advantages, where they wait for these -> log-probabilities of the proximal policy, where a later update
needs them -> per update: forward and backward of each micro-batch, the gradient clipped, the optimizer;
then the same for the critic. A gradient that is zero or not finite moves nothing; the update is over all
the same.

The reference is the model as it was loaded: a copy of its own, which no checkpoint holds, because it
can be loaded again; or the model itself without its adapter.
"""
# ruff: noqa: N806, N815 - a name ends with its dimensions.

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from penstock.trainer.adapter import CONFIG_FILE, Adapter
from penstock.trainer.algorithm_config import AlgorithmConfig
from penstock.trainer.algorithms.batches import Sequences, StepCounts
from penstock.trainer.algorithms.objective import Figures, Objective, PolicyOutput
from penstock.trainer.batching import MicroBatch
from penstock.trainer.config import ModelConfig, TrainConfig
from penstock.trainer.critic import Critic, Lesson
from penstock.trainer.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.optimizer_state import load_optimizer, optimizer_tensors
from penstock.trainer.planning import StepPlan, complete
from penstock.trainer.policy import StepResult, describe_step
from penstock.trainer.random_states import (
    compute_reproducibly,
    load_random_states,
    save_random_states,
    seed_all,
)
from penstock.trainer.token_model import CausalModel, Output, TokenModel
from penstock.v1 import weights_pb2

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.safetensors"
PROGRESS_FILE = "optimizer.json"
DEFAULT_ALGORITHM = AlgorithmConfig()


class _Tokenizer(Protocol):
    def save_pretrained(self, folder: Path) -> None: ...


class _Loader(Protocol):
    def from_pretrained(self, path: str, **options: object) -> object: ...


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A micro-batch, and what other weights than the current say of its tokens; None where nobody asks."""

    batch: MicroBatch
    proximal_N: Tensor | None
    reference_N: Tensor | None
    lesson: Lesson | None


class FsdpPolicy:
    """A model with float32 master weights, and its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        *,
        total_steps: int,
        seed: int,
        algorithm: AlgorithmConfig = DEFAULT_ALGORITHM,
    ) -> None:
        """Raises ConfigInvalid."""
        seed_all(seed)
        compute_reproducibly()
        self._objective = Objective(algorithm)
        loaded, self._tokenizer = _load(model.path)
        autocast = model.dtype == "bfloat16"
        self._reference: TokenModel | None = None
        if self._objective.needs_reference and model.lora is None:
            self._reference = _frozen(copy.deepcopy(loaded), autocast=autocast)
        self._critic: Critic | None = None
        if self._objective.critic is not None:
            own = copy.deepcopy(loaded)
            if model.gradient_checkpointing:
                own.gradient_checkpointing_enable()
            self._critic = Critic(own, self._objective.critic, train, autocast=autocast)
        self._tokens = TokenModel(loaded, autocast=autocast)
        if model.gradient_checkpointing:
            loaded.gradient_checkpointing_enable()
            if model.lora is not None:
                # Otherwise nothing that is recomputed seems to need a gradient.
                loaded.enable_input_require_grads()
        self._adapter: Adapter | None = None
        if model.lora is not None:
            self._adapter = Adapter(self._tokens.module, model.lora)
            self._tokens.model = cast("CausalModel", self._adapter.model)
        self._module = self._tokens.module
        self._module.train()
        self._train = train
        self._total_steps = total_steps
        self._steps = 0
        self._device = self._tokens.device
        self._optimizer = _optimizer(self._module, train)

    def adapter(self) -> weights_pb2.LoraAdapter | None:
        """What is uploaded of it; see `policy.Policy`."""
        return None if self._adapter is None else self._adapter.message()

    def supports_trees(self) -> bool:
        """Whether the model computes a prefix tree as it computes its sequences one by one."""
        return self._tokens.supports_trees()

    def step(self, plan: StepPlan) -> StepResult:
        """The updates of one step; see `policy.Policy`."""
        if not plan.updates:
            return StepResult(applied=False)
        figures = Figures()
        norms: list[float] = []
        rate, applied, critic_loss = 0.0, 0, 0.0
        plan, prepared = self._prepare(plan)
        for parts, counts in prepared:
            for part in parts:
                figures += self._accumulate(part, counts)
            parameters = self._module.parameters()
            norm = float(nn.utils.clip_grad_norm_(parameters, self._train.max_grad_norm))
            rate = learning_rate(self._steps, self._train, self._total_steps)
            if math.isfinite(norm) and norm > 0.0:
                self._update(rate)
                applied += 1
            self._optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            if self._critic is not None:
                lessons = [part.lesson for part in parts if part.lesson is not None]
                critic_loss += self._critic.learn(lessons, counts)
        result = describe_step(
            figures,
            applied=applied > 0,
            updates=len(norms),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rate,
        )
        if self._critic is None:
            return result
        return replace(
            result,
            critic_loss=critic_loss / len(norms),
            critic_explained_variance=self._objective.explained_variance(plan.rewards),
        )

    def _update(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self._steps += 1

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, list[tuple[list[_Prepared], StepCounts]]]:
        """The plan with its advantages, and what each update needs of weights that are not those it
        computes with."""
        batches = [batch for update in plan.updates for batch in update.batches]
        references: list[Tensor] = []
        values: list[Tensor] = []
        if self._objective.needs_reference:
            references = [self._reference_logprobs(batch) for batch in batches]
        if self._critic is not None:
            values = [self._critic.values(batch) for batch in batches]
        if self._objective.advantages_wait:
            plan = complete(plan, self._objective, references=references, values=values)
        targets_N = torch.from_numpy(  # pyright: ignore[reportUnknownMemberType]
            self._objective.value_targets(plan.rewards)
        )
        prepared: list[tuple[list[_Prepared], StepCounts]] = []
        rest_references, rest_values = iter(references), iter(values)
        for number, update in enumerate(plan.updates):
            # The weights that the first update computes with are the proximal policy's.
            ahead = number > 0 and self._objective.needs_proximal
            parts: list[_Prepared] = []
            for batch in update.batches:
                value_N = next(rest_values, None)
                lesson = None
                if value_N is not None:
                    lesson = Lesson(batch, value_N, targets_N[batch.tokens_N].to(self._device))
                proximal_N = self.logprobs(batch) if ahead else None
                parts.append(_Prepared(batch, proximal_N, next(rest_references, None), lesson))
            prepared.append((parts, update.counts))
        return plan, prepared

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        if self._reference is not None:
            return self._reference.logprobs(batch)
        if self._adapter is None:
            raise RuntimeError("the objective needs no reference")
        with self._adapter.switched_off():
            return self._tokens.logprobs(batch)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Log-probability of each trained token under the current weights, float32, shape [N]."""
        return self._tokens.logprobs(batch)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of an upload; see `policy.Policy`."""
        if self._adapter is not None:
            yield from self._adapter.weights()
            return
        # named_parameters leaves out the second name of a tied tensor, and buffers are not weights.
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()

    def score(self, tensors: Mapping[str, Tensor], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Scores a sequence under given weights; see `policy.Policy`."""
        if self._adapter is not None:
            tensors = self._adapter.own_names(tensors)
        whole = {n: tensor.to(self._device, torch.float32) for n, tensor in tensors.items()}
        ids_1T = torch.tensor([list(token_ids)], device=self._device)
        scored_M = torch.arange(len(token_ids) - 1, device=self._device)
        # Without dropout, as it is sampled.
        with torch.no_grad(), self._tokens.without_dropout(), self._tokens.selecting(scored_M):
            output = cast(
                "Output",
                functional_call(
                    self._module, whole, kwargs={"input_ids": ids_1T, "use_cache": False}
                ),
            )
        logprobs = torch.log_softmax(output.logits.squeeze(0).float(), dim=-1)
        return logprobs.gather(1, ids_1T[0, 1:, None]).squeeze(1).cpu().numpy()

    def save_model(self, folder: Path) -> None:
        """Writes a model folder; see `policy.Policy`."""
        with _as_os_error():
            self._tokens.model.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; see `policy.Policy`."""
        self.save_model(folder)
        tensors = optimizer_tensors(self._module, self._optimizer)
        with _as_os_error():
            save_file(tensors, folder / OPTIMIZER_FILE)
            if self._critic is not None:
                self._critic.save(folder)
            save_random_states(folder)
        progress = {"optimizer_steps": self._steps, "threads": torch.get_num_threads()}
        (folder / PROGRESS_FILE).write_text(json.dumps(progress))

    def load(self, folder: Path) -> None:
        """Restores a checkpoint; see `policy.Policy`."""
        try:
            self._load_weights(folder)
            tensors = load_file(folder / OPTIMIZER_FILE)
            progress = cast(
                "dict[str, int]", json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
            )
            self._steps = progress["optimizer_steps"]
            if progress["threads"] != (threads := torch.get_num_threads()):
                log.warning(
                    "%s was computed with %d threads, this run goes on with %d: "
                    "sums may be rounded otherwise",
                    folder,
                    progress["threads"],
                    threads,
                )
            load_optimizer(self._module, self._optimizer, tensors, folder)
            if self._critic is not None:
                self._critic.load(folder)
            # Last: what was loaded before may have drawn from them.
            load_random_states(folder)
        except (
            ConfigInvalid,
            OSError,
            RuntimeError,
            SafetensorError,
            ValueError,
            KeyError,
        ) as error:
            raise CheckpointUnusable(f"{folder}: {error}") from error

    def _load_weights(self, folder: Path) -> None:
        if self._adapter is not None:
            self._adapter.load(folder)
            return
        if (folder / CONFIG_FILE).exists():
            raise CheckpointUnusable(f"{folder} is of a run with model.lora")
        saved, _ = _load(str(folder))
        self._module.load_state_dict(cast("nn.Module", saved).state_dict())

    def _accumulate(self, part: _Prepared, counts: StepCounts) -> Figures:
        """Forward and backward pass of a micro-batch."""
        batch, device = part.batch, self._device
        output = self._tokens.evaluate(batch, entropy_gradient=self._objective.has_entropy_bonus)
        sequences = Sequences(batch.sequences.index_N.to(device), batch.sequences.count)
        loss, figures = self._objective.evaluate(
            PolicyOutput(
                logprobs_N=output.logprobs_N,
                entropies_N=output.entropies_N,
                behaviour_logprobs_N=batch.behaviour_logprobs_N.to(device),
                proximal_logprobs_N=part.proximal_N,
                reference_logprobs_N=part.reference_N,
                advantages_N=batch.advantages_N.to(device),
                sequences=sequences,
            ),
            counts,
        )
        torch.autograd.backward(loss)
        return figures


def learning_rate(step: int, train: TrainConfig, total_steps: int) -> float:
    """Learning rate of the optimizer update after `step` others: linear warm-up, then the
    schedule."""
    warmup = train.warmup_steps * train.updates_per_step
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    if train.schedule == "constant":
        return train.learning_rate
    rest = max(1, total_steps * train.updates_per_step - warmup)
    done = min(1.0, (step - warmup) / rest)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def _frozen(model: CausalModel, *, autocast: bool) -> TokenModel:
    """A model that nothing trains."""
    tokens = TokenModel(model, autocast=autocast)
    tokens.module.eval().requires_grad_(False)
    return tokens


def _load(path: str) -> tuple[CausalModel, _Tokenizer]:
    # Its bars would run through the live table.
    transformers_logging.disable_progress_bar()
    try:
        model = cast("_Loader", AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32)
        tokenizer = cast("_Loader", AutoTokenizer).from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"model.path: cannot load {path!r}: {error}") from error
    return cast("CausalModel", model), cast("_Tokenizer", tokenizer)


@contextlib.contextmanager
def _as_os_error() -> Generator[None]:
    """Safetensors has an error of its own for a disk that is full."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _optimizer(module: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": train.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.epsilon,
        fused=True,
    )
