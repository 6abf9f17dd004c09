"""Holds the bytes of the active version: the base of the next delta, and the fallback of a failed switch.

The base model is not held, because it can be read again from its folder. A pool also needs the
bytes for engines that join late. So if a pool's active version is an adapter, the adapter is held in
addition to the full weights under it. With an adapter, a server with its own engine holds nothing,
because the engine keeps both.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from penstock.server.engine.protocol import StagedWeights
from penstock.server.weights.staging.incoming import Staged
from penstock.server.weights.staging.manifest import WeightRefused
from penstock.server.weights.staging.stage import WeightStage
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

BASE_VERSION = 0
"""The version of the model as the engine read it from its folder."""


@dataclass(eq=False)
class HeldWeights:
    """At most one full version and one adapter on it, complete and verified, in this server's memory."""

    stage: WeightStage
    base_model: Path | None
    """The folder of version 0."""
    _: KW_ONLY
    enabled: bool
    """Whether anything is ever held."""
    _full: Staged | None = field(default=None, init=False)
    _adapter: Staged | None = field(default=None, init=False)

    @property
    def weight_version(self) -> int:
        """Zero if no full version is held."""
        return self._full.weight_version if self._full is not None else 0

    def get(self, weight_version: int) -> Staged | None:
        """Returns this full version if it is the one held."""
        return self._full if self.weight_version == weight_version else None

    async def replace(self, staged: Staged) -> None:
        """Takes `staged` over, if there is room. Raises WeightRefused if its uploader wrote to it after
        verification."""
        self.release()
        self._full = await self._take_over(staged)

    async def replace_adapter(self, staged: Staged) -> None:
        """Takes `staged` over. Raises as `replace` does."""
        self._release_adapter()
        self._adapter = await self._take_over(staged)

    async def _take_over(self, staged: Staged) -> Staged | None:
        try:
            if self.enabled:
                try:
                    return await self.stage.hold(staged.retain())
                except WeightRefused as error:
                    if error.reason is not Reason.DISK_FULL:
                        raise
                    logger.warning("version %s is not held: %s", staged.weight_version, error)
            await self.stage.check_again(staged)
            return None
        finally:
            staged.release()

    def release(self) -> None:
        self._release_adapter()
        if self._full is not None:
            self._full.release()
            self._full = None

    def _release_adapter(self) -> None:
        if self._adapter is not None:
            self._adapter.release()
            self._adapter = None

    @contextlib.asynccontextmanager
    async def open(self, weight_version: int) -> AsyncGenerator[StagedWeights | None]:
        """Yields what the engine can load again, held or the base model; None if there is nothing."""
        adapter = self._adapter
        found = adapter is not None and adapter.weight_version == weight_version
        before = adapter if found else self.get(weight_version)
        try:
            if before is not None:
                before.retain()
            elif weight_version == BASE_VERSION and self.base_model is not None:
                before = await self.stage.read_base_model(BASE_VERSION, self.base_model)
        except WeightRefused as error:
            logger.error("cannot read version %s again: %s", weight_version, error)
        try:
            yield before.weights if before is not None else None
        finally:
            if before is not None:
                before.release()
