"""What `penstock up` looks at before anything is started: each section by its command's own parser, and
what they have to agree on.

Nobody is let in from outside by default: an engine server or a server that other nodes reach needs TLS and
tokens, and the hub the token, or the configuration is refused (docs/security.md).
"""

from __future__ import annotations

import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import cast

import click
import tomli_w

from penstock.common.secrets import without_secrets
from penstock.common.settings import Table
from penstock.server.config.settings import ConfigError, ServeConfig
from penstock.server.config.settings import load as load_serve
from penstock.up import ray_placement
from penstock.up.cast import Programs
from penstock.up.config import UpConfig, UpConfigInvalid, command_line
from penstock.up.state import holds_run, is_running
from penstock.wire.channel import is_loopback

CHECK_SECONDS = 120.0


def check(config: UpConfig, programs: Programs) -> None:
    """All of it but the folder. Raises UpConfigInvalid."""
    check_placement(config)
    check_servers(config)
    check_workers(config)
    check_trainer(config, programs)


def check_placement(config: UpConfig) -> None:
    """That there is what places the processes."""
    if config.cluster.placement == "ray" and not ray_placement.is_installed():
        raise UpConfigInvalid(
            "cluster.placement: ray is not installed; pip install 'penstock[ray]', or \"processes\""
        )


def check_servers(config: UpConfig) -> None:
    """That the servers can be reached by those who should, and by nobody else."""
    server = _read("serve", config.serve)
    if not config.cluster.one_node and is_loopback(server.listen):
        raise UpConfigInvalid(
            f"serve.listen: workers and trainer on other nodes do not reach {server.listen}; give "
            'HOST:PORT with serve.security, or cluster.strategy = "STRICT_PACK" to keep all on one node'
        )
    if not config.engine_count:
        return
    engine = _read("engines", config.engines)
    if config.engine_count > 1 and not engine.listen.endswith(":0"):
        raise UpConfigInvalid(
            f"engines.listen: several engine servers cannot share {engine.listen}; give HOST:0"
        )
    pool = server.pool
    if engine.security.certificate and not (pool.tls or pool.ca or pool.certificate):
        raise UpConfigInvalid("engines.security.certificate: the hub needs serve.pool.ca, or tls")
    if engine.security.tokens and not (pool.token_file or pool.certificate):
        raise UpConfigInvalid("engines.security.tokens: the hub needs serve.pool.token_file")


def _read(section: str, table: Table) -> ServeConfig:
    """As `penstock serve` reads it, less the options of its engine."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(table))
        file.flush()
        try:
            return load_serve(Path(file.name), [])
        except ConfigError as error:
            raise UpConfigInvalid(f"[{section}]: {error}") from error


def check_folder(out: Path, resume: bool) -> None:
    """That the run may write there. Raises FolderUnusable."""
    if not holds_run(out):
        return
    if is_running(out):
        raise UpConfigInvalid(f"up.out: another `penstock up` runs in {out}")
    if not resume:
        raise UpConfigInvalid(
            f"up.out: {out} holds another run; give --resume to go on with it, or another folder"
        )


def check_workers(config: UpConfig) -> None:
    """Has the command's own parser look at [rollout]."""
    from penstock.cli.__main__ import rollout

    arguments = command_line({"server": "127.0.0.1:0", **config.worker_options})
    try:
        rollout.make_context("rollout", arguments)
    except click.UsageError as error:
        raise UpConfigInvalid(f"rollout: {error.format_message()}") from error


def check_trainer(config: UpConfig, programs: Programs) -> None:
    """Has the command itself look at [train]."""
    if config.train is not None:
        _ask(programs.train, "train", config.train_at("127.0.0.1:0"))


def resolve(config: UpConfig, programs: Programs) -> Table:
    """All of it, with what each command makes of its part."""
    listen = str(config.serve.get("listen", "127.0.0.1:50051"))
    server = programs.hub if config.engine_count else programs.serve
    resolved: Table = {
        "up": config.up.model_dump(mode="json"),
        "cluster": config.cluster.model_dump(mode="json", exclude_none=True),
        "serve": _ask((*server, "--config"), "serve", config.serve),
        "rollout": {**_shown(config.worker_options), "count": config.worker_count},
    }
    if config.engine_count:
        engines = _ask((*programs.serve, "--config"), "engines", config.engines)
        resolved["engines"] = {"count": config.engine_count, **engines}
    if config.train is not None:
        resolved["train"] = _ask(programs.train, "train", config.train_at(listen))
    return resolved


def _shown(options: Table) -> Table:
    """A worker's options as they are printed: what its commands find in their environment may be secret."""
    shown = dict(options)
    if "env" in options:
        given = options["env"]
        pairs = list(cast("list[object]", given)) if isinstance(given, list) else [given]
        for place, (name, sign, value) in enumerate(str(pair).partition("=") for pair in pairs):
            pairs[place] = f"{name}{sign}{without_secrets(value, name) if sign else ''}"
        shown["env"] = pairs
    return shown


def _ask(command: tuple[str, ...], section: str, table: Table) -> Table:
    """What a command makes of its configuration, by its own --dry-run. Raises UpConfigInvalid."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomli_w.dumps(table))
        file.flush()
        try:
            answer = subprocess.run(
                (*command, file.name, "--dry-run"),
                capture_output=True,
                text=True,
                timeout=CHECK_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UpConfigInvalid(
                f"[{section}]: its --dry-run had no answer after {CHECK_SECONDS:g} s"
            ) from error
    if answer.returncode:
        lines = answer.stderr.replace(f"{file.name}: ", "").strip().splitlines()
        said = lines[-1] if lines else f"exit status {answer.returncode}"
        raise UpConfigInvalid(f"[{section}]: {said}")
    return cast("Table", tomllib.loads(answer.stdout))
