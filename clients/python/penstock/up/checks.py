"""Checks that `penstock up` makes before it starts anything, and those parts of `penstock check` that read
its file.

Each section is checked by its command's own parser, and then that the sections agree with each other.

By default, no process is open to other hosts. A server or an engine server that other nodes reach needs
TLS and tokens, and the hub needs its engines' token. Otherwise the configuration is rejected
(docs/operations/security.md).
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import click
import tomli_w

from penstock.common.answers import ending
from penstock.common.distribution import pip_install
from penstock.common.secrets import without_secrets
from penstock.common.settings import Table
from penstock.server.config.settings import ConfigError, ServeConfig
from penstock.server.config.settings import load as load_serve
from penstock.up import ray_placement
from penstock.up.cast import Programs
from penstock.up.config import UpConfig, UpConfigInvalid, UpOrigins, command_line
from penstock.up.state import holds_run, is_running
from penstock.wire.channel import is_loopback

CHECK_SECONDS = 120.0
_MEANT = re.compile(r"(unknown (?:setting|table).*; did you mean )(.+)(\?)$")


def check_everything(
    command: tuple[str, ...], path: Path, overrides: Sequence[str]
) -> Sequence[str]:
    """Runs `penstock check --json` on the file, or no command if it is empty. Returns remarks.

    It is a process because it calls the user's functions. Raises UpConfigInvalid.
    """
    if not command:
        return ()
    settings = [part for override in overrides for part in ("--set", override)]
    try:
        done = subprocess.run(
            (*command, str(path), *settings),
            stdout=subprocess.PIPE,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UpConfigInvalid(
            f"penstock check {path} did not finish within {CHECK_SECONDS:g} s; does a function wait "
            "for something while it is imported?"
        ) from error
    try:
        found = json.loads(done.stdout)
        problems, remarks = found["problems"], found["remarks"]
    except (ValueError, TypeError, KeyError) as error:
        raise UpConfigInvalid(
            f"penstock check {path} {ending(done.returncode)} without a result; does a function end "
            "the process?"
        ) from error
    if problems:
        raise UpConfigInvalid("\n".join(problems))
    return remarks


def check(config: UpConfig) -> None:
    """Checks everything but the folder and the trainer. Raises UpConfigInvalid."""
    check_placement(config)
    check_servers(config)
    check_workers(config)


def check_placement(config: UpConfig) -> None:
    if config.cluster.placement == "ray" and not ray_placement.is_installed():
        raise UpConfigInvalid(
            f'cluster.placement: ray is not installed; {pip_install("ray")}, or use "processes"'
        )


def check_servers(config: UpConfig) -> None:
    """Checks that the servers can be reached by the run's other processes, and by no others."""
    server = _read("serve", config)
    if not config.cluster.one_node and is_loopback(server.listen):
        raise UpConfigInvalid(
            f"serve.listen: workers and trainer on other nodes cannot reach {server.listen}; set "
            'HOST:PORT with serve.security, or cluster.strategy = "STRICT_PACK" to keep all on one node'
        )
    if not config.engine_count:
        return
    engine = _read("engines", config)
    if config.engine_count > 1 and not engine.listen.endswith(":0"):
        raise UpConfigInvalid(
            f"engines.listen: several engine servers cannot share {engine.listen}; set HOST:0"
        )
    pool = server.pool
    if engine.security.certificate and not (pool.tls or pool.ca or pool.certificate):
        raise UpConfigInvalid("engines.security.certificate: the hub needs serve.pool.ca, or tls")
    if engine.security.tokens and not (pool.token_file or pool.certificate):
        raise UpConfigInvalid("engines.security.tokens: the hub needs serve.pool.token_file")


@contextlib.contextmanager
def _as_file(table: Table) -> Generator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(table))
        file.flush()
        yield file.name


@contextlib.contextmanager
def in_terms_of(config: UpConfig, section: str) -> Generator[str]:
    """A section as a file of its command. Errors about that file become UpConfigInvalid, about the file of
    `penstock up`."""
    tables = {"serve": config.serve, "engines": config.engines}
    with _as_file(tables.get(section) or config.train_at("127.0.0.1:0")) as path:
        try:
            yield path
        except Exception as error:
            if lines := _in_own_file(str(error), section, path, config.origins):
                raise UpConfigInvalid(lines) from error
            raise


def _read(section: str, config: UpConfig) -> ServeConfig:
    """Reads a section as `penstock serve` does, without the options of its engine."""
    try:
        with in_terms_of(config, section) as path:
            return load_serve(Path(path), [])
    except ConfigError as error:
        raise UpConfigInvalid(f"[{section}]: {error}") from error


