"""`penstock serve`: its configuration, and its errors when it cannot serve."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli.__main__ import main
from penstock.server.config import settings as config
from penstock.server.config.settings import ConfigError
from penstock.server.preflight import known_options
from tests.support.tiny_model import make_tiny_model

pytest.importorskip("vllm")


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def serve_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process, which has vLLM loaded. Return
    exit status, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    return (int(ended.value.code or 0), *capsys.readouterr())


def test_a_dry_run_prints_a_file_that_means_the_same(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first, said = serve_here(
        capsys,
        *("--model", str(model), "--dtype", "float32", "--max-model-len", "128", "--dry-run"),
        *("--listen", "127.0.0.1:0", "--set", "leases.seconds=7"),
    )
    resolved = tomllib.loads(first)
    assert resolved["listen"] == "127.0.0.1:0", said
    assert resolved["leases"]["seconds"] == 7
    assert resolved["engine"]["max_model_len"] == 128
    assert resolved["engine"]["dtype"] == "float32"
    file = tmp_path / "serve.toml"
    file.write_text(first)
    _, again, said = serve_here(capsys, "--config", str(file), "--dry-run")
    assert tomllib.loads(again) == resolved, said
    # A command-line option overrides the file.
    changed = serve_here(capsys, "--config", str(file), "--max-model-len", "64", "--dry-run")[1]
    assert tomllib.loads(changed)["engine"]["max_model_len"] == 64


def test_a_dry_run_prints_no_secret(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hf_abcdefghijkl"
    loader = {
        "endpoint_url": "http://here",
        "secret_access_key": secret,
        "more": [{"api-key": secret}],
    }
    _, said, errors = serve_here(
        capsys,
        *("--model", str(model), "--tokenizer", str(model), "--dtype", "float32", "--dry-run"),
        *("--hf-token", secret, "--max-num-batched-tokens", "512"),
        *("--model-loader-extra-config", json.dumps(loader)),
    )
    assert secret not in said + errors
    engine = tomllib.loads(said)["engine"]
    assert engine["hf_token"] == "***"
    assert engine["model_loader_extra_config"] == {
        "endpoint_url": "http://here",
        "secret_access_key": "***",
        "more": [{"api-key": "***"}],
    }
    assert (engine["tokenizer"], engine["max_num_batched_tokens"]) == (str(model), 512)


@pytest.mark.parametrize("durability", ["fsync", "process"])
def test_a_durability_without_a_place_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], durability: str
) -> None:
    options = ("--model", str(model), "--dtype", "float32", "--max-model-len", "128", "--dry-run")
    status, _, said = serve_here(capsys, *options, "--set", f"journal.durability={durability}")
    assert status == 2 and f'durability "{durability}" needs folder or url' in said
    # The dry run prints the durability that the server would promise.
    _, printed, _ = serve_here(capsys, *options)
    assert tomllib.loads(printed)["journal"]["durability"] == "none"
    _, printed, _ = serve_here(capsys, *options, "--set", f"journal.folder={tmp_path}")
    assert tomllib.loads(printed)["journal"]["durability"] == "fsync"


def test_what_cannot_be_served_is_said_in_a_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        listen = ("--listen", f"127.0.0.1:{port}")
        status, _, said = serve_here(capsys, "--model", str(model), *listen)
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in said
    empty = serve("--model", str(tmp_path), "--listen", "127.0.0.1:0")
    assert empty.returncode == 2
    assert f"--model: the folder {tmp_path} is not a model: it has no config.json" in empty.stderr
    nothing = tmp_path / "nothing"
    status, _, said = serve_here(capsys, "--model", str(nothing), "--listen", "127.0.0.1:0")
    assert (status, said) == (2, f"penstock serve: --model: there is no folder {nothing}\n")
    status, _, said = serve_here(capsys, "--model", str(model), "--no-such-option", "1")
    assert status == 2
    assert "no-such-option" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["listen=nowhere"], "HOST:PORT"),
        (["leases.seconds=-1"], "leases.seconds"),
        (["leases.seconds=inf"], "leases.seconds"),
        (["leases.max_attempts=true"], "max_attempts: expected a whole number, got true"),
        (["leases.secnods=1"], "secnods"),
        (["weights.in_flight=sometimes"], "sometimes"),
        (["novalue"], "key=value"),
        (["listen=a:1", "listen.x=1"], "listen is 'a:1' already, and not a table"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.load(None, settings)


def test_the_options_that_are_known_before_vllm_is_imported_are_those_of_its_parser() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from penstock.server.vllm.options import _Parser  # pyright: ignore[reportPrivateUsage]

    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False))
    names = {name for action in parser._actions for name in action.option_strings}
    accepted = {name[2:] for name in names if name.startswith("--")}
    assert accepted - known_options() == {name for name in accepted if name[:3] == "no-"}
