"""The documentation agrees with the code, as far as a test can compare them."""

from __future__ import annotations

import re
from pathlib import Path

import google.rpc.error_details_pb2  # noqa: F401
import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse

import penstock.v1.task_service_pb2  # noqa: F401
from penstock.server.core.errors import STATUS_CODES
from penstock.trainer.config.trainer import load_config

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = tuple(ROOT / "clients" / name / "README.md" for name in ("go", "typescript"))
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "proto" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *CLIENTS,
)


def test_the_error_table_of_the_contract_is_the_servers() -> None:
    table: dict[str, set[str]] = {}
    for line in (ROOT / "proto" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and cells[0].replace("_", "").isupper():
            table[cells[0]] = set(cells[1].split(":")[0].split(", "))
    served: dict[str, set[str]] = {}
    for reason, code in STATUS_CODES.items():
        served.setdefault(code.name, set()).add(reason.value)
    assert table == served


def test_the_readmes_agent_is_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks == [(ROOT / "examples" / "agent.py").read_text()]


def test_the_agent_is_ten_lines() -> None:
    lines = (ROOT / "examples" / "agent.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.startswith(("import", "from"))]
    assert len(code) <= 10


def test_the_examples_configuration_is_one_that_the_trainer_reads() -> None:
    config = load_config(ROOT / "examples" / "arithmetic.toml")
    assert config.data.reasoning_gym is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_a_page_links_to_is_there(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def test_the_calls_by_hand_can_be_made_one_after_the_other() -> None:
    # A trajectory id that has a line to itself belongs to a Generate, which opens the trajectory.
    page = (ROOT / "docs" / "guides" / "grpcurl.md").read_text()
    opened = re.findall(r'^  "trajectory_id": "([^"]+)"', page, re.M)
    assert len(opened) == len(set(opened)) == 2


def test_every_make_target_of_a_page_is_there() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    code = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    used = set(re.findall(r"`make ([a-z-]+)", text) + re.findall(r"^make ([a-z-]+)", code, re.M))
    assert len(used) > 10
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert used <= defined


def test_every_message_of_the_clients_page_is_one() -> None:
    text = (ROOT / "docs" / "guides" / "clients.md").read_text()
    blocks = re.findall(r"```textproto\n# ([\w.]+)\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == text.count("```textproto") >= 8
    for name, body in blocks:
        message = GetMessageClass(Default().FindMessageTypeByName(name))()
        assert Parse(body, message).ByteSize() > 0


def test_the_architecture_names_files_and_functions_that_exist() -> None:
    """A walk that leads to a file that has moved is worse than none."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:server|trainer|tests)/[\w/]+\.py)`(?:, `([\w.]+)`)?", page)
    assert len(named) > 50
    for path, name in named:
        assert (ROOT / path).exists(), path
        assert name.rpartition(".")[2] in (ROOT / path).read_text(), (path, name)
    for walk in page.split("\n## ")[2:5]:
        stations = re.findall(r"^\| \d+ \| `([^`]+)`", walk, re.MULTILINE)
        assert 5 < len(stations) <= 12
        assert len(set(stations)) == len(stations)
