"""The two servers that faults happen to, each started once for all of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from tests.faults.sites import Site, fake_site, vllm_site


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
