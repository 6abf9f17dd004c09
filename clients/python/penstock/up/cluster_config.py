"""Configuration of `penstock up`: how many engines run, and where (docs/operations/clusters.md).

[engines]                    # with this section, [serve] configures a hub
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
from penstock.wire.channel import split_address

LOOPBACK = "127.0.0.1:0"
EVERY_INTERFACE = "0.0.0.0:0"
OF_RAY = ("address", "strategy", "wait_seconds")
SHARES_OWN = {"CPU": "cpus", "GPU": "gpus"}
"""Ray resources that have their own keys in this configuration."""


class Share(Section):
    """The resources reserved for one process on its node."""

    cpus: float = Field(default=1.0, gt=0)
    """CPU cores. Ray counts them and sets OpenMP's thread count; it does not pin processes to cores."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs, the only ones that the process can see: a whole number, or a fraction below one."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict[str, float])
    """Other resources, by their names in the Ray cluster: `{ "ssd" = 1 }`."""

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
                raise ValueError(f"{name} is set with `{SHARES_OWN[name]}`")
        return value


class Cluster(Section):
    """Where the processes run, and with which resources."""

    placement: Literal["processes", "ray"] = "processes"
    """"processes" runs everything on this machine; "ray" runs each process in an actor of a Ray cluster."""
    address: str | None = None
    """Address of an existing Ray cluster: HOST:PORT, or "auto" for the one on this machine. If unset, a
    cluster is started on this machine and ends with the run."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How Ray spreads the processes over nodes. STRICT_PACK puts all on one node, where loopback
    suffices."""
    wait_seconds: float = Field(default=300.0, gt=0)
    """How long to wait until the cluster has room for all processes."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Environment variables for every process. Put no secrets here: the cluster's state shows them."""
    hub: Share = Share()
    """Resources of the hub, if there are [engines]."""
    engine: Share = Share()
    """Resources of each engine server; those of the single server if there is no hub."""
    worker: Share = Share()
    """Resources of each worker."""
    trainer: Share = Share()
    """Resources of each of the trainer's ranks."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            split_address(value)
        return value

    @model_validator(mode="after")
    def _check_placed(self) -> Cluster:
        # With an explicit "processes", Ray's keys may stay in the file unused.
        meant = [name for name in OF_RAY if name in self.model_fields_set]
        if meant and "placement" not in self.model_fields_set:
            raise ValueError(
                f'{meant[0]} needs placement = "ray"; set it, or "processes" explicitly'
            )
        return self

    @property
    def one_node(self) -> bool:
        """Whether all processes run on one node, and so reach each other over loopback."""
        own = self.placement == "processes" or self.address is None
        return own or self.strategy == "STRICT_PACK"


class Engines(Section):
    """The keys of [engines] that `penstock up` reads itself; the rest goes to `penstock serve`."""

    model_config = ConfigDict(extra="allow")

    count: int = Field(default=1, ge=1)
    """Number of engine servers."""
