"""A model's adapter, computed by PEFT, and its names on the wire and in files.

PEFT inserts the adapter's name, "default", into parameter names. Files and the wire omit it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from penstock.trainer.config.trainer import LoraConfig
from penstock.trainer.core.errors import CheckpointUnusable, ConfigInvalid
from penstock.trainer.policy.sharding import overwrite
from penstock.v1 import weights_pb2

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INFIX = ".default."


class Adapter:
    """A low-rank adapter around a model whose own weights are frozen."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        """Raises ConfigInvalid if the model has no such layers."""
        import peft

        targets = config.target_modules
        described = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=config.rank,
            # PEFT accepts any number, but declares integers.
            lora_alpha=cast("int", config.alpha),
            lora_dropout=config.dropout,
            target_modules=targets if isinstance(targets, str) else list(targets),
            use_rslora=config.rank_stabilized,
        )
        try:
            self.model: nn.Module = cast("Any", peft).get_peft_model(model, described)
        except ValueError as error:
            raise ConfigInvalid(f"model.lora: {error}") from error
        self._config = config
        self._names = {
            name: name.replace(INFIX, ".")
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def message(self) -> weights_pb2.LoraAdapter:
        targets = self._config.target_modules
        if targets == "all-linear":
            # base_model.model.<path>.<layer>.lora_A.weight
            targets = sorted({name.split(".")[-3] for name in self._names.values()})
        return weights_pb2.LoraAdapter(
            rank=self._config.rank,
            alpha=self._config.alpha,
            target_modules=targets,
            rank_stabilized=self._config.rank_stabilized,
        )

    def switched_off(self) -> contextlib.AbstractContextManager[None]:
        return cast("Any", self.model).disable_adapter()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor of the adapter, live, in a fixed order."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield self._names[name], parameter.detach()

    def own_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors under the names they have in the model."""
        return {own: tensors[name] for own, name in self._names.items()}

    def load(self, folder: Path) -> None:
        """Loads what PEFT wrote to `folder`. Raises CheckpointUnusable if it is a different adapter."""
        try:
            written = cast("dict[str, object]", json.loads((folder / CONFIG_FILE).read_text()))
        except FileNotFoundError as error:
            message = f"{folder} belongs to a run that trained all weights"
            raise CheckpointUnusable(message) from error
        config = self._config
        for key, own in (
            ("r", config.rank),
            ("lora_alpha", config.alpha),
            ("use_rslora", config.rank_stabilized),
        ):
            if written.get(key) != own:
                raise CheckpointUnusable(
                    f"{folder}: {key} is {written.get(key)}, but the configuration has {own}"
                )
        tensors = load_file(folder / WEIGHTS_FILE)
        if missing := set(self._names.values()) ^ set(tensors):
            raise CheckpointUnusable(f"{folder}: {min(missing)} is on one side only")
        for name, own in self.weights():
            overwrite(own, tensors[name])


def check_taken(adapter: weights_pb2.LoraAdapter, max_rank: int | None) -> None:
    """Raises ConfigInvalid if a server refuses this adapter; `max_rank` is None if it takes none."""
    if max_rank is None:
        raise ConfigInvalid(
            "model.lora: the server takes no adapters; start it, or a hub's engine servers, with "
            f"--enable-lora --max-lora-rank {adapter.rank}"
        )
    if adapter.rank > max_rank:
        raise ConfigInvalid(
            f"model.lora.rank: the server takes at most {max_rank}, its --max-lora-rank, "
            f"got {adapter.rank}"
        )
