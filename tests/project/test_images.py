"""The images of docker/: the files agree with the project and with each other.

`make images` builds and runs them, where a container runtime works.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.__main__ import main
from penstock.common.functions import find_function
from penstock.server.__main__ import serve
from penstock.server.config.settings import load as load_server
from penstock.trainer.config.trainer import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETUP["project"]
TARGETS = ("client", "cpu", "cuda")
SERVERS = ("cpu", "cuda")
IMAGES = {target: f"penstock-rl:{PROJECT['version']}-{target}" for target in TARGETS}
USER = "10001:10001"


@dataclass
class Stage:
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, name: str) -> str | None:
        return next((value for each, value in reversed(self.instructions) if each == name), None)


def read_dockerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    """The arguments before the first stage, and the stages by name."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = line.partition(" ")
        if name == "FROM":
            base, _, called = value.partition(" AS ")
            assert called and called not in stages
            stage = stages[called] = Stage(base)
        elif stage is None:
            assert name == "ARG"
            key, _, default = value.partition("=")
            arguments[key] = default
        else:
            stage.instructions.append((name, " ".join(value.split())))
    return arguments, stages


ARGUMENTS, STAGES = read_dockerfile()


def inherited(target: str, name: str) -> str | None:
    """The last such instruction of a target, or of the stages that it is built on."""
    stage: Stage | None = STAGES[target]
    while stage is not None:
        found = stage.last(name)
        if found is not None:
            return found
        stage = STAGES.get(stage.base)
    return None


def test_hadolint_has_no_complaint() -> None:
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent)
    if hadolint is None:
        pytest.skip("hadolint is not installed; it is in the extra dev")
    said = subprocess.run([hadolint, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_a_base_image_is_pinned_by_its_full_version() -> None:
    for stage in STAGES.values():
        if stage.base in STAGES:
            continue
        image = ARGUMENTS[stage.base.removeprefix("${").removesuffix("}")]
        assert re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", image)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_penstock_as_a_user_without_rights(target: str) -> None:
    assert STAGES[target].last("USER") == USER
    assert inherited(target, "ENTRYPOINT") == '["penstock"]'
    copied = [value for name, value in STAGES[target].instructions if name == "COPY"]
    # What built the packages stays in another stage.
    assert copied == [f"--from={target}-packages /opt/penstock /opt/penstock"]
    uid, _, _ = USER.partition(":")
    users = next(
        value
        for name in (target, STAGES[target].base)
        for kind, value in STAGES[name].instructions
        if kind == "RUN" and "useradd" in value
    )
    assert f"--uid {uid} " in users
    assert "/home/penstock/models" in users and "/var/lib/penstock" in users


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_has_the_labels_of_the_project(target: str) -> None:
    labels = inherited(target, "LABEL")
    assert labels is not None
    found = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', labels))
    assert found["source"] == PROJECT["urls"]["Repository"]
    assert found["documentation"] == PROJECT["urls"]["Documentation"]
    assert found["licenses"] == PROJECT["license"]
    assert found["version"] == "${VERSION}"
    stage = STAGES[target] if STAGES[target].last("LABEL") else STAGES[STAGES[target].base]
    assert ("ARG", f"VERSION={PROJECT['version']}") in stage.instructions


@pytest.mark.parametrize("target", TARGETS)
def test_a_server_is_asked_whether_it_is_alive(target: str) -> None:
    check = inherited(target, "HEALTHCHECK")
    if target not in SERVERS:
        assert check is None
        return
    assert check is not None
    options, _, command = check.partition(" CMD ")
    program, name, *arguments = json.loads(command)
    assert (program, name) == ("penstock", "health")
    asked = main.commands[name].make_context(name, arguments).params
    assert asked["alive"] and asked["address"] == "127.0.0.1:50051"
    # The command's own time limit comes before the runtime's.
    timeout = re.search(r"--timeout=(\d+)s", options)
    assert timeout and asked["timeout"] < int(timeout[1])


def test_an_image_installs_extras_of_the_project() -> None:
    defaults = dict(
        value.split("=", 1)
        for stage in STAGES.values()
        for name, value in stage.instructions
        if name == "ARG" and "=" in value
    )
    written = re.findall(r"penstock-rl\[([^\]]+)\]", DOCKERFILE.read_text())
    assert len(written) == len(TARGETS)
    for each in written:
        extras = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match[1]], each)
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_first_stage_is_sent_what_it_builds_from() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert lines[1] == "*"
    assert all((ROOT / path).exists() for path in sent)
    tool = SETUP["tool"]["setuptools"]
    needed = {"pyproject.toml", "setup.py", "README.md", *PROJECT["license-files"]}
    needed |= {
        "clients/python" if folder.startswith("clients/python/") else folder
        for folder in tool["package-dir"].values()
    }
    needed |= set(re.findall(r"--overrides (\S+)", DOCKERFILE.read_text()))
    assert sent == needed


