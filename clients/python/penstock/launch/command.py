"""`penstock train --model M --data D --reward R`: makes the file of a run, and runs it.

Order: import the reward -> read the data -> find the GPUs -> fetch the model -> choose the rest -> have
`penstock check` look at it -> write `run.toml` into the run's folder -> `penstock up`. What is cheap to
refuse is refused first.

Exit status: that of `penstock up`.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from penstock.client.scoring import BadFunction, load_function
from penstock.common.answers import Exit, complain, show_toml
from penstock.common.settings import SettingInvalid, Table, apply_setting
from penstock.demo.model import ModelUnavailable
from penstock.launch.choices import Data, Launch, choose, render, whole
from penstock.launch.errors import LaunchInvalid
from penstock.launch.layout import lay_out
from penstock.launch.model import Model, check_folder, longest_prompt, read_model
from penstock.machine.devices import look
from penstock.trainer.config.data import MixableConfig
from penstock.trainer.config.data_options import parse_columns, source_of
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite, Source
from penstock.up.cast import Programs
from penstock.up.checks import check_everything
from penstock.up.config import UpConfigInvalid
from penstock.up.up import up

PROGRAM = "penstock train"
FILE = "run.toml"
PROMPTS_READ = 4096
"""Of data without an end, to find the longest."""
WIDEST_PROMPT = 60
REFUSED = (LaunchInvalid, ConfigInvalid, BadFunction, ModelUnavailable, UpConfigInvalid)
"""Errors of what is given."""


def launch(options: Mapping[str, Any], dry_run: bool, programs: Programs | None = None) -> int:
    """Runs what the options of the command line describe; returns the exit status."""
    given, programs = Launch(**options), programs or Programs()
    out = given.out or new_folder(given.data)
    path = out / FILE
    if path.exists():
        return complain(PROGRAM, f"--out {out}: it holds a run already; {_continue(path)}")
    try:
        text = make_file(given, out.resolve())
        check_file(text, given.overrides, programs)
    except REFUSED as error:
        return complain(PROGRAM, error)
    if dry_run:
        show_toml(text)
        return Exit.DONE
    try:
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        return complain(PROGRAM, f"--out {out}: {error.filename}: {error.strerror}")
    _say(f"wrote {path}:\n\n{text}")
    # The file is checked already.
    status = up(path, [], resume=False, dry_run=False, programs=replace(programs, check=()))
    if status != Exit.MISUSED:
        model = out / "model"
        _say(f"the trained model is in {model}" if model.is_dir() else f"logs are in {out}")
        _say(_continue(path))
    return status


def new_folder(data: str) -> Path:
    """Where a run of this data goes, unless the person says."""
    stem = Path(data.partition(":")[0]).name.partition(".")[0]
    return Path("runs") / time.strftime(f"{stem or 'train'}-%Y%m%d-%H%M%S")


def make_file(given: Launch, out: Path) -> str:
    """The text of the run's file, with every choice made. Raises what is in `REFUSED`."""
    asked = _settings(given.overrides)
    config, source = _open(given)
    _say("looking at the machine and the model")
    found = look()
    model = read_model(given.model, _say)
    layout = lay_out(found, model.parameters, bool(given.lora), given.ranks)
    data = _measure(config, source, model, asked)
    choices = choose(given, out, found, model, layout, data)
    command = ("penstock", "train", "--model", given.model, "--data", given.data)
    above = ["penstock.train", f"Chosen for {found.described}."]
    if given.reward is not None:
        above[0] = shlex.join((*command, "--reward", given.reward))
        above.append(f"To train again with changes: set another `out`, then `penstock up {FILE}`.")
    return render(choices, above)


def _open(given: Launch) -> tuple[MixableConfig, Source]:
    """Opens the data, and checks the model's name and the reward too, so that one error names every
    mistake. Raises LaunchInvalid."""
    wrong: list[str] = []
    found: list[tuple[MixableConfig, Source]] = []

    def open_data() -> None:
        config = source_of(given.data, parse_columns(given.columns))
        found.append((config, open_source(config, 0, "--data")))

    for check in (lambda: check_folder(given.model), open_data, lambda: _check_reward(given)):
        try:
            check()
        except REFUSED as error:
            wrong.append(str(error))
    if wrong:
        raise LaunchInvalid("\n".join(wrong))
    return found[0]


def _check_reward(given: Launch) -> None:
    """Imports the reward, as a worker will. Raises BadFunction."""
    if given.reward is None:
        return
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


def check_file(text: str, overrides: Sequence[str], programs: Programs) -> None:
    """Has `penstock check` look at the file before it is in the run's folder, unless `up.check` is false.
    Raises UpConfigInvalid."""
    if not tomllib.loads(text)["up"].get("check", True):
        return
    with tempfile.TemporaryDirectory(prefix="penstock-train-") as folder:
        path = Path(folder) / FILE
        path.write_text(text)
        # A person knows the options, and not this file.
        own = re.compile(rf"^{re.escape(str(path))}(:\d+)?: ", re.MULTILINE)
        try:
            # The settings are in the file already; this way, a problem names them.
            remarks = check_everything(programs.check, path, overrides)
        except UpConfigInvalid as error:
            raise UpConfigInvalid(own.sub("", str(error))) from error
    for remark in remarks:
        _say(f"note: {own.sub('', remark)}")


def _continue(path: Path) -> str:
    return f"to continue: penstock up {path} --resume --set train.run.steps=N"


def _say(text: str) -> None:
    sys.stderr.write(f"{PROGRAM}: {text}\n")
