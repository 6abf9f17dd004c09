"""The section `[weights]`: how new weights reach the server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.common.section import Section

# Transports that support neither differences nor adapters.
ALWAYS_WHOLE = ("checkpoint", "collective")


class ProbeConfig(Section):
    """A fixed sequence that detects an engine with wrong weights. The trainer scores it with the
    weights it uploads, and the engine scores it once it has loaded them. The sequence is the
    beginning of the first trajectory trained on."""

    tokens: int = Field(default=0, ge=0)
    """Length of the sequence, at least two; zero disables the probe. The trainer's scoring prolongs each
    upload, and needs memory for the weights in float32. The engine's scoring prolongs each switch."""
    tolerance: float = Field(default=0.1, gt=0)
    """Largest allowed mean difference, in nats. It has to cover the rounding of the engine's
    arithmetic, because the trainer scores in float32 with the uploaded, rounded weights. With vLLM
    on a CPU and a model of 135 million parameters, the difference was 0.04 to 0.05 in bfloat16 and
    below 0.0001 in float32. In bfloat16 it varies less with a longer sequence."""

    @field_validator("tokens")
    @classmethod
    def _at_least_two(cls, tokens: int) -> int:
        if tokens == 1:
            raise ValueError("must be 0 or at least 2: the first token is not scored")
        return tokens


class CollectiveConfig(Section):
    """How this process and the engine's workers form a group, and the settings they must share."""

    backend: Literal["gloo", "nccl", "ipc", "sparse_nccl"] = "nccl"
    """vLLM's weight transfer engine; "gloo" is Penstock's own, for CPUs. "sparse_nccl" sends only
    the elements that changed, except that the first version and each anchor are sent whole."""
    master_address: str = "127.0.0.1"
    """Address of this host, as the engine's workers reach it."""
    master_port: int = Field(default=0, ge=0, le=65_535)
    """Port at which the group meets; zero for a free one."""
    world_size: int = Field(default=2, ge=2)
    """Number of members: this process and every worker of the engine."""
    bucket_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Size of one broadcast in bytes."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for joining, and for each step of an upload."""


class WeightsConfig(Section):
    """How new weights reach the server."""

    transport: Literal["auto", "shared_memory", "stream", "checkpoint", "collective"] = "auto"
    """How weights reach the server. "shared_memory" needs a server on the same host. "stream" works
    with any server. "checkpoint" writes a folder below `run.out`, which the server must see under
    the same path. "collective" is a group that this process and the engine's workers join. "auto"
    is shared memory if the server can read it, otherwise the stream."""
    collective: CollectiveConfig = CollectiveConfig()
    """Settings of transport "collective"."""
    keep: int = Field(default=2, ge=1)
    """Number of newest versions that transport "checkpoint" keeps in `run.out`/weights. The version
    being sampled always stays."""
    delta: Literal["auto", "on", "off"] = "auto"
    """Whether only changes are sent, at the price of a second copy of the weights in memory. "auto"
    is on for the stream and off for shared memory. A checkpoint is always whole."""
    anchor_every: int = Field(default=50, ge=1)
    """Every this many versions, one is sent whole even if differences are on; one sends all whole."""
    probe: ProbeConfig = ProbeConfig()
    """Check that the engine computes with the weights it was given."""
    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """How turns in flight are treated at a switch."""

    @model_validator(mode="after")
    def _transport_allows_the_rest(self) -> WeightsConfig:
        patches = self.transport == "collective" and self.collective.backend == "sparse_nccl"
        if self.transport in ALWAYS_WHOLE and self.delta == "on" and not patches:
            raise ValueError(f'delta = "on" cannot be combined with transport = "{self.transport}"')
        # Defaults are accepted: a rendered configuration contains all of them.
        for name, transport in (("keep", "checkpoint"), ("collective", "collective")):
            default = type(self).model_fields[name].default
            if self.transport != transport and getattr(self, name) != default:
                raise ValueError(
                    f'{name} means nothing with transport = "{self.transport}": it belongs to "{transport}"'
                )
        return self
