"""The manifests of examples/kubernetes: valid against Kubernetes' schemas, and true to the commands
they run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

kubernetes_validate: Any = pytest.importorskip(
    "kubernetes_validate", reason="Kubernetes' schemas are not installed"
)

from penstock.cli.__main__ import main  # noqa: E402
from penstock.server.__main__ import serve  # noqa: E402
from penstock.server.config import settings as serve_config  # noqa: E402
from penstock.server.config.settings import ServeConfig  # noqa: E402
from penstock.trainer.config.trainer import load_config  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""The oldest version that has every field in use, and the newest known one."""

DOCUMENTS: list[dict[str, Any]] = [
    document
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
NAMES = {(document["kind"], document["metadata"]["name"]): document for document in DOCUMENTS}
CONFIG = NAMES["ConfigMap", "penstock-config"]["data"]
SERVERS = {
    "hub.toml": NAMES["StatefulSet", "penstock-hub"],
    "engine.toml": NAMES["StatefulSet", "penstock-engines"],
}
WORKLOADS = [document for document in DOCUMENTS if "template" in document.get("spec", {})]


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    return found


def labels(workload: dict[str, Any]) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def named(workload: dict[str, Any]) -> str:
    return workload["metadata"]["name"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", NAMES, ids="/".join)
def test_a_manifest_is_what_kubernetes_reads(name: tuple[str, str], version: str) -> None:
    kubernetes_validate.validate(NAMES[name], version, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "containers", 0, "imagge"), "x"),
        (("spec", "template", "spec", "containers", 0, "livenessProbe", "periodSeconds"), "soon"),
        (("spec", "template", "spec", "terminationGracePeriod"), 60),
    ],
    ids=lambda value: str(value)[-24:],
)
def test_a_manifest_that_is_wrong_is_refused(path: tuple[str | int, ...], value: object) -> None:
    wrong: Any = copy.deepcopy(NAMES["StatefulSet", "penstock-engines"])
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_no_name_is_given_twice() -> None:
    assert len(NAMES) == len(DOCUMENTS)
    assert len(WORKLOADS) == 4


# Commands


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_a_command_is_one_that_penstock_takes(workload: dict[str, Any]) -> None:
    program, name, *arguments = container(workload)["command"]
    assert program == "penstock"
    command = serve if name == "serve" else main.commands[name]
    context = command.make_context(name, list(arguments))
    # A server passes options it does not know to its engine, so a typo would end up here.
    assert not context.params.get("engine_options")


