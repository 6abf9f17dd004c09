"""Where the engine of `penstock serve` comes from: vLLM in this process, or a pool of engine servers.

What vLLM has is imported only by who needs it: that takes seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import click

from penstock.server.config.settings import ConfigError, Pool, ServeConfig
from penstock.server.core.own_tasks import OwnTasks

if TYPE_CHECKING:
    from penstock.server.engine.protocol import Engine
    from penstock.server.pool.rules import PoolRules
    from penstock.server.text.renderer import OutputParser

logger = logging.getLogger(__name__)


class EngineSource(Protocol):
    """One of them."""

    @property
    def model(self) -> str:
        """What is served, as the operator is told."""
        ...

    @property
    def options(self) -> dict[str, object]:
        """Every option of the engine as it would be."""
        ...

    def load_tokenizer(self, engine: Engine | None) -> object | None:
        """The model's, as soon as it is known which: before the engine is there, or with it."""
        ...

    async def start(self) -> Engine:
        """The engine, once it can sample."""
        ...


class ParserFailed(Exception):
    """A parser that was named cannot read what this model writes."""


class VllmSource:
    """The engine of an ordinary server."""

    def __init__(self, config: ServeConfig, engine_options: list[str]) -> None:
        """Raises ConfigError."""
        # Imports vllm, which takes seconds: only now that it is certain to be needed.
        from penstock.server.vllm.options import describe_options, engine_arguments

        _check_parsers(config)
        try:
            self._arguments = engine_arguments([*config.engine_options(), *engine_options])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._describe = describe_options

    @property
    def model(self) -> str:
        """What is served."""
        return str(self._arguments.model)

    @property
    def options(self) -> dict[str, object]:
        """Every option of the engine as it would be."""
        return self._describe(self._arguments)

    def load_tokenizer(self, engine: Engine | None) -> object | None:
        """The model's, as soon as it is known which it is."""
        from penstock.server.text.renderer import load_tokenizer

        return load_tokenizer(str(self._arguments.tokenizer or self._arguments.model))

    async def start(self) -> Engine:
        """Loads the model."""
        from penstock.server.vllm.engine import VllmEngine

        return await VllmEngine.start(self._arguments)


class HubSource:
    """The pool of a hub."""

    def __init__(self, config: ServeConfig, engine_options: list[str]) -> None:
        """Raises ConfigError."""
        unused = [name for name in config.engine if name not in ("model", "tokenizer")]
        unused += engine_options
        if unused:
            raise ConfigError(
                f"a hub has no engine of its own for {unused[0]!r}; give it to the others"
            )
        _check_parsers(config)
        self._config = config
        self._tasks = OwnTasks()

    @property
    def model(self) -> str:
        """What is served."""
        return str(self._config.engine.get("model", "what the engines serve"))

    @property
    def options(self) -> dict[str, object]:
        """What a hub knows of the model."""
        return dict(self._config.engine)

    def load_tokenizer(self, engine: Engine | None) -> object | None:
        """That of its own settings at once, else what the engines name."""
        from penstock.server.text.renderer import load_tokenizer

        named = self._config.engine.get("tokenizer") or self._config.engine.get("model")
        if named is None and engine is not None:
            named = engine.description.model
        return None if named is None else load_tokenizer(str(named))

    async def start(self) -> Engine:
        """Waits for the first engine server that answers. Raises CredentialsUnusable."""
        from penstock.server.pool.discovery import Discovery
        from penstock.server.pool.engine import PoolEngine
        from penstock.wire.security import CredentialsUnusable

        pool = self._config.pool
        discovery = Discovery(pool.engines)
        engine = PoolEngine(await discovery.look(), pool.shown(), pool_rules(pool))

        def tell(addresses: Sequence[str]) -> None:
            try:
                engine.set_addresses(addresses)
            except CredentialsUnusable as error:
                logger.warning("what was looked up is not used: %s", error)

        self._tasks.start(discovery.run(pool.discover_seconds, tell), "discovery")
        click.echo(f"penstock hub waiting for an engine of {', '.join(pool.engines)}")
        sys.stdout.flush()
        try:
            await engine.described()
        except BaseException:
            await engine.close()
            raise
        return engine


def pool_rules(pool: Pool) -> PoolRules:
    """How a hub runs them."""
    from penstock.server.engine.turn_limit import LimitRules
    from penstock.server.pool.routing import RoutingRules
    from penstock.server.pool.rules import PoolRules

    return PoolRules(
        RoutingRules(pool.margin, pool.routing),
        LimitRules(first=pool.first_turns, most=pool.most_turns),
        switches_at_once=pool.switch == "all",
        switch_part=pool.switch_part,
        look_seconds=pool.look_seconds,
        silent_seconds=pool.silent_seconds,
        branches=pool.branches,
        differences=pool.differences,
        stage_seconds=pool.stage_seconds,
        switch_seconds=pool.switch_seconds,
    )


def _check_parsers(config: ServeConfig) -> None:
    """Raises ConfigError for a name that vLLM does not know."""
    names = config.conversation.tool_parser, config.conversation.reasoning_parser
    if not any(names):
        return
    from penstock.server.vllm.parsers import ParserUnknown, check_names

    try:
        check_names(*names)
    except (ParserUnknown, ValueError) as error:
        raise ConfigError(str(error)) from error


def make_parser(config: ServeConfig, tokenizer: object) -> OutputParser | None:
    """What reads tool calls and reasoning, where one is named. Raises ParserFailed."""
    names = config.conversation.tool_parser, config.conversation.reasoning_parser
    if not any(names):
        return None
    from penstock.server.vllm.parsers import ParserUnknown, VllmParsers

    try:
        return VllmParsers(tokenizer, *names)
    except ParserUnknown as error:
        raise ParserFailed(str(error)) from error
