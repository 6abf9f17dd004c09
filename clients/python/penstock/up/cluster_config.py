"""Configuration of `penstock up`: how many engines there are, and where everything runs; docs/cluster.md.

[engines]                    # with it, [serve] is a hub's
count = 2

[cluster]
placement = "ray"

[cluster.engine]
gpus = 1
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from penstock.common.section import Section

LOOPBACK = "127.0.0.1:0"
EVERY_INTERFACE = "0.0.0.0:0"
OF_RAY = ("address", "strategy", "wait_seconds")
SHARES_OWN = {"CPU": "cpus", "GPU": "gpus"}
"""Resources of Ray that have names of their own here."""


class Share(Section):
    """What one process is promised of its node."""

    cpus: float = Field(default=1.0, gt=0)
    """Cores. Ray counts them and tells OpenMP; it does not pin."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs, and the process sees no others: a whole number, or a part of one."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict[str, float])
    """Others, by the names they have in the Ray cluster: `{ "ssd" = 1 }`."""

    @field_validator("gpus")
    @classmethod
    def _check_whole(cls, value: float) -> float:
        if value > 1 and not value.is_integer():
            raise ValueError("must be a whole number, or below one")
        return value

    @field_validator("resources")
    @classmethod
    def _check_names(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name in SHARES_OWN:
                raise ValueError(f"{name} is said by `{SHARES_OWN[name]}`")
        return value


class Cluster(Section):
    """Where processes run."""

    placement: Literal["processes", "ray"] = "processes"
    """On this machine, or each in an actor of a Ray cluster."""
    address: str | None = None
    """Of a Ray cluster that is there: HOST:PORT, or "auto" for that of this machine. Unset, one of this
    machine is started, and ends with the run."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray spreads the processes over nodes. With STRICT_PACK all are on one, and loopback does."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long to wait until the cluster has room for all of them."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables that every process is given. No secrets: they can be read in the cluster's state."""
    hub: Share = Share()
    """The hub's share, where there are [engines]."""
    engine: Share = Share()
    """Each engine server's; the one server's where there is no hub."""
    worker: Share = Share()
    """Each worker's."""
    trainer: Share = Share()
    """That of each of the trainer's ranks."""

    @model_validator(mode="after")
    def _check_placed(self) -> Cluster:
        # Said to be "processes", what is of Ray waits for the day that it is not.
        meant = [name for name in OF_RAY if name in self.model_fields_set]
        if meant and "placement" not in self.model_fields_set:
            raise ValueError(f'{meant[0]} is for placement = "ray"; say that, or "processes"')
        return self

    @property
    def one_node(self) -> bool:
        """Whether every process is on the same node, and so reached over loopback."""
        own = self.placement == "processes" or self.address is None
        return own or self.strategy == "STRICT_PACK"


class Engines(Section):
    """What is ours of [engines]; the rest is as `penstock serve` takes it."""

    model_config = ConfigDict(extra="allow")

    count: int = Field(default=1, ge=1)
    """Engine servers."""
