"""Configuration of `penstock up`: one TOML file for engines, server, workers and trainer together.

    [up]
    out = "runs/first"

    [serve]                      # as for `penstock serve`
    listen = "127.0.0.1:50051"
    [serve.engine]
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"

    [rollout]                    # options of `penstock rollout`, by name
    reward = "score:reward"
    concurrency = 64
    count = 1

    [train]                      # as for `penstock train`: tables, a file, or both
    path = "examples/arithmetic.toml"

    [engines]                    # several engine servers, each configured as for `penstock serve`;
    count = 2                    # [serve] then configures the hub in front of them
    [cluster]                    # where the processes run: `cluster_config`

Precedence, lowest first: the file that `path` names in [serve] or [train] -> the tables next to `path` ->
`--set`. Then the values that the sections must agree on are filled in. These are the server's address, one
folder that also holds the server's journal, and the model if only the server or the trainer names it. With
[engines], the options in [serve.engine] apply to the engines, and [engines.engine] overrides them.

Each command checks the rest of its section itself, from a file in `out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pydantic import ConfigDict, Field

from penstock.common.explaining import check
from penstock.common.section import Section
from penstock.common.settings import Origins, SettingInvalid, Table, read_with_origins
from penstock.up.cluster_config import EVERY_INTERFACE, LOOPBACK, Cluster, Engines

WORKER_PATIENCE = "reconnect-timeout"
HUBS_OWN = ("model", "tokenizer")
"""Engine options that a hub takes too."""
DISCOVER_SECONDS = 1.0
"""How often a hub reads the file of its engines."""


class UpConfigInvalid(Exception):
    """The configuration is unusable; the message names the error."""


class UpSection(Section):
    """Settings of the whole run."""

    out: Path
    """Folder for logs, events, the configuration of each process, and the trainer's results."""
    restarts: int = Field(default=5, ge=0)
    """Restarts of one process within `restart_window_seconds`; one more failure stops everything."""
    restart_window_seconds: float = Field(default=600.0, gt=0)
    """Time after which a restart no longer counts."""
    patience_seconds: float = Field(default=900.0, gt=0)
    """How long workers and trainer wait for a restarted server, unless their own sections set it."""
    stop_seconds: float = Field(default=60.0, gt=0)
    """How long each process has to end after SIGTERM or Ctrl-C; a trainer finishes its step and saves."""
    trainer_ranks: int = Field(default=1, ge=1)
    """Processes that the trainer runs."""
    check: bool = True
    """Whether nothing starts while `penstock check` finds a problem with the file."""


class Workers(Section):
    """The keys of [rollout] that `penstock up` reads itself; the rest are options of `penstock rollout`."""

    model_config = ConfigDict(extra="allow")

    count: int = Field(default=1, ge=0)
    """Number of worker processes."""


class UpFile(Section):
    """The file as written, before anything is filled in."""

    up: UpSection
    serve: Table
    """The settings of `penstock serve`, over those of the file that its key `path` names, if any."""
    rollout: Table = Field(default_factory=Table)
    """Options of `penstock rollout` by name, and the number of workers."""
    train: Table | None = None
    """The settings of `penstock train`, over those of the file that its key `path` names, if any.
    Without this table, the trainer runs elsewhere."""
    engines: Table | None = None
    """The settings of `penstock serve` for each engine server, and their number. With this table, [serve]
    configures the hub in front of them."""
    cluster: Cluster = Cluster()


_MODEL = (("serve", "engine.model"), ("engines", "engine.model"), ("train", "model.path"))
"""Section and key of each setting that names the model."""


@dataclass(frozen=True)
class UpOrigins:
    """Where the values of the sections come from, for messages."""

    own: Origins = field(default_factory=Origins)
    files: dict[str, Origins] = field(default_factory=dict[str, Origins])
    """Those of the files that sections name with `path`, by section."""

    def merged(self, section: str, table: Table) -> Table:
        """Merges a section over the file that its `path` names. Raises SettingInvalid."""
        rest = {key: value for key, value in table.items() if key != "path"}
        if "path" not in table:
            return rest
        below, self.files[section] = read_with_origins(Path(str(table["path"])), ())
        return _merge(below, rest)

    def of(self, section: str, key: str) -> str:
        """The option, or the file and line, of a dotted key in a section. Empty if none gives it."""
        place = _place(key)
        if self.own.has((section, *place)) or section not in self.files:
            return self.own.of((section, *place))
        return self.files[section].of(place)

    def written(self, section: str, key: str) -> tuple[str, str]:
        """The section and the key that gave the value of this one: see `_share_model`."""
        names = _MODEL if (section, key) in _MODEL else ()
        return next((name for name in ((section, key), *names) if self._has(*name)), (section, key))

    def _has(self, section: str, key: str) -> bool:
        place, file = _place(key), self.files.get(section)
        return self.own.has((section, *place)) or (file is not None and file.has(place))

    def of_option(self, section: str, name: str) -> str:
        """As `of`, for an option whose name may have dashes or underscores in the file."""
        keys = (name.replace("-", "_"), name.replace("_", "-"))
        given = [key for key in keys if self.own.has((section, key))]
        return self.own.of((section, *given[:1]))


