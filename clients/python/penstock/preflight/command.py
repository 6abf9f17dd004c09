"""`penstock check`: looks for everything that would stop a run, and says all of it at once.

Exit status: 0 if nothing would; 2 if something does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from penstock.client.scoring import BadFunction
from penstock.common.answers import Exit, as_json, complain, show
from penstock.common.settings import SettingInvalid, Table, read_with_origins
from penstock.machine.devices import Machine, look
from penstock.machine.findings import gigabytes
from penstock.machine.gpus import gpu_count
from penstock.machine.models import (
    FROZEN_BYTES,
    TRAINED_BYTES,
    ModelUnusable,
    Weights,
    find_model,
)
from penstock.preflight.data import first_task
from penstock.preflight.report import Report
from penstock.preflight.rewards import call_once, load_reward
from penstock.server.config.settings import AddressInUse, ConfigError, ServeConfig
from penstock.server.config.settings import load as load_serve
from penstock.server.preflight import check_engine, check_ports
from penstock.trainer.config.paths import check_paths
from penstock.trainer.config.trainer import TrainerConfig, load_config
from penstock.trainer.core.errors import ConfigInvalid
from penstock.up import checks as up_checks
from penstock.up.cast import shares
from penstock.up.config import UpConfig, UpConfigInvalid, UpFile
from penstock.up.config import load as load_up

if TYPE_CHECKING:
    from pydantic import BaseModel

    from penstock.client.scoring import Agent

_REFUSED = (UpConfigInvalid, ConfigInvalid, ConfigError, AddressInUse, BadFunction, ModelUnusable)
_SCORING = ("reward", "rollout-function", "generate")
"""Options of a worker that name what makes the rewards, most likely first."""
PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""Options of an engine whose product is the number of its devices."""


def check(path: Path, overrides: Sequence[str]) -> int:
    """Checks a file of `penstock up`, `penstock train` or `penstock serve`. Returns the exit status."""
    report = Report()
    try:
        table, _ = read_with_origins(path, overrides)
        # What the functions print is no result.
        with redirect_stdout(sys.stderr):
            _KINDS[_kind(table)](path, overrides, report)
    except (SettingInvalid, UpConfigInvalid, ConfigInvalid, ConfigError) as error:
        report.problem("", error)
    lines = [*report.checked, *(f"note: {line}" for line in report.remarks)]
    if not report.problems:
        lines.append(f"{path}: nothing stands in the way")
    if lines or as_json():
        show("\n".join(lines), asdict(report))
    if report.problems and not as_json():
        complain("penstock check", "\n".join(report.problems))
    return Exit.MISUSED if report.problems else Exit.DONE


def _kind(table: Table) -> str:
    """The command whose file it is: that which knows most of its tables, the first of several."""
    sections: Mapping[str, type[BaseModel]] = {
        "up": UpFile,
        "train": TrainerConfig,
        "serve": ServeConfig,
    }
    known = {kind: len(table.keys() & section.model_fields) for kind, section in sections.items()}
    return max(known, key=lambda kind: known[kind])


@contextmanager
def _told(report: Report, where: str = "") -> Generator[None]:
    """Adds what is wrong to the report, and continues after it."""
    try:
        yield
    except _REFUSED as error:
        report.problem(where, error)


def _check_trainer_file(path: Path, overrides: Sequence[str], report: Report) -> None:
    origins = read_with_origins(path, overrides)[1]
    config = load_config(path, overrides)
    with _told(report):
        check_paths(config, origins)
    if report.problems:
        return
    first_task(config, report)
    model, machine = _model(config.model.path, origins.named(("model", "path")), report), look()
    _check_memory({"the trainer": _trainer_bytes(config, model, machine)}, machine, report)


def _check_server_file(path: Path, overrides: Sequence[str], report: Report) -> None:
    origins = read_with_origins(path, overrides)[1]
    config = load_serve(path, list(overrides))

    def origin(key: str) -> str:
        return origins.named(tuple(key.split(".")))

    _check_server(config, origin, report)
    if (name := config.engine.get("model")) and not config.pool.engines:
        _model(str(name), origin("engine.model"), report)
        _check_gpus(_engine_gpus(config.engine), look(), origin("engine"), report)


def _check_up_file(path: Path, overrides: Sequence[str], report: Report) -> None:
    config = load_up(path, overrides)
    reward = _load_reward(config, report)
    for part in (
        up_checks.check_placement,
        up_checks.check_servers,
        up_checks.check_workers,
    ):
        with _told(report):
            part(config)
    trainer = None
    if config.train is not None:
        with _told(report), up_checks.in_terms_of(config, "train") as file:
            trainer = load_config(Path(file), [])
            check_paths(trainer, read_with_origins(Path(file), [])[1])
    if report.problems:
        # What follows would report the same in other words.
        return
    task = None if trainer is None else first_task(trainer, report)
    if reward is not None and task is not None:
        whole_group = bool(config.worker_options.get("group-reward"))
        call_once(reward, _reward_name(config), task, report, whole_group=whole_group)
    if config.cluster.one_node and config.cluster.placement == "processes":
        _check_machine(config, trainer, report)