def probes(workload: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield kind, container(workload)[kind]["exec"]["command"]


@pytest.mark.parametrize("workload", SERVERS.values(), ids=named)
def test_a_probe_asks_the_server_beside_it(workload: dict[str, Any]) -> None:
    (port,) = container(workload)["ports"]
    for kind, (program, name, *arguments) in probes(workload):
        context = main.commands[name].make_context(name, arguments)
        assert (program, name) == ("penstock", "health")
        assert context.params["address"] == f"127.0.0.1:{port['containerPort']}"
        # A server that waits for its trainer is not ready, but must not be restarted.
        assert context.params["alive"] is (kind != "readinessProbe")
        # The command's own timeout comes before the probe's.
        probe = container(workload)[kind]
        assert context.params["timeout"] < probe["timeoutSeconds"]


def test_the_hub_has_longer_to_start_than_the_engine_that_it_waits_for() -> None:
    probes = {name: container(server)["startupProbe"] for name, server in SERVERS.items()}
    seconds = {
        name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()
    }
    assert seconds["hub.toml"] > seconds["engine.toml"]


def test_an_option_that_is_not_there_is_refused() -> None:
    with pytest.raises(click.UsageError):
        main.commands["rollout"].make_context("rollout", ["--server=a:1", "--concurency=8"])


# Configuration


def read_server(tmp_path: Path, name: str) -> ServeConfig:
    path = tmp_path / name
    path.write_text(CONFIG[name])
    return serve_config.load(path, [])


@pytest.mark.parametrize("name", SERVERS)
def test_a_servers_configuration_fits_its_pod(tmp_path: Path, name: str) -> None:
    config, workload = read_server(tmp_path, name), SERVERS[name]
    assert config.engine["model"]
    (port,) = container(workload)["ports"]
    assert config.listen == f"0.0.0.0:{port['containerPort']}"
    assert name in " ".join(container(workload)["command"])
    # Before the kill there is time for turns in flight, and for the shutdown after them.
    assert pod(workload)["terminationGracePeriodSeconds"] >= config.drain_seconds + 20
    security = config.security
    assert security.tokens and not security.insecure
    files = (config.pool.ca, config.pool.token_file, config.peers.ca, config.peers.token_file)
    for path in (security.certificate, security.key, security.tokens, *files):
        assert path is None or found_in(workload, path)


def test_the_hub_looks_up_the_engines_service(tmp_path: Path) -> None:
    hub = read_server(tmp_path, "hub.toml")
    service = NAMES["Service", "penstock-engines"]
    assert hub.pool.engines == (f"dns:{named(service)}:{service['spec']['ports'][0]['port']}",)
    assert service["spec"]["clusterIP"] == "None"
    # Otherwise the hub could not find an engine server without trusted weights, to which it must
    # send them.
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert hub.pool.server_name == named(service)
    assert hub.pool.ca and hub.pool.token_file
    journal = hub.journal.folder
    assert journal is not None
    mounted = {mount["mountPath"] for mount in container(SERVERS["hub.toml"])["volumeMounts"]}
    assert str(journal.parent) in mounted


def test_engines_hand_weights_on_to_each_other(tmp_path: Path) -> None:
    engine = read_server(tmp_path, "engine.toml")
    assert engine.peers.server_name == named(NAMES["Service", "penstock-engines"])
    assert engine.peers.ca and engine.peers.token_file
    engines = SERVERS["engine.toml"]
    policy = next(
        document
        for document in DOCUMENTS
        if document["kind"] == "NetworkPolicy"
        and document["spec"]["podSelector"]["matchLabels"].items() <= labels(engines).items()
    )
    admitted = [
        source["podSelector"]["matchLabels"]
        for rule in policy["spec"]["ingress"]
        for source in rule["from"]
    ]
    for caller in (engines, SERVERS["hub.toml"]):
        assert any(wanted.items() <= labels(caller).items() for wanted in admitted)


def test_the_trainer_and_the_workers_call_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "trainer.toml"
    path.write_text(CONFIG["trainer.toml"])
    trainer = load_config(path)
    service = NAMES["Service", "penstock-hub"]
    address = f"{named(service)}:{service['spec']['ports'][0]['port']}"
    assert trainer.server.address == address
    # Otherwise the trainer would never find a hub that waits for it.
    assert service["spec"]["publishNotReadyAddresses"] is True
    job, workers = NAMES["Job", "penstock-trainer"], NAMES["Deployment", "penstock-workers"]
    assert trainer.server.ca and trainer.server.token_file
    for file in (trainer.server.ca, trainer.server.token_file):
        assert found_in(job, file)
    runs = {
        mount["mountPath"] for mount in container(job)["volumeMounts"] if mount["name"] == "runs"
    }
    assert {str(trainer.run.out.parent)} == runs
    assert trainer.checkpoint.every_steps and "--resume" in container(job)["command"]
    _, name, *arguments = container(workers)["command"]
    worker = main.commands[name].make_context(name, arguments).params
    assert worker["servers"] == (address,)
    assert found_in(workers, worker["security_ca"])
    assert found_in(workers, worker["security_token_file"])
    assert pod(workers)["terminationGracePeriodSeconds"] > worker["drain_timeout"]
    module, _, function = worker["reward"].partition(":")
    assert f"def {function}(" in CONFIG[f"{module}.py"]


def found_in(workload: dict[str, Any], path: Path) -> bool:
    """Whether a file is in a volume that the pod mounts, from the secret or config map behind it."""
    mounts = {m["mountPath"]: m["name"] for m in container(workload)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(workload)["volumes"]}
    volume = volumes[mounts[str(path.parent)]]
    if "secret" in volume:
        return path.name in NAMES["Secret", volume["secret"]["secretName"]]["stringData"]
    return path.name in NAMES["ConfigMap", volume["configMap"]["name"]]["data"]


# References between manifests


def test_services_budgets_and_policies_select_pods_that_are_there() -> None:
    pods = [labels(workload) for workload in WORKLOADS]

    def selects(wanted: dict[str, str]) -> bool:
        return any(wanted.items() <= each.items() for each in pods)

    for document in DOCUMENTS:
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            assert selects(spec["selector"])
        if document["kind"] in ("PodDisruptionBudget", "StatefulSet", "Deployment"):
            assert selects(spec["selector"]["matchLabels"])
        if document["kind"] == "NetworkPolicy":
            assert selects(spec["podSelector"]["matchLabels"])
            for rule in spec["ingress"]:
                for source in rule["from"]:
                    assert selects(source["podSelector"]["matchLabels"])


@pytest.mark.parametrize("workload", SERVERS.values(), ids=named)
def test_a_service_leads_to_the_port_of_its_pods(workload: dict[str, Any]) -> None:
    (port,) = container(workload)["ports"]
    service = NAMES["Service", workload["spec"]["serviceName"]]
    (offered,) = service["spec"]["ports"]
    assert (offered["targetPort"], offered["port"]) == (port["name"], port["containerPort"])
    assert service["spec"]["selector"].items() <= labels(workload).items()


@pytest.mark.parametrize("workload", WORKLOADS, ids=named)
def test_a_pod_has_no_rights_it_does_not_need(workload: dict[str, Any]) -> None:
    spec, box = pod(workload), container(workload)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert box["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert box["resources"]["requests"] and box["resources"]["limits"]["memory"]
    mounted = {mount["name"] for mount in box["volumeMounts"]}
    claims = workload["spec"].get("volumeClaimTemplates", [])
    volumes = [volume["name"] for volume in spec["volumes"]] + [named(claim) for claim in claims]
    assert sorted(mounted) == sorted(volumes)


def test_no_secret_is_one() -> None:
    secrets = [document for document in DOCUMENTS if document["kind"] == "Secret"]
    assert secrets
    for secret in secrets:
        for value in secret["stringData"].values():
            assert "penstock_" not in value and "-----BEGIN" not in value