def _place(key: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@dataclass(frozen=True)
class UpConfig:
    """The configuration of `penstock up`, resolved except for the server's address."""

    up: UpSection
    serve: Table
    """As `penstock serve` reads it."""
    worker_count: int
    worker_options: Table
    """Options of `penstock rollout` by name, without the server's address."""
    train: Table | None
    """As `penstock train` reads it, without the server's address; None if the trainer runs elsewhere."""
    engine_count: int = 0
    """Number of engine servers; zero if the server has its own engine."""
    engines: Table = field(default_factory=dict[str, object])
    """As each engine server reads it."""
    cluster: Cluster = field(default_factory=Cluster)
    origins: UpOrigins = field(default_factory=UpOrigins, compare=False)

    @property
    def engines_file(self) -> Path:
        """The file from which a hub reads its engines' addresses."""
        return self.up.out / "engines"

    @property
    def trainer_keeps_checkpoints(self) -> bool:
        """Whether a trainer that died can resume."""
        return bool(_table(self.train or {}, "checkpoint").get("every_steps"))

    def train_at(self, address: str) -> Table:
        """The trainer's configuration for a server at this address."""
        assert self.train is not None
        return _merge({"server": {"address": address}}, self.train)


def load(path: Path, overrides: Sequence[str]) -> UpConfig:
    """Reads a file and applies overrides such as `train.run.steps=5`; the last override wins.

    Raises UpConfigInvalid.
    """
    try:
        table, own = read_with_origins(path, overrides)
        file = check(UpFile, table, own)
        worker_count = check(Workers, file.rollout, own, "rollout").count
        origins = UpOrigins(own, dict[str, Origins]())
        engines = None if file.engines is None else origins.merged("engines", file.engines)
        engine_count = check(Engines, engines or {}, own, "engines").count
        # The journal lets a restarted server keep its tasks, unless the file configures another journal.
        serve = origins.merged("serve", file.serve)
        train = None if file.train is None else origins.merged("train", file.train)
    except SettingInvalid as error:
        raise UpConfigInvalid(str(error)) from error
    if file.train is None and "trainer_ranks" in file.up.model_fields_set:
        raise UpConfigInvalid("up.trainer_ranks: without [train] there is no trainer here")
    _check_tables("serve", serve, "engine", "pool", "journal")
    _check_tables("engines", engines or {}, "engine")
    _check_tables("train", train or {}, "model", "checkpoint")
    if "url" not in _table(serve, "journal"):
        journal: Table = {"journal": {"folder": str(file.up.out / "journal")}}
        serve = _merge(journal, serve)
    if engines is not None:
        serve["engine"] = _merge(_table(serve, "engine"), _table(engines, "engine"))
    if train is not None:
        run: Table = {"id": file.up.out.name or "run", "out": str(file.up.out)}
        patience: Table = {"give_up_after_seconds": file.up.patience_seconds}
        train = _merge({"run": run, "server": patience}, train)
        _share_model(serve, train)
    options: Table = {WORKER_PATIENCE: file.up.patience_seconds}
    options |= {k.replace("_", "-"): v for k, v in file.rollout.items() if k != "count"}
    config = UpConfig(
        *(file.up, serve, worker_count, options, train), cluster=file.cluster, origins=origins
    )
    return config if engines is None else _behind_hub(config, engines, engine_count)


def _behind_hub(config: UpConfig, engines: Table, count: int) -> UpConfig:
    """Turns the server into a hub in front of engine servers, which take over its engine options."""
    if "engines" in _table(config.serve, "pool"):
        raise UpConfigInvalid("serve.pool.engines: not allowed with [engines], which sets the pool")
    options = _table(config.serve, "engine")
    pool: Table = {
        "engines": [f"file:{config.engines_file}"],
        "discover_seconds": DISCOVER_SECONDS,
    }
    own = {name: value for name, value in options.items() if name in HUBS_OWN}
    serve = {**_merge({"pool": pool}, config.serve), "engine": own}
    # Only the hub calls an engine server.
    listen = LOOPBACK if config.cluster.one_node else EVERY_INTERFACE
    apart: Table = {"listen": listen, "http": {"listen": ""}}
    engines = {**_merge(apart, engines), "engine": options}
    engines.pop("count", None)
    return replace(config, serve=serve, engine_count=count, engines=engines)


def command_line(options: Mapping[str, object]) -> list[str]:
    """Options by name as command-line arguments; a list repeats its option."""
    arguments: list[str] = []
    for name, value in options.items():
        if value is True:
            arguments.append(f"--{name}")
        elif isinstance(value, list):
            for one in cast("list[object]", value):
                arguments += [f"--{name}", str(one)]
        elif value is not False:
            arguments += [f"--{name}", str(value)]
    return arguments


def _share_model(serve: Table, train: Table) -> None:
    """Copies the model from the server to the trainer or back, if only one of the two names it."""
    engine, model = _table(serve, "engine"), _table(train, "model")
    if "model" not in engine and "path" in model:
        serve["engine"] = {"model": model["path"], **engine}
    if "path" not in model and "model" in engine:
        train["model"] = {"path": engine["model"], **model}


def _merge(below: Table, above: Table) -> Table:
    """Merges tables key by key; values in `above` win."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and isinstance(value, dict):
            value = _merge(cast("Table", under), cast("Table", value))
        merged[key] = value
    return merged


def _check_tables(section: str, table: Table, *names: str) -> None:
    """Checks that values to be merged are tables. Raises UpConfigInvalid."""
    for name in names:
        if name in table and not isinstance(table[name], dict):
            raise UpConfigInvalid(f"{section}.{name}: must be a table, got {table[name]!r}")


def _table(table: Table, key: str) -> Table:
    found = table.get(key)
    return cast("Table", found) if isinstance(found, dict) else {}
