"""Refuses what can be refused before the engine's libraries are imported, which takes over ten seconds."""

from __future__ import annotations

import importlib.util
import math
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from penstock.common.models import without_weights
from penstock.common.suggestions import did_you_mean
from penstock.machine.gpus import gpu_count
from penstock.machine.models import ModelUnusable, look_up
from penstock.machine.processor import cores
from penstock.server.config.settings import AddressInUse, ConfigError, ServeConfig
from penstock.wire.channel import split_address

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size")


def check_ports(config: ServeConfig) -> None:
    """Raises AddressInUse if another process listens on one of the addresses, or none can be listened on.

    The ports are left again, and bound for good when the server starts.
    """
    http = config.http.address(config.listen, split_address(config.listen)[1])
    for address in (config.listen, http):
        if address and split_address(address)[1]:
            check_port(address)


def check_port(address: str) -> None:
    """Raises AddressInUse if no socket can be bound to HOST:PORT."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, proto, _, place = found[0]
        with socket.socket(family, kind, proto) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(place)
            # Two sockets can be bound to a port, but only one can listen.
            bound.listen(1)
    except OSError as error:
        said = (error.strerror or str(error)).lower()
        raise AddressInUse(
            f"cannot listen on {address}: {said}; set listen or http.listen to another, or to port "
            "0 for a free one"
        ) from error


def check_engine(config: ServeConfig, options: Sequence[str], origin: Callable[[str], str]) -> None:
    """Checks the names of the engine's options, and its model's folder. `origin` tells where a setting of
    the file comes from. Raises ConfigError with a line per mistake."""
    known = known_options()
    named = _unknown(config.engine, known, "", "_")
    wrong = [f"{origin(f'engine.{name}')}: {what}" for name, what in named]
    given = [
        option[2:].partition("=")[0].partition(".")[0] for option in options if option[:2] == "--"
    ]
    wrong += [f"--{name}: {what}" for name, what in _unknown(given, known, "--", "-")]
    if wrong:
        raise ConfigError("\n".join(wrong))
    _check_processes(config, options, origin)
    loads_otherwise = "load_format" in config.engine or any("load" in name for name in given)
    model = str(config.engine.get("model", ""))
    if not loads_otherwise and (what := without_weights(model)) is not None:
        raise ConfigError(f"{origin('engine.model')}: {what}")


def check_model(config: ServeConfig) -> None:
    """Raises ConfigError if the model is a name that cannot be loaded from the cache or the hub."""
    model = "" if config.pool.engines else str(config.engine.get("model", ""))
    try:
        look_up(model)
    except ModelUnusable as error:
        raise ConfigError(f"model: {error}") from error


def _check_processes(
    config: ServeConfig, options: Sequence[str], origin: Callable[[str], str]
) -> None:
    """Raises ConfigError if the engine is divided among more processes than this machine can run."""
    given = {name: (origin(f"engine.{name}"), str(value)) for name, value in config.engine.items()}
    for option, following in zip(options, [*options, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        given[name.removeprefix("--").replace("-", "_")] = (name, value if equals else following)
    if given.keys() & {"distributed_executor_backend", "nnodes"}:
        return
    parts = [given[name] for name in PARALLEL if name in given and given[name][1].isdigit()]
    count, gpus = math.prod(int(size) for _, size in parts), gpu_count()
    if count > (gpus or cores()):
        has = f"{gpus} GPUs" if gpus else f"no GPU, and {cores():g} cores"
        raise ConfigError(
            f"{' and '.join(where for where, _ in parts)}: {count} processes of the engine, but this "
            f"machine has {has}; penstock doctor shows what it has"
        )


def known_options() -> frozenset[str]:
    """vLLM's options without their dashes, from its source, because importing it is what takes long.
    Empty if it is not installed."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        source = Path(folder) / "engine" / "arg_utils.py"
        if source.is_file():
            return frozenset(
                re.findall(r'"--([a-zA-Z][\w-]*)"', source.read_text(encoding="utf-8"))
            )
    return frozenset()


def _unknown(
    names: Iterable[str], known: frozenset[str], before: str, between: str
) -> list[tuple[str, str]]:
    """The names that vLLM's parser would refuse, and why. It accepts unambiguous beginnings of names."""
    found: list[tuple[str, str]] = []
    for given in names if known else ():
        name = given.replace("_", "-")
        plain = name.removeprefix("no-")
        if name in known or plain in known:
            continue
        longer = [before + o.replace("-", between) for o in sorted(known) if o.startswith(name)]
        if len(longer) > 1:
            found.append((given, f"no option of the engine; it may begin {' or '.join(longer)}"))
        elif not longer and not any(option.startswith(plain) for option in known):
            names_as_written = [before + option.replace("-", between) for option in known]
            meant = did_you_mean(before + name, names_as_written)
            found.append((given, f"neither Penstock nor the engine has this option{meant}"))
    return found
