"""A model's name is looked up in the cache, and once on the hub."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.machine.models import ModelUnusable, Weights, find_model, look_up
from tests.machine.test_doctor import write_model

asked: list[str] = []


class Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        # The client also looks up its own settings.
        asked.extend([self.path] if self.path.startswith("/api/models/") else [])
        if self.path.endswith("/broken"):
            self.send_response(500)
        elif self.path.endswith("/there"):
            self.send_response(200)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
        sizes = b'{"parameters": {"F32": 135}, "total": 135}'
        body = b'{"id": "org/there", "siblings": [], "safetensors": %s}' % sizes
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given: object) -> None:
        """Does not log."""


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    write_model(tmp_path, "models--org--cached")
    yield
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "problem", "requests"),
    [
        ("org/cached", "", 0),
        ("org/there", "", 1),
        # Only a name with an owner is looked up; others are left to the library that loads them.
        ("", "", 0),
        ("gpt2", "", 0),
        ("s3://bucket/model", "", 0),
        ("org/model:Q4_K_M", "", 0),
        (
            "org/nothing",
            "the hub has no model org/nothing; if it is private, log in with `hf auth login`",
            1,
        ),
        ("org/cachd", "the hub has no model org/cachd; did you mean org/cached?", 1),
        ("org/broken", "and the hub cannot be asked: Server error '500", 1),
    ],
)
def test_a_name_is_looked_up(name: str, problem: str, requests: int) -> None:
    if problem:
        with pytest.raises(ModelUnusable, match=re.escape(problem)):
            look_up(name)
    else:
        look_up(name)
    assert len(asked) == requests


def test_its_size_is_that_in_the_cache_or_on_the_hub(tmp_path: Path) -> None:
    assert find_model("org/cached") == Weights(2, 8)
    assert find_model("org/there") == Weights(135)
    # A download would bring what lacks, but not what is cut off.
    folder = write_model(tmp_path, "models--org--part")
    (folder / "config.json").unlink()
    with pytest.raises(ModelUnusable, match="the hub has no model org/part"):
        look_up("org/part")
    (folder / "config.json").write_text("{}")
    os.truncate((folder / "model.safetensors").resolve(), 40)
    with pytest.raises(ModelUnusable, match="cut off or broken"):
        look_up("org/part")


def test_a_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert look_up("org/model") == Weights() and not asked
    with pytest.raises(ModelUnusable, match="is not a model: it has no config"):
        find_model("org/model")
    with pytest.raises(ModelUnusable, match="there is no folder"):
        find_model("./nowhere")