def _load_reward(config: UpConfig, report: Report) -> Agent | None:
    """The worker's reward, if there is one that can be called without a server."""
    options = config.worker_options
    if not config.worker_count:
        return None
    with _told(report, config.origins.of_option("rollout", "reward")):
        reward = load_reward(options)
        if reward is None and options.keys() & _SCORING and "command" not in options:
            report.remark(
                _reward_name(config), "it needs a server, so it was imported and not called"
            )
        return reward
    return None


def _reward_name(config: UpConfig) -> str:
    options = config.worker_options
    option = next((name for name in _SCORING if name in options), "reward")
    where = config.origins.of_option("rollout", option)
    return f"{where}{': ' if where else ''}--{option} {options.get(option)}"


def _check_machine(config: UpConfig, trainer: TrainerConfig | None, report: Report) -> None:
    """The server's port, the model's files, the GPUs and the memory."""
    behind = config.engines if config.engine_count else config.serve
    section = "engines" if config.engine_count else "serve"
    engine = cast("Table", behind.get("engine", {}))

    def origin(key: str) -> str:
        # The options of engines may be given in [serve].
        own = config.origins.own.has((section, *key.split(".")))
        named = section if own or section in config.origins.files else "serve"
        where = config.origins.of(named, key)
        return f"{where}: [{named}]: {key}" if where else f"[{named}]: {key}"

    for listening in dict.fromkeys(("serve", section)):
        with _told(report), up_checks.in_terms_of(config, listening) as file:
            server = load_serve(Path(file), [])
            with _told(report, config.origins.of(listening, "listen") or f"[{listening}]: listen"):
                check_ports(server)
    with _told(report), up_checks.in_terms_of(config, section) as file:
        check_engine(load_serve(Path(file), []), [], origin)
    machine = look()
    needed: dict[str, int] = {}
    gpus: list[int] = []
    served: Weights | None = None
    if "model" in engine:
        served = _model(str(engine["model"]), origin("engine.model"), report)
        count = max(1, config.engine_count)
        needed["the engines" if count > 1 else "the server"] = count * served.length_bytes
        gpus.append(_engine_gpus(engine))
    if trainer is not None:
        where = config.origins.of(*config.origins.written("train", "model.path"))
        if served is None or trainer.model.path != engine.get("model"):
            served = _model(trainer.model.path, where, report)
        needed["the trainer"] = _trainer_bytes(trainer, served, machine)
        gpus.append(config.up.trainer_ranks)
    # Without shares in [cluster], every process sees all GPUs, so they may share them.
    apart = sum(math.ceil(share.gpus) for share in shares(config).values())
    where = "[cluster]" if apart else f"[{section}]"
    wanted = apart or max(gpus, default=0)
    _check_gpus(wanted, machine, where, report, divided=bool(apart))
    _check_memory(needed, machine, report)


def _check_server(config: ServeConfig, origin: Callable[[str], str], report: Report) -> None:
    with _told(report, origin("listen")):
        check_ports(config)
    if not config.pool.engines:
        with _told(report):
            check_engine(config, [], origin)


def _model(name: str, where: str, report: Report) -> Weights:
    with _told(report, where):
        model = find_model(name)
        size = gigabytes(model.length_bytes) if model.length_bytes else "not on this machine yet"
        report.checked.append(f"model: {name}, {size}")
        return model
    return Weights()


def _engine_gpus(engine: Mapping[str, object]) -> int:
    count = 1
    for name in PARALLEL:
        given = engine.get(name, engine.get(name.replace("_", "-"), 1))
        count *= int(str(given)) if str(given).isdecimal() else 1
    return count


def _check_gpus(
    wanted: int, machine: Machine, where: str, report: Report, *, divided: bool = False
) -> None:
    """Unless the GPUs are `divided` among the processes, a machine without any computes on its CPU."""
    present = len(machine.gpus)
    if not present and (not divided or gpu_count()):
        # A driver that does not answer hides GPUs.
        return
    if wanted > present:
        report.problem(
            where, f"{wanted} GPUs are needed, and this machine shows {present or 'none'}"
        )
    elif present:
        report.checked.append(f"GPUs: {wanted} of {present}")


def _trainer_bytes(config: TrainerConfig, model: Weights, machine: Machine) -> int:
    # Offloaded weights are in another memory than the engine's, unless there is only one.
    if config.model.cpu_offload and machine.gpus:
        return 0
    return model.elements * (TRAINED_BYTES if config.model.lora is None else FROZEN_BYTES)


def _check_memory(needed: Mapping[str, int], machine: Machine, report: Report) -> None:
    """Compares the weights alone with the memory: no run needs less."""
    unknown = gpu_count() and not machine.gpus
    if unknown or not (total := sum(needed.values())):
        return
    parts = ", ".join(f"{who} {gigabytes(count)}" for who, count in needed.items() if count)
    has = f"{len(machine.gpus)} GPUs have" if machine.gpus else "this machine has"
    if total > machine.whole:
        report.problem(
            "memory",
            f"the weights alone need {gigabytes(total)} ({parts}), and {has} "
            f"{gigabytes(machine.whole)}: take a smaller model, or [model.lora]",
        )
    else:
        report.checked.append(f"memory: {parts}, of {gigabytes(machine.whole)}")


_KINDS: Mapping[str, Callable[[Path, Sequence[str], Report], None]] = {
    "up": _check_up_file,
    "train": _check_trainer_file,
    "serve": _check_server_file,
}
