"""Shared fixtures: servers around a fake engine, and the external-process sandbox."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path, PurePosixPath

if "PYTEST_XDIST_WORKER" in os.environ:
    # Set before torch is imported. If every test process starts one thread per core, the threads
    # spend about a quarter of their time waiting for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import xdist.remote
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from penstock.client.external.sandbox import SandboxMissing, find_sandbox
from penstock.client.external.settings import SandboxUse
from tests.faults.report import (  # noqa: F401
    pytest_addoption,
    pytest_terminal_summary,
    report,
)
from tests.support.harness import Harness, serve
from tests.support.slow import VLLM, is_slow, is_slow_file, turn

# Searching tests and libraries for reference cycles, while they are imported and in each full collection,
# would cost a tenth of the time.
gc.disable()

# A shell starts background jobs with SIGINT ignored, and so would be every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Programs fetched by `.ci/programs.py`, used if the machine has none installed.
PROGRAMS = Path(__file__).resolve().parents[1] / ".venv" / "share" / "programs"
os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), str(PROGRAMS)))

# No deadline: an example's duration depends on how busy the machine is.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


TESTS = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files that hold only slow tests when slow tests are deselected, so they are not imported."""
    fast = "not slow" in str(config.getoption("markexpr"))
    slow = is_slow_file(PurePosixPath(collection_path.relative_to(TESTS)))
    return True if fast and slow else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the files, and marks what `make test-fast` leaves out."""
    items.sort(key=lambda item: turn(PurePosixPath(item.path.relative_to(TESTS))))
    for item in items:
        test = item.name.partition("[")[0]
        if is_slow(PurePosixPath(item.path.relative_to(TESTS)), test):
            item.add_marker(pytest.mark.slow)


class Scheduling(LoadFileScheduling):
    """Gives all tests of a file to one process, and the files with vLLM to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "vllm" if file.removeprefix("tests/") in VLLM else file


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: xdist.remote.Producer
) -> LoadFileScheduling | None:
    """Replaces the scheduling of `--dist loadfile`, and no other."""
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncGenerator[Harness]:
    """A server around a fast fake engine."""
    async with serve(tmp_path) as running:
        yield running


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncGenerator[Harness]:
    """A server whose engine takes five milliseconds per token."""
    async with serve(tmp_path, step_seconds=0.005) as running:
        yield running


@pytest.fixture(scope="session")
def sandbox_here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reason why this machine has no sandbox; empty if it has one."""
    try:
        find_sandbox(tmp_path_factory.mktemp("probe"), share_network=False, read=(), hidden=())
    except SandboxMissing as error:
        return str(error)
    return ""


@pytest.fixture(params=[SandboxUse.OFF, SandboxUse.REQUIRE], ids=["open", "sandbox"])
def lock(request: pytest.FixtureRequest, sandbox_here: str) -> SandboxUse:
    """Runs the test with and without the sandbox; skips the sandboxed
    run if there is no sandbox."""
    if request.param is SandboxUse.REQUIRE and sandbox_here:
        pytest.skip(sandbox_here)
    return request.param


@pytest.fixture
def locked(sandbox_here: str) -> SandboxUse:
    """Requires the sandbox; skips the test if this machine has none."""
    if sandbox_here:
        pytest.skip(sandbox_here)
    return SandboxUse.REQUIRE
