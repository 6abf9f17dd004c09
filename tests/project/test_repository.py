"""The files by which others find, cite, report and check the project."""

from __future__ import annotations

import configparser
import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

check_jsonschema = pytest.importorskip(
    "check_jsonschema", reason="check-jsonschema, of the extra dev, is not installed"
)

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problems(schema: str, *paths: Path) -> str:
    """What the schema of a well-known kind of file does not allow; empty if all is well."""
    arguments = ("--builtin-schema", schema, "--default-filetype", "yaml", *map(str, paths))
    said = CliRunner().invoke(check_jsonschema.main, list(arguments))
    return "" if said.exit_code == 0 else said.output


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
        ("vendor.compose-spec", "docker/compose*.yaml"),
    ],
)
def test_a_file_is_what_its_reader_expects(schema: str, pattern: str) -> None:
    paths = sorted(ROOT.glob(pattern))
    assert paths
    assert problems(schema, *paths) == ""


def test_a_file_that_is_wrong_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "ci.yml"
    wrong.write_text("on: push\njobs: {ci: {steps: [{run: x}]}}\n")
    assert "runs-on" in problems("vendor.github-workflows", wrong)


def test_the_workflow_runs_what_every_change_must_pass() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["ci"]["steps"]
    (command,) = (step["run"] for step in steps if "run" in step)
    assert (ROOT / command).stat().st_mode & 0o100
    (python,) = (step["with"] for step in steps if "setup-python" in step.get("uses", ""))
    assert PROJECT["requires-python"] == f">={python['python-version']}"
    assert workflow["permissions"] == {"contents": "read"}


def test_a_form_of_an_issue_asks_at_least_one_question() -> None:
    for path in (FORMS / "bug.yml", FORMS / "question.yml"):
        form = yaml.safe_load(path.read_text())
        assert any(each.get("validations", {}).get("required") for each in form["body"])


def test_the_citation_and_the_changelog_are_the_projects() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["url"] == PROJECT["urls"]["Documentation"]
    assert PROJECT["urls"]["Changelog"].rpartition("/")[2] == "CHANGELOG.md"
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_a_hook_runs_a_program_of_the_environment() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} == {"ruff", "ruff-format", "buf-lint", "buf-format"}
    for hook in hooks:
        assert (ROOT / hook["entry"].split()[0]).exists()


def test_an_editor_indents_as_the_formatters_do() -> None:
    file = configparser.ConfigParser()
    file.read_string("[first]\n" + (ROOT / ".editorconfig").read_text())
    assert file["first"]["root"] == "true"
    assert file["*"]["indent_size"] == "4"
    assert file["{Makefile,*.go,go.mod}"]["indent_style"] == "tab"


def test_the_development_container_is_pinned_and_set_up_by_make() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    _, _, tag = container["image"].rpartition(":")
    assert re.fullmatch(r"\d+-3\.11-\w+", tag)
    program, target = container["postCreateCommand"].split()
    assert program == "make" and target in TARGETS
