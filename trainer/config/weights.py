"""The section `[weights]`: how new weights reach the server."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.common.section import Section

# Transports that know neither differences nor adapters.
ALWAYS_WHOLE = ("checkpoint", "collective")


class ProbeConfig(Section):
    """A fixed sequence, scored by the trainer with the weights it uploads and by the engine once it has
    loaded them. It is the beginning of the first trajectory trained on."""

    tokens: int = Field(default=0, ge=0)
    """Length of the sequence, at least two; zero for no probe. Each upload takes longer by the trainer's
    scoring, and needs memory for the weights in float32 meanwhile; each switch by the engine's."""
    tolerance: float = Field(default=0.1, gt=0)
    """Largest mean difference allowed, in nats. The trainer scores in float32, with the weights rounded
    as they are uploaded, so it has to cover what the engine's own arithmetic rounds: with vLLM on a CPU
    and a model of 135 million parameters 0.04 to 0.05 in bfloat16, which varies less the longer the
    sequence, and less than 0.0001 in float32."""

    @field_validator("tokens")
    @classmethod
    def _at_least_two(cls, tokens: int) -> int:
        if tokens == 1:
            raise ValueError("must be 0 or at least 2: the first token is not scored")
        return tokens


class CollectiveConfig(Section):
    """How this process and the engine's workers meet, and what they have to agree on."""

    backend: Literal["gloo", "nccl", "ipc", "sparse_nccl"] = "nccl"
    """vLLM's weight transfer engine; "gloo" is Penstock's own, for CPUs. "sparse_nccl" sends the elements
    that changed, and every one in the first version and in an anchor."""
    master_address: str = "127.0.0.1"
    """Of this host, as the engine's workers reach it."""
    master_port: int = Field(default=0, ge=0, le=65_535)
    """Where they meet; zero takes a free one."""
    world_size: int = Field(default=2, ge=2)
    """This process and every worker of the engine."""
    bucket_bytes: int = Field(default=64 * 1024 * 1024, ge=1)
    """Length of one broadcast."""
    timeout_seconds: float = Field(default=300.0, gt=0)
    """Longest time that joining takes, and each step of an upload."""


class WeightsConfig(Section):
    """How new weights reach the server."""

    transport: Literal["auto", "shared_memory", "stream", "checkpoint", "collective"] = "auto"
    """Shared memory, for a server on the same host; the stream, for any; a checkpoint, a folder below
    `run.out` that the server sees under the same path; or a collective that this process and the engine's
    workers join. "auto" is shared memory where the server can read it and the stream otherwise."""
    collective: CollectiveConfig = CollectiveConfig()
    """Where transport "collective" meets."""
    keep: int = Field(default=2, ge=1)
    """Newest versions that transport "checkpoint" keeps in `run.out`/weights; the one being sampled
    always stays."""
    delta: Literal["auto", "on", "off"] = "auto"
    """Whether only what changed is sent, at the price of a second copy of the weights in memory. "auto"
    is on for the stream and off for shared memory. A checkpoint is always whole."""
    anchor_every: int = Field(default=50, ge=1)
    """Each so many-th version is sent whole all the same; one sends every version whole."""
    probe: ProbeConfig = ProbeConfig()
    """Proof that the engine computes with the weights it was given."""
    in_flight: Literal["keep", "recompute", "drain", "abort"] = "keep"
    """What happens to turns in flight at a switch."""

    @model_validator(mode="after")
    def _some_are_always_whole(self) -> WeightsConfig:
        patches = self.transport == "collective" and self.collective.backend == "sparse_nccl"
        if self.transport in ALWAYS_WHOLE and self.delta == "on" and not patches:
            raise ValueError(f'delta = "on" cannot be had with transport = "{self.transport}"')
        return self

    @model_validator(mode="after")
    def _some_is_of_one_transport(self) -> WeightsConfig:
        # Defaults may be written: a rendered configuration has them all.
        for name, transport in (("keep", "checkpoint"), ("collective", "collective")):
            default = type(self).model_fields[name].default
            if self.transport != transport and getattr(self, name) != default:
                raise ValueError(
                    f'{name} means nothing with transport = "{self.transport}": it is of "{transport}"'
                )
        return self
