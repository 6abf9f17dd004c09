"""The processes of `penstock up`, by its configuration: names, command lines and resources."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import tomli_w

from penstock.machine.gpus import DEVICES
from penstock.up.cluster_config import Share
from penstock.up.config import UpConfig, command_line
from penstock.up.placement import LocalPlacement, share_devices
from penstock.up.processes import Command
from penstock.up.ranked_process import rank_name
from penstock.up.supervisor import Cast, Listens

if TYPE_CHECKING:
    from penstock.common.settings import Table


def penstock(*arguments: str) -> tuple[str, ...]:
    """The command line of this very installation. Without -P, a json.py in the working directory would
    take the place of Python's."""
    return (sys.executable, "-P", "-m", "penstock.cli", *arguments)


@dataclass(frozen=True)
class Programs:
    """The programs to run: the beginning of each command line."""

    serve: tuple[str, ...] = penstock("serve")
    """A server with an engine."""
    rollout: tuple[str, ...] = penstock("rollout")
    train: tuple[str, ...] = penstock("train")
    hub: tuple[str, ...] = penstock("serve")
    check: tuple[str, ...] = penstock("check", "--json")
    """Looks for what would stop the run before it is started; empty: nothing does."""


ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # Threads that spin while they wait take a core that another process needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
}


def make_cast(config: UpConfig, programs: Programs, *, resume: bool) -> Cast:
    """The processes of a run, and how each is started."""
    out = config.up.out

    def server(listens: Listens | None) -> Command:
        name, program = server_name(config), programs.hub if config.engine_count else programs.serve
        arguments = ["--config", str(out / "serve.toml")]
        if listens is not None:
            arguments += listens.options(http_listen(config))
        return _command(config, name, (*program, *arguments), {"serve.toml": config.serve})

    def engine(name: str) -> Command:
        arguments = (*programs.serve, "--config", str(out / "engine.toml"))
        return _command(config, name, arguments, {"engine.toml": config.engines})

    def worker(name: str, address: str) -> Command:
        options = command_line({"server": address, **config.worker_options})
        return _command(config, name, (*programs.rollout, *options), {})

    def trainer(address: str, resuming: bool) -> Command:
        ranks = config.up.trainer_ranks
        arguments = [str(out / "trainer.toml"), *(["--resume"] if resuming else [])]
        # On this machine rank 0 starts the other ranks; on Ray each rank is placed separately.
        placed = config.cluster.placement == "ray"
        arguments += ["--ranks", str(ranks)] if ranks > 1 and not placed else []
        files = {"trainer.toml": config.train_at(address)}
        command = _command(config, "trainer", (*programs.train, *arguments), files)
        terminal = sys.stdout.isatty()
        return replace(command, inherits_terminal=terminal, ranks=ranks if placed else 1)

    def named(
        make: Callable[..., Command], all_names: list[str]
    ) -> dict[str, Callable[..., Command]]:
        return {name: partial(make, name) for name in all_names}

    return Cast(
        server,
        named(worker, names("worker", config.worker_count)),
        None if config.train is None else trainer,
        trainer_keeps_checkpoints=config.trainer_keeps_checkpoints,
        trainer_resumes=resume,
        engines=named(engine, numbered("engine", config.engine_count)),
        engines_file=config.engines_file,
        server_name=server_name(config),
    )


def _command(
    config: UpConfig, name: str, arguments: tuple[str, ...], files: Mapping[str, Table]
) -> Command:
    """`files` holds configuration tables by their file names in the run's folder."""
    out = config.up.out
    return Command(
        name,
        arguments,
        out / f"{name}.log",
        {**ENVIRONMENT, **config.cluster.environment},
        files={out / file: tomli_w.dumps(table) for file, table in files.items()},
    )


def http_listen(config: UpConfig) -> str | None:
    """The address configured for the server's HTTP endpoints; None if there is none."""
    http = cast("Table", config.serve.get("http", {}))
    return cast("str | None", http.get("listen"))


def server_name(config: UpConfig) -> str:
    """The server's name, also that of its log."""
    return "hub" if config.engine_count else "server"


def names(kind: str, count: int) -> list[str]:
    """Names of `count` processes of a kind, also those of their logs; a single one has no number."""
    return [kind] if count == 1 else numbered(kind, count)


def numbered(kind: str, count: int) -> list[str]:
    """Numbered names, even for a single process."""
    return [f"{kind}-{index + 1}" for index in range(count)]


def shares(config: UpConfig) -> dict[str, Share]:
    """Resources of each process by its name; the trainer's ranks are named by `rank_name`."""
    cluster = config.cluster
    found = dict.fromkeys(numbered("engine", config.engine_count), cluster.engine)
    found[server_name(config)] = cluster.hub if config.engine_count else cluster.engine
    found |= dict.fromkeys(names("worker", config.worker_count), cluster.worker)
    if config.train is not None:
        ranks = range(config.up.trainer_ranks)
        found |= dict.fromkeys((rank_name("trainer", rank) for rank in ranks), cluster.trainer)
    return found


def local_placement(config: UpConfig) -> LocalPlacement:
    """A placement on this machine, with its GPUs divided among the processes. Raises PlacementFailed."""
    wanted = {name: share.gpus for name, share in shares(config).items()}
    visible = os.environ.get(DEVICES)
    told = share_devices(wanted, None if visible is None else visible.split(","))
    ranks = [told.pop(rank_name("trainer", rank), None) for rank in range(config.up.trainer_ranks)]
    own = [rank[DEVICES] for rank in ranks if rank and rank[DEVICES]]
    if told:
        # Rank 0 starts the other ranks, and each rank takes one of the devices that it sees.
        told["trainer"] = {DEVICES: ",".join(own)}
    return LocalPlacement(told)
