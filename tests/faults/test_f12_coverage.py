"""F12: inputs guided by the server lines that they reach; see `coverage_fuzz`.

make fuzz FUZZ_SECONDS=3600
"""

from __future__ import annotations

import importlib.util
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.report import Report
from tests.server.rpc.test_wire_errors import RPCS

ROOT = Path(__file__).resolve().parents[2]
QUICK_SECONDS = 2
START_SECONDS = 300.0
"""The most time spent before and after the fuzzing."""
MEMORY_MB = 2048
DONE = re.compile(r"^Done (\d+) runs in", re.MULTILINE)
COVERED = re.compile(r"cov: (\d+)")


def test_bytes_that_reach_something_new(
    tmp_path: Path, report: Report, request: pytest.FixtureRequest
) -> None:
    name, node = "bytes led by coverage", request.node.nodeid
    if importlib.util.find_spec("atheris") is None:
        report.skipped("F12 fake", name, "atheris is not to be had for this Python")
        pytest.skip("no atheris")
    wanted: int = request.config.getoption("fuzz_seconds")  # pyright: ignore[reportAssignmentType]
    seconds = QUICK_SECONDS if report.count is None else wanted
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    command = [sys.executable, "-m", "tests.faults.coverage_fuzz", str(corpus), "-timeout=60"]
    command += [f"-max_total_time={seconds}", f"-seed={report.seed}"]
    # Linux counts this process's own peak as the fuzzer's, because it is its parent.
    inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    command.append(f"-rss_limit_mb={inherited + MEMORY_MB}")
    command.append(f"-artifact_prefix={tmp_path}/")
    ended = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds + START_SECONDS,
    )
    done, covered = DONE.search(ended.stdout), COVERED.findall(ended.stdout)
    if ended.returncode or done is None:
        inputs = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
        report.failed("F12 fake", name, report.seed, node, 0, 1)
        raise AssertionError(f"sent {inputs}:\n{ended.stdout[-6000:]}")
    count = int(done[1])
    assert count >= len(RPCS)
    report.survived("F12 fake", name, count, "examples", f"{covered[-1]} branches reached")