# Compose

COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
CUDA = yaml.safe_load((ROOT / "docker" / "compose.cuda.yaml").read_text())
BUILT = [
    (name, service)
    for services in (COMPOSE["services"], CUDA["services"])
    for name, service in services.items()
    if "build" in service
]


def with_defaults(text: str) -> str:
    """Replaces compose's variables by the values that they have if they are not set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def command_of(service: dict[str, Any]) -> list[str]:
    return [with_defaults(argument) for argument in service["command"]]


@pytest.mark.parametrize(("name", "service"), BUILT)
def test_a_service_is_an_image_of_the_dockerfile(name: str, service: dict[str, Any]) -> None:
    build = service["build"]
    assert (ROOT / "docker" / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE
    assert service["image"] == IMAGES[build["target"]]


def test_kubernetes_names_images_of_the_dockerfile() -> None:
    manifests = (ROOT / "examples" / "kubernetes").glob("*.yaml")
    named = re.findall(r"image: (\S+)", "\n".join(path.read_text() for path in manifests))
    assert len(named) == 4
    assert set(named) == set(IMAGES.values())


@pytest.mark.parametrize("services", [COMPOSE["services"], CUDA["services"]])
def test_the_server_serves_without_a_published_port(services: dict[str, Any]) -> None:
    name, *arguments = command_of(services["server"])
    assert name == "serve"
    given = serve.make_context(name, list(arguments)).params
    config = load_server(None, [*given["settings"], f"listen={given['listen']}"])
    assert given["model"] and all(option.startswith("--") for option in given["engine_options"])
    assert config.listen == "0.0.0.0:50051" and config.security.insecure
    assert "ports" not in services["server"]
    (_, place), journal = COMPOSE["services"]["server"]["volumes"], config.journal.folder
    assert journal is not None and str(journal.parent) == place.partition(":")[2]


def test_worker_and_trainer_call_the_server() -> None:
    worker, trainer = COMPOSE["services"]["worker"], COMPOSE["services"]["trainer"]
    name, *arguments = command_of(worker)
    asked = main.commands[name].make_context(name, arguments).params
    assert asked["servers"] == ("server:50051",)
    find_function(asked["reward"], ("task", "trajectory"))
    file, place, _ = with_defaults(trainer["volumes"][0]).split(":")
    name, *arguments = command_of(trainer)
    asked = main.commands[name].make_context(name, arguments).params
    assert str(asked["config"]) == place
    config = load_config(ROOT / "docker" / file, asked["overrides"])
    assert config.server.address == "server:50051"
    assert config.checkpoint.every_steps and asked["resume"]
    assert str(config.run.out.parent) == trainer["volumes"][2].partition(":")[2]
    assert config.weights.transport == "stream"
    assert trainer["depends_on"] == {"server": {"condition": "service_healthy"}}
    # It serves nothing, so the image's check does not apply.
    assert trainer["healthcheck"] == {"disable": True}


def test_tensorboard_reads_the_trainers_figures() -> None:
    trainer, board = COMPOSE["services"]["trainer"], COMPOSE["services"]["tensorboard"]
    (out,) = [o.partition("run.out=")[2] for o in command_of(trainer) if "run.out=" in o]
    assert board["command"][0] == f"--logdir={out}/tensorboard"
    (volume,) = board["volumes"]
    assert volume == f"{trainer['volumes'][2]}:ro"
    assert [port.partition(":")[0] for port in board["ports"]] == ["127.0.0.1"]


# The images themselves


def find_runtime() -> str:
    """Docker or podman, if it can run containers; skips the test otherwise."""
    reasons: list[str] = []
    for runtime in ("docker", "podman"):
        if shutil.which(runtime) is None:
            reasons.append(f"there is no {runtime}")
            continue
        said = subprocess.run([runtime, "info"], capture_output=True, text=True, check=False)
        if said.returncode == 0:
            return runtime
        reasons.append(f"{runtime}: {(said.stderr.strip().splitlines() or ['no answer'])[-1]}")
    pytest.skip(f"no container runtime works: {'; '.join(reasons)}")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_built_and_runs(target: str) -> None:
    runtime = find_runtime()

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [runtime, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    image = IMAGES[target]
    run("build", "-f", str(DOCKERFILE), "--target", target, "-t", image, ".")
    assert PROJECT["version"] in run("run", "--rm", image, "--version")
    uid = run("run", "--rm", "--entrypoint", "id", image, "-u")
    assert uid.strip() == USER.partition(":")[0]
    command = "serve" if target in SERVERS else "rollout"
    assert "--help" in run("run", "--rm", image, command, "--help")
    if target in SERVERS:
        modules = "import torch, vllm, penstock.server, penstock.trainer"
        run("run", "--rm", "--entrypoint", "python", image, "-c", modules)
