"""`penstock up` with several engine servers, without Ray: its file, its restarts, and what remains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.__main__ import main
from penstock.up.cast import Programs, make_cast, shares
from penstock.up.checks import check_servers
from penstock.up.config import UpConfig, UpConfigInvalid, load
from penstock.up.placement import PlacementFailed, share_devices
from penstock.up.processes import Command, ProcessFailed, end_in_turn
from penstock.up.state import FolderInUse, is_running, last_words, locked
from penstock.up.supervisor import Cast, Restarts, Supervisor, reachable
from tests.faults.test_supervised_run import check
from tests.support.clusters import ROLES, all_gone, cluster, write_cluster

ELSEWHERE = ["cluster.placement=ray", "cluster.address=auto"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_cluster(tmp_path, "processes", 8)


def configured(path: Path, *settings: str) -> UpConfig:
    return load(path, list(settings))


# The file


def test_engine_servers_get_the_engines_options_and_the_hub_their_addresses(path: Path) -> None:
    config = configured(path, "engines.engine.step-seconds=0.5", "engines.count=3")
    folder = path.parent
    assert config.engine_count == 3
    assert config.engines["engine"] == {"model": f"{folder}/model", "step-seconds": 0.5}
    assert (config.engines["listen"], config.engines["http"]) == ("127.0.0.1:0", {"listen": ""})
    assert config.serve["engine"] == {"model": f"{folder}/model"}
    assert config.serve["pool"]["engines"] == [f"file:{folder}/out/engines"]
    assert config.train is not None
    assert config.train["model"]["path"] == f"{folder}/model"
    assert list(shares(config)) == ["engine-1", "engine-2", "engine-3", "hub", "worker", "trainer"]
    check_servers(config)


def test_a_file_without_engines_has_one_server_as_ever(path: Path) -> None:
    text = path.read_text().replace("[engines]\ncount = 2\n", "")
    path.write_text(text)
    config = configured(path)
    assert (config.engine_count, config.engines) == (0, {})
    assert config.serve["engine"]["step-seconds"] == 0.002
    cast = make_cast(config, Programs(), resume=False)
    assert (cast.server_name, list(cast.engines)) == ("server", [])
    assert list(shares(config)) == ["server", "worker", "trainer"]


def test_ranks_are_rank_0s_to_start_here_and_are_placed_one_by_one_elsewhere(path: Path) -> None:
    for placement, ranks, option in (("processes", 1, True), ("ray", 3, False)):
        config = configured(path, f"cluster.placement={placement}", "up.trainer_ranks=3")
        cast = make_cast(config, Programs(), resume=True)
        assert cast.trainer is not None
        command = cast.trainer("127.0.0.1:1", True)
        assert command.ranks == ranks
        assert ("--ranks" in command.arguments) is option
        assert [name for name in shares(config) if name.startswith("trainer")] == [
            "trainer",
            "trainer-rank-1",
            "trainer-rank-2",
        ]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["engines.count=0"], "count: .*got 0"),
        (["cluster.placement=slurm"], r"cluster\.placement: .*got 'slurm'"),
        (["cluster.engine.gpus=1.5"], "whole number"),
        (["cluster.engine.cpus=0"], r"cluster\.engine\.cpus: .*got 0"),
        (["cluster.engine.resources={GPU = 1}"], "GPU is set with `gpus`"),
        (["cluster.engine.resources={ssd = -1}"], r"cluster\.engine\.resources\.ssd: .*got -1"),
        (["cluster.engines=2"], r"cluster\.engines: unknown setting; did you mean engines\?"),
        (["serve.pool.engines=a:1"], r"serve\.pool\.engines: not allowed with \[engines\]"),
        (["engines.listen=127.0.0.1:77"], "several engine servers cannot share"),
        (["engines.leases.second=1"], r"\[engines\]: leases\.second"),
        (
            ["engines.listen=0.0.0.0:0"],
            "can be reached from outside and needs security.certificate",
        ),
        (ELSEWHERE, r"serve\.listen: workers and trainer on other nodes cannot reach 127.0.0.1:0"),
        (
            [*ELSEWHERE, "serve.listen=0.0.0.0:5", "serve.security.insecure=true"],
            r"\[engines\]: 0.0.0.0:0 can be reached from outside and needs",
        ),
        (
            ["engines.security.certificate=c", "engines.security.key=k"],
            r"engines\.security\.certificate: the hub needs serve\.pool\.ca",
        ),
        (["engines.security.tokens=t"], r"the hub needs serve\.pool\.token_file"),
    ],
)
def test_what_cannot_be_or_lets_anybody_in_is_refused(
    path: Path, settings: list[str], complaint: str
) -> None:
    with pytest.raises(UpConfigInvalid, match=complaint):
        check_servers(configured(path, *settings))


@pytest.mark.parametrize(
    "settings",
    [
        [*ELSEWHERE, "cluster.strategy=STRICT_PACK"],
        ["cluster.placement=ray"],
        [
            *ELSEWHERE,
            *("serve.listen=0.0.0.0:5", "serve.security.insecure=true"),
            "engines.security.insecure=true",
        ],
        [
            *("engines.security.certificate=c", "engines.security.key=k"),
            *("engines.security.tokens=t", "serve.pool.ca=ca", "serve.pool.token_file=f"),
        ],
    ],
)
def test_what_is_closed_or_said_to_be_is_not_refused(path: Path, settings: list[str]) -> None:
    check_servers(configured(path, *settings))


def test_an_address_of_every_interface_is_called_at_its_host() -> None:
    assert reachable("0.0.0.0:5", "10.0.0.7") == "10.0.0.7:5"
    assert reachable("[::]:5", "10.0.0.7") == "10.0.0.7:5"
    assert reachable("rollouts.example:5", "10.0.0.7") == "rollouts.example:5"


def test_gpus_of_a_machine_are_divided_as_ray_does() -> None:
    def devices(visible: list[str] | None, **wanted: float) -> list[str]:
        told = share_devices(wanted, visible)
        return [told[name]["CUDA_VISIBLE_DEVICES"] for name in wanted]

    assert share_devices({"a": 0, "b": 0}, None) == {}
    assert devices(None, a=1, b=0, c=2) == ["0", "", "1,2"]
    assert devices(["4", "7"], a=1, b=1) == ["4", "7"]
    assert devices(None, a=0.5, b=0.5, c=1) == ["0", "0", "1"]
    assert devices(None, a=0.6, b=0.6, c=1) == ["0", "1", "2"]
    with pytest.raises(PlacementFailed, match="2 are requested, CUDA_VISIBLE_DEVICES names 1"):
        devices(["4"], a=1, b=1)


# Running processes


def shell(folder: Path, name: str, script: str) -> Command:
    return Command(name, ("/bin/sh", "-c", script), folder / f"{name}.log")


SERVES = 'echo "penstock serving x on 127.0.0.1:$$ (weight version 0)"'


async def test_a_hub_is_told_of_the_engines_that_serve_and_stops_before_them(
    tmp_path: Path,
) -> None:
    listed, ended = tmp_path / "engines", tmp_path / "ended"
    trap, stay = "trap 'echo {} >> {}; exit 0' TERM", "while :; do sleep 0.02; done"

    def staying(name: str, first: str) -> Command:
        return shell(tmp_path, name, f"{trap.format(name, ended)}; {first}; {stay}")

    cast = Cast(
        lambda _: staying("hub", f"until test -s {listed}; do sleep 0.02; done; {SERVES}"),
        {"worker": lambda _: staying("worker", "echo begun")},
        lambda _, resume: staying("trainer", f"echo {resume}"),
        engines={name: lambda name=name: staying(name, SERVES) for name in ("e1", "e2")},
        engines_file=listed,
        server_name="hub",
    )
    events: list[tuple[str, str]] = []
    supervisor = Supervisor(
        cast, Restarts(3, first_seconds=0.01), lambda who, what: events.append((who, what))
    )
    running = asyncio.create_task(supervisor.run())

    async def until_listed(pids: list[int]) -> None:
        async with asyncio.timeout(20):
            while listed.read_text().split() != [f"127.0.0.1:{pid}" for pid in pids]:
                assert not running.done(), running.result()
                await asyncio.sleep(0.02)

    try:
        async with asyncio.timeout(20):
            # A script that ended before it set its trap would be missing from the order.
            for log in (tmp_path / "trainer.log", tmp_path / "worker.log"):
                while not (log.exists() and log.read_text()):
                    await asyncio.sleep(0.02)
        first, second = supervisor.started[3]
        await until_listed([first.pid, second.pid])
        os.kill(first.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while supervisor.started[3][0] is first:
                await asyncio.sleep(0.02)
        await until_listed([supervisor.started[3][0].pid, second.pid])
        assert ("e1", "was ended by SIGKILL; starting again in 0.01 s (1 of 3 restarts)") in events
        assert [who for who, what in events if "again" in what] == ["e1", "e1"]
        running.cancel()
        await asyncio.wait([running])
    finally:
        running.cancel()
        await end_in_turn(supervisor.started, 10)
    order = ended.read_text().split()
    assert order[:3] == ["trainer", "worker", "hub"]
    assert sorted(order[3:]) == ["e1", "e2"]


async def test_an_engine_server_that_never_served_stops_everything(tmp_path: Path) -> None:
    cast = Cast(
        lambda _: shell(tmp_path, "hub", "exec sleep 60"),
        engines={"e1": lambda: shell(tmp_path, "e1", "echo no such model; exit 1")},
        engines_file=tmp_path / "engines",
    )
    supervisor = Supervisor(cast, Restarts(), lambda *_: None)
    try:
        with pytest.raises(ProcessFailed, match="the e1 exited 1"):
            await supervisor.run()
    finally:
        await end_in_turn(supervisor.started, 5)


@pytest.mark.timeout(400)
async def test_a_run_goes_on_to_its_end_though_each_of_it_is_killed(tmp_path: Path) -> None:
    steps = 15
    async with cluster(tmp_path, "processes", steps, held=True) as running:
        await running.until(lambda: running.steps >= 2)

        async def kill(names: Sequence[str]) -> None:
            for name in names:
                await running.came_back(name, await running.kill(name, actor=False))

        # At least one engine is alive at any time.
        await asyncio.gather(kill(["engine-1", "engine-2"]), kill(["worker", "trainer", "hub"]))
        running.go_on()
        assert await asyncio.wait_for(running.ending, 120) == 0
        check(running.out, steps)
        for name in ROLES:
            assert f"{name}: was ended by SIGKILL; starting again" in running.events
        states = {name: role["state"] for name, role in running.roles().items()}
        assert states == {**dict.fromkeys(ROLES, "ended"), "trainer": "done"}
        await all_gone(running.mark)


# Status output


def test_a_status_shows_each_role_and_its_last_words(tmp_path: Path, path: Path) -> None:
    shown = CliRunner().invoke(main, ["up", str(path), "--status"])
    assert (shown.exit_code, "nothing has run in" in shown.output) == (1, True)
    out = tmp_path / "out"
    out.mkdir()
    (out / "hub.log").write_text("first\n[last] words\n\n")
    role = {
        "name": "hub",
        "state": "serving",
        "host": "h",
        "pid": 7,
        "restarts": 2,
        "since": 0.0,
        "address": "10.0.0.1:5",
        "log": str(out / "hub.log"),
    }
    (out / "state.json").write_text(json.dumps({"pid": 1, "placement": "ray", "roles": [role]}))
    shown = CliRunner().invoke(main, ["up", str(path), "--status"])
    assert shown.exit_code == 0
    first, _, hub = shown.output.splitlines()
    assert first == f"{out}: stopped, step 0/?, reward -"
    for text in ("hub", "serving", "10.0.0.1:5", "[last] words"):
        assert text in hub
    with locked(out):
        shown = CliRunner().invoke(main, ["up", str(path), "--status"])
    assert shown.output.startswith(f"{out}: starting, ")
    assert last_words(out / "none.log") == ""


def test_a_folder_has_one_run_at_a_time(tmp_path: Path, path: Path) -> None:
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"):
        assert is_running(tmp_path / "out")
        with pytest.raises(FolderInUse):
            locked(tmp_path / "out").__enter__()
        shown = CliRunner().invoke(main, ["up", str(path), "--resume"])
        assert shown.exit_code == 2
        assert "another `penstock up` is running in" in shown.output
    assert not is_running(tmp_path / "out")
