"""The two servers that faults are applied to, each started once for all tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.report import report_of
from tests.faults.sites import Site, fake_site, vllm_site
from tests.faults.trainers import Nursery, nursing
from tests.support.tiny_model import make_tiny_model

HERE = Path(__file__).parent
LONG_SECONDS = 7_200


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def fake(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site]:
    """A server around the fake engine."""
    async with fake_site(tmp_path_factory.mktemp("fake")) as site:
        yield site


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site]:
    """A server around real vLLM."""
    async with vllm_site(tmp_path_factory.mktemp("vllm")) as site:
        yield site


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that trainers train."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """The nursery that forks trainers."""
    with nursing() as running:
        yield running


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A request for many faults also raises the time limit of each test."""
    if report_of(config).count is None:
        return
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_SECONDS))
