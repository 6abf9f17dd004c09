"""Sources of the engine of `penstock serve`: vLLM in this process, or a pool of engine servers.

Code that needs vLLM is imported on first use, because that takes seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from penstock.server.config.settings import ConfigError, ServeConfig
from penstock.server.core.aio import OwnTasks

if TYPE_CHECKING:
    from penstock.server.engine.protocol import Engine, LocalEngine
    from penstock.server.pool.engine import PoolEngine
    from penstock.server.text.renderer import OutputParser

logger = logging.getLogger(__name__)


class ParserFailed(Exception):
    """A configured parser cannot read this model's output."""


class VllmSource:
    def __init__(self, config: ServeConfig, engine_options: list[str]) -> None:
        """Raises ConfigError for an unknown parser or an invalid engine option."""
        from penstock.server.vllm.options import engine_arguments

        _check_parsers(config)
        try:
            self._arguments = engine_arguments([*config.engine_options(), *engine_options])
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def model(self) -> str:
        return str(self._arguments.model)

    @property
    def options(self) -> dict[str, object]:
        """The effective value of every engine option."""
        from penstock.server.vllm.options import describe_options

        return describe_options(self._arguments)

    def load_tokenizer(self, engine: Engine | None) -> object | None:
        from penstock.server.text.renderer import load_tokenizer

        return load_tokenizer(str(self._arguments.tokenizer or self._arguments.model))

    async def start(self) -> LocalEngine:
        from penstock.server.vllm.engine import VllmEngine

        return await VllmEngine.start(self._arguments)


class HubSource:
    def __init__(self, config: ServeConfig, engine_options: list[str]) -> None:
        """Raises ConfigError for an unknown parser or an engine option, which a hub cannot use."""
        unused = [name for name in config.engine if name not in ("model", "tokenizer")]
        unused += engine_options
        if unused:
            raise ConfigError(
                f"a hub has no engine to configure with {unused[0]!r}; give it to the engine servers"
            )
        _check_parsers(config)
        self._config = config
        self._tasks = OwnTasks()

    @property
    def model(self) -> str:
        return str(self._config.engine.get("model", "what the engines serve"))

    @property
    def options(self) -> dict[str, object]:
        return dict(self._config.engine)

    def load_tokenizer(self, engine: Engine | None) -> object | None:
        """Called without the engine before its start, then with it. None without the engine if the settings
        name no tokenizer: then it is that of the engines."""
        from penstock.server.text.renderer import load_tokenizer

        named = self._config.engine.get("tokenizer") or self._config.engine.get("model")
        if named is None and engine is not None:
            named = engine.description.model
        return None if named is None else load_tokenizer(str(named))

    async def start(self) -> PoolEngine:
        """Waits for the first engine server that answers. Raises CredentialsUnusable."""
        from penstock.server.pool.discovery import Discovery
        from penstock.server.pool.engine import PoolEngine
        from penstock.wire.security import CredentialsUnusable

        pool = self._config.pool
        discovery = Discovery(pool.engines)
        engine = PoolEngine(await discovery.look(), pool.shown(), pool)

        def tell(addresses: Sequence[str]) -> None:
            try:
                engine.roster.set_addresses(addresses)
            except CredentialsUnusable as error:
                logger.warning("ignoring the looked-up engine addresses: %s", error)

        self._tasks.start(discovery.run(pool.discover_seconds, tell), "discovery")
        click.echo(f"penstock hub waiting for an engine of {', '.join(pool.engines)}")
        sys.stdout.flush()
        try:
            await engine.roster.described()
        except BaseException:
            await engine.close()
            raise
        return engine


EngineSource = VllmSource | HubSource


def _check_parsers(config: ServeConfig) -> None:
    """Raises ConfigError for a parser that vLLM does not know."""
    names = config.conversation.tool_parser, config.conversation.reasoning_parser
    if not any(names):
        return
    from penstock.server.vllm.parsers import check_names

    try:
        check_names(*names)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def make_parser(config: ServeConfig, tokenizer: object) -> OutputParser | None:
    """None if no parser is configured. Raises ParserFailed."""
    names = config.conversation.tool_parser, config.conversation.reasoning_parser
    if not any(names):
        return None
    from penstock.server.vllm.parsers import ParserUnknown, VllmParsers

    try:
        return VllmParsers(tokenizer, *names)
    except ParserUnknown as error:
        raise ParserFailed(str(error)) from error
