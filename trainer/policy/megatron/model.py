"""A Hugging Face model computed by megatron-core, on one rank of a layout.

The layers are megatron-core's own, in its local specification, which needs neither Transformer Engine nor
apex. Two parts are replaced: attention uses torch's kernels, which support the masks of prefix trees and
keep no T x T matrix, and rotary angles are computed from explicit positions, because those of a tree are
not 0, 1, 2, ... Suffixes as in `batching`. Import it only after `hook.install`.
"""
# ruff: noqa: N806 - a name ends with its dimensions.

from __future__ import annotations

from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.trainer.batching.batching import MicroBatch
from penstock.trainer.config.trainer import ModelConfig
from penstock.trainer.policy.loading import compute_dtype
from penstock.trainer.policy.megatron.description import Description
from penstock.trainer.policy.megatron.layout import Layout
from penstock.trainer.policy.megatron.names import Cut, Shape, held_entries, local_name


def transformer_config(
    description: Description, model: ModelConfig, layout: Layout
) -> TransformerConfig:
    """Translate the description to megatron-core's configuration."""
    facts, shape = description.config, description.shape
    dtype = compute_dtype(model, layout.device)
    recomputed: dict[str, object] = {}
    if model.gradient_checkpointing:
        recomputed = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return cast("Any", TransformerConfig)(
        **recomputed,
        num_layers=shape.layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.intermediate_size,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=facts.rms_norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_ranks,
        pipeline_model_parallel_size=layout.stages,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights are loaded from files.
        perform_initialization=False,
        use_cpu_initialization=layout.device.type == "cpu",
        # These need Transformer Engine or apex.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        # These need torch.compile.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        # Micro-batches differ in shape. The dispatcher must allow that, although there are no experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Losses already include their denominators: gradients are summed and never divided.
        calculate_per_token_loss=True,
    )


class StageModel:
    """This rank's part of a model, and its computation of a micro-batch."""

    def __init__(self, description: Description, config: TransformerConfig, layout: Layout) -> None:
        """The weights are uninitialized."""
        shape = description.shape
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=shape.qk_norm)
        cast("Any", spec.submodules).self_attention.submodules.core_attention = TorchAttention
        padded = -(-shape.vocabulary // layout.tensor_ranks) * layout.tensor_ranks
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded,
            max_sequence_length=description.config.max_position_embeddings,
            pre_process=layout.stage == 0,
            post_process=layout.is_last_stage,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope",
        )
        self._rotary = RotaryAngles(description, layout.device)
        setattr(gpt, "rotary_pos_emb", self._rotary)  # noqa: B010 - the declared class differs.
        self._sources_M: Tensor | None = None
        if layout.is_last_stage:
            gpt.output_layer.register_forward_pre_hook(self._select_positions)
        own = padded // layout.tensor_ranks
        self.first_token = own * layout.tensor
        """The first vocabulary token whose logits this rank computes."""
        self._tokens = max(0, min(own, shape.vocabulary - self.first_token))
        self.layout = layout
        _mark_parts(gpt, shape, layout)
        self.config = config
        self.gpt: nn.Module = gpt.to(layout.device)
        """The model with megatron-core's own parameter names."""
        self.module: nn.Module = Float16Module(config, gpt) if config.bf16 else self.gpt
        """The module to wrap and call."""

    def forward(self, module: nn.Module, batch: MicroBatch) -> Tensor:
        """Compute this stage's output for a micro-batch; `module` is `self.module`, perhaps wrapped.

        The last stage returns logits at each distinct prediction for this rank's vocabulary tokens.
        Their shape is [M, V / tensor_ranks], or less if some tokens are padding. Earlier stages
        return hidden states of shape [T, B, H].
        """
        device = self.layout.device
        self._rotary.positions_BT = batch.positions_BT.to(device)
        self._sources_M = batch.sources_M.to(device)
        mask = batch.attention_mask()
        output = cast(
            "Tensor",
            module(
                input_ids=batch.token_ids_BT.to(device),
                position_ids=batch.positions_BT.to(device),
                attention_mask=None if mask is None else mask.to(device),
            ),
        )
        return output.squeeze(0)[:, : self._tokens] if self.layout.is_last_stage else output

    def _select_positions(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keep only the positions that predict a trained token. A hook before the output layer."""
        if self._sources_M is None:
            return inputs
        hidden_BTH = inputs[0].transpose(0, 1)
        return (hidden_BTH.flatten(0, 1)[self._sources_M].unsqueeze(1),)


def _mark_parts(gpt: nn.Module, shape: Shape, layout: Layout) -> None:
    """Mark each parameter that is a part of a larger one, as megatron-core does if it initializes them.
    Without the mark, the gradient norm would omit the other ranks' parts."""
    mark = cast("Any", tensor_parallel).set_tensor_model_parallel_attributes
    parameters = dict(gpt.named_parameters())
    for entry in held_entries(shape, layout.stage, layout.stages):
        parameter = parameters[local_name(entry, shape, layout.stages)]
        if entry.cut is not Cut.WHOLE and not hasattr(parameter, "tensor_model_parallel"):
            mark(parameter, True, 1 if entry.cut is Cut.COLUMNS else 0, 1)


class TorchAttention(nn.Module):
    """Attention with torch's kernels, causal or with a mask. Replaces megatron-core's."""

    def __init__(self, *, config: TransformerConfig, **unused: object) -> None:
        super().__init__()
        self._grouped = config.num_query_groups != config.num_attention_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **unused: object,
    ) -> Tensor:
        """Attend with inputs of shape [T, B, heads or groups of this rank, head_dim].

        Returns shape [T, B, heads x head_dim]. The mask is true where a row attends to a column;
        None is causal.
        """
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        seen = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            enable_gqa=self._grouped,
        )
        return seen.permute(2, 0, 1, 3).flatten(2)


class RotaryAngles(nn.Module):
    """Rotary angles of explicit positions. Replaces megatron-core's, which counts positions."""

    def __init__(self, description: Description, device: torch.device) -> None:
        super().__init__()
        rope = description.config.rope_parameters
        kind = str(rope.get("rope_type", "default"))
        if kind == "default":
            size = description.shape.head_dim
            powers = torch.arange(0, size, 2, dtype=torch.int64).float() / size
            frequencies_D = 1.0 / (cast("float", rope["rope_theta"]) ** powers)
        else:
            initialize = cast("Any", ROPE_INIT_FUNCTIONS[kind])
            frequencies_D, _ = initialize(description.config, torch.device("cpu"))
        # Not a buffer, because bfloat16 would round it.
        self._frequencies_D = frequencies_D.float().to(device)
        self.positions_BT: Tensor | None = None
        """Positions of the next micro-batch."""

    def get_rotary_seq_len(self, *unused: object, **also_unused: object) -> int:
        """Return a dummy length. megatron-core asks for it before the angles."""
        return 0

    def forward(self, *unused: object, **also_unused: object) -> Tensor:
        """Compute the angles of every position, shape [T, B, 1, head_dim]."""
        if self.positions_BT is None:
            raise RuntimeError("no positions were set before the forward pass")
        half_TBD = self.positions_BT.T.float().unsqueeze(-1) * self._frequencies_D
        return torch.cat((half_TBD, half_TBD), dim=-1).unsqueeze(2)
