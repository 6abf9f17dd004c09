"""`penstock train --model M --data D --reward R`: makes the file of a run, and runs it.

Order: import the reward -> read the data -> find the GPUs -> fetch the model -> choose the rest -> write
`run.toml` into the run's folder -> `penstock up`. What is cheap to refuse is refused first.

Exit status: that of `penstock up`.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.client.scoring import BadFunction, load_function
from penstock.common.explaining import complain
from penstock.common.settings import SettingInvalid, Table, apply_setting
from penstock.demo.model import ModelUnavailable
from penstock.launch import machine
from penstock.launch.choices import Data, Launch, choose, render, whole
from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import lay_out
from penstock.launch.model import Model, longest_prompt, read_model
from penstock.trainer.config.data import MixableConfig
from penstock.trainer.config.data_options import parse_columns, source_of
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Source
from penstock.up.cast import Programs
from penstock.up.checks import check
from penstock.up.config import UpConfigInvalid, load
from penstock.up.supervisor import BAD_CONFIGURATION
from penstock.up.up import up

FILE = "run.toml"
PROMPTS_READ = 4096
"""Of data without an end, to find the longest."""
WIDEST_PROMPT = 60


def launch(options: Mapping[str, Any], dry_run: bool, programs: Programs | None = None) -> int:
    """Runs what the options of the command line describe; returns the exit status."""
    given = Launch(**options)
    stem = Path(given.data.partition(":")[0]).name.partition(".")[0]
    name = time.strftime(f"{stem or 'train'}-%Y%m%d-%H%M%S")
    out = given.out or Path("runs") / name
    try:
        text = make_file(given, out.resolve())
        if dry_run:
            return _dry_run(text, programs or Programs())
    except (LaunchInvalid, ConfigInvalid, BadFunction, ModelUnavailable, UpConfigInvalid) as error:
        complain("penstock train", error)
        return BAD_CONFIGURATION
    path = out / FILE
    if path.exists():
        complain("penstock train", f"--out {out}: it holds a run already; {_continue(path)}")
        return BAD_CONFIGURATION
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        complain("penstock train", f"--out {out}: {error.filename}: {error.strerror}")
        return BAD_CONFIGURATION
    _say(f"wrote {path}:\n\n{text}")
    status = up(path, [], resume=False, dry_run=False, programs=programs)
    if status != BAD_CONFIGURATION:
        model = out / "model"
        _say(f"the trained model is in {model}" if model.is_dir() else f"logs are in {out}")
        _say(_continue(path))
    return status


def make_file(given: Launch, out: Path) -> str:
    """The text of the run's file, with every choice made. Raises the errors that `launch` words."""
    _check_reward(given)
    asked = _settings(given.overrides)
    columns = parse_columns(given.columns) if given.columns is not None else {}
    config = source_of(given.data, columns)
    source = open_source(config, 0, "--data")
    _say("looking at the machine and the model")
    found = machine.look()
    model = read_model(given.model, _say)
    layout = lay_out(found, model.parameters, bool(given.lora), given.ranks)
    data = _measure(config, source, model, asked)
    choices = choose(given, out, found, model, layout, data)
    command = ("penstock", "train", "--model", given.model, "--data", given.data)
    above = [
        f"{shlex.join((*command, '--reward', given.reward))}",
        f"Chosen for {found.described}.",
        f"To train again with changes: set another `out`, then `penstock up {FILE}`.",
    ]
    return render(choices, above)


def _check_reward(given: Launch) -> None:
    """Imports the reward, as a worker will. Raises BadFunction."""
    if given.style in (None, "penstock"):
        load_function(given.reward, "--reward")
        return
    from penstock.client.plugins.styles import Style, load_functions

    load_functions(Style(given.style), None, given.reward, {}, whole_group=False)


def _settings(overrides: tuple[str, ...]) -> Table:
    table: Table = {}
    try:
        for setting in overrides:
            apply_setting(table, setting)
    except SettingInvalid as error:
        raise LaunchInvalid(str(error)) from error
    return table


def _measure(config: MixableConfig, source: Source, model: Model, asked: Table) -> Data:
    rows = source.size if isinstance(source, Finite) else None
    prompts = [source.problem(n).messages for n in range(PROMPTS_READ if rows is None else rows)]
    system: Any = asked
    for key in ("train", "data", "system_prompt"):
        system = cast("Table", system).get(key, "") if isinstance(system, dict) else ""
    longest, place = longest_prompt(model, prompts, str(system))
    if longest >= model.context:
        begins = " ".join(prompts[place][-1][1][:WIDEST_PROMPT].split())
        raise LaunchInvalid(
            f"--data: a prompt has about {longest} tokens, and the model's context is {model.context}: "
            f"leave out prompts as long as the one that begins {begins!r}"
        )
    table = config.model_dump(mode="json", exclude_defaults=True)
    section = cast("Table", next(iter(table.values())))
    if "path" in section:
        section["path"] = str(Path(str(section["path"])).resolve())
    else:
        section["function"] = whole(str(section["function"]))
    return Data(table, rows, longest)


def _dry_run(text: str, programs: Programs) -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-train-") as folder:
        path = Path(folder) / FILE
        path.write_text(text)
        check(load(path, []), programs)
    sys.stdout.write(text)
    return 0


def _continue(path: Path) -> str:
    return f"to continue: penstock up {path} --resume --set train.run.steps=N"


def _say(text: str) -> None:
    sys.stderr.write(f"penstock train: {text}\n")