def _in_own_file(said: str, section: str, path: str, origins: UpOrigins) -> str:
    """What a command says about the file at `path`, in terms of the file of `penstock up`. Lines about
    anything else are left out."""
    about_file = re.compile(rf"(?:penstock \w+: )?{re.escape(path)}(?::\d+)?: (.*)")
    found: list[str] = []
    for line in filter(None, map(about_file.fullmatch, said.splitlines())):
        key, colon, said = line[1].partition(": ")
        named, key = origins.written(section, key)
        where = origins.of(named, key)
        said = _MEANT.sub(lambda meant: _below(section, *meant.groups()), said)
        found.append(f"{where}{': ' if where else ''}[{named}]: {key}{colon}{said}")
    return "\n".join(found)


def _below(section: str, said: str, names: str, end: str) -> str:
    """Suggests names as the file of `penstock up` has them, where `train` also is a table of [train]."""
    return said + " or ".join(f"{section}.{name}" for name in names.split(" or ")) + end


def check_folder(out: Path, resume: bool) -> None:
    """Checks that the run may write to its folder. Raises FolderUnusable or UpConfigInvalid."""
    if out.is_dir() and is_running(out):
        raise UpConfigInvalid(f"up.out: another `penstock up` is running in {out}")
    if holds_run(out) and not resume:
        raise UpConfigInvalid(
            f"up.out: {out} holds another run; give --resume to continue it, or another folder"
        )


def check_workers(config: UpConfig) -> None:
    """Checks [rollout] with the parser of `penstock rollout`."""
    from penstock.cli.__main__ import rollout

    arguments = command_line({"server": "127.0.0.1:0", **config.worker_options})
    try:
        rollout.make_context("rollout", arguments, help_option_names=["-h", "--help"])
    except click.UsageError as error:
        named = ""
        if isinstance(error, click.NoSuchOption):
            named = error.option_name.lstrip("-")
        elif isinstance(error, click.BadParameter) and error.param is not None:
            named = error.param.name or ""
        where = config.origins.of_option("rollout", named)
        said = f"rollout: {error.format_message()}"
        raise UpConfigInvalid(f"{where}: {said}" if where else said) from error


def resolve(config: UpConfig, programs: Programs) -> Table:
    """The whole configuration, with each command's section as the command resolves it."""
    listen = str(config.serve.get("listen", "127.0.0.1:50051"))
    server = programs.hub if config.engine_count else programs.serve
    resolved: Table = {
        "up": config.up.model_dump(mode="json"),
        "cluster": config.cluster.model_dump(mode="json", exclude_none=True),
        "serve": _ask((*server, "--config"), "serve", config.serve, config),
        "rollout": {**_shown(config.worker_options), "count": config.worker_count},
    }
    if config.engine_count:
        engines = _ask((*programs.serve, "--config"), "engines", config.engines, config)
        resolved["engines"] = {"count": config.engine_count, **engines}
    if config.train is not None:
        resolved["train"] = _ask(programs.train, "train", config.train_at(listen), config)
    return resolved


def _shown(options: Table) -> Table:
    """A worker's options for display: values in the environment of its commands may be secret."""
    shown = dict(options)
    if "env" in options:
        given = options["env"]
        pairs = list(cast("list[object]", given)) if isinstance(given, list) else [given]
        for place, (name, sign, value) in enumerate(str(pair).partition("=") for pair in pairs):
            pairs[place] = f"{name}{sign}{without_secrets(value, name) if sign else ''}"
        shown["env"] = pairs
    return shown


def _ask(command: tuple[str, ...], section: str, table: Table, config: UpConfig) -> Table:
    """How a command resolves its configuration, by its own --dry-run. Raises UpConfigInvalid."""
    with _as_file(table) as path:
        try:
            answer = subprocess.run(
                (*command, path, "--dry-run"),
                capture_output=True,
                text=True,
                timeout=CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UpConfigInvalid(
                f"[{section}]: its --dry-run did not finish within {CHECK_SECONDS:g} s"
            ) from error
    if answer.returncode:
        if said := _in_own_file(answer.stderr, section, path, config.origins):
            raise UpConfigInvalid(said)
        lines = answer.stderr.strip().splitlines()
        said = lines[-1] if lines else f"exit status {answer.returncode}"
        raise UpConfigInvalid(f"[{section}]: {said}")
    return cast("Table", tomllib.loads(answer.stdout))
