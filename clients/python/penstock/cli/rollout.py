"""`penstock rollout`: the worker as a process.

For several servers it runs one worker each, with an equal share of the attempts in flight. The
share is fixed. A leased attempt counts as work under way, so leasing more from each server than the
agent works on would delay groups. If a server is away, its share stays idle, like its engines.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.client.calls import Calls, Patience
from penstock.client.errors import PenstockError
from penstock.client.scoring import BadFunction, load_function, single_turn
from penstock.client.worker import Worker, WorkerMisconfigured, WorkerSettings
from penstock.common import telemetry
from penstock.common.answers import Exit, complain
from penstock.common.distribution import pip_install
from penstock.wire.security import CredentialsUnusable, Security

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.client.environments.settings import EnvironmentSettings
    from penstock.client.external.settings import CommandSettings
    from penstock.client.plugins.whole_rollout import WholeRollout

    AnyWorker = Worker | WholeRollout

logger = logging.getLogger("penstock.rollout")
PROGRAM = "penstock rollout"


@dataclass(frozen=True)
class RolloutOptions:
    """The options of the command; those that it does not convert have the same names."""

    servers: tuple[str, ...]
    generate: str | None
    """`pkg.module:function`; None takes one turn on the task's prompt."""
    reward: str | None
    """`pkg.module:function`; None if `generate` returns the reward."""
    settings: WorkerSettings
    """For all servers together."""
    patience: Patience
    security: Security
    style: str
    """Calling convention of the functions; see `penstock.client.plugins.styles`."""
    arguments: Path | None
    """TOML file of the `args` that functions of another style receive."""
    rollout_function: str | None
    """`pkg.module:function` that makes whole rollouts in place of the worker."""
    external: CommandSettings | None
    """Runs a process per attempt, in place of `generate`."""
    environments: EnvironmentSettings | None
    """Plays episodes of an environment, in place of `generate`."""


def rollout(options: RolloutOptions) -> int:
    """Runs a worker until it is stopped. Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format=f"{PROGRAM}: %(message)s", stream=sys.stderr)
    try:
        for server in options.servers:
            options.security.check(server)
        make_workers = [_load(share) for share in _divide(options)]
        telemetry.configure("penstock-rollout")
    except (BadFunction, CredentialsUnusable) as error:
        return complain(PROGRAM, error)
    except ImportError as error:
        return complain(
            PROGRAM,
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, but {error}; install opentelemetry-sdk and "
            "opentelemetry-exporter-otlp-proto-grpc",
        )
    try:
        return asyncio.run(_work(options, make_workers))
    finally:
        telemetry.shutdown()


def _divide(options: RolloutOptions) -> list[RolloutOptions]:
    """Divides the options among the servers, one share each. Raises BadFunction."""
    servers, settings = options.servers, options.settings
    if len(servers) == 1:
        return [options]
    if twice := next((server for server in servers if servers.count(server) > 1), None):
        raise BadFunction(f"--server {twice} is given twice")
    if settings.concurrency < len(servers):
        raise BadFunction(
            f"--concurrency must be at least {len(servers)}, one for each --server, "
            f"got {settings.concurrency}"
        )
    if settings.attempts is not None or options.style != "penstock":
        raise BadFunction("--attempts and --style require a single --server")
    each, left = divmod(settings.concurrency, len(servers))
    return [
        replace(
            options,
            servers=(server,),
            settings=replace(settings, concurrency=each + (place < left)),
        )
        for place, server in enumerate(servers)
    ]


def _load(options: RolloutOptions) -> Callable[[Calls], AnyWorker]:
    """Returns a factory that makes the configured worker for a server. Raises BadFunction."""
    if (options.external or options.environments) and options.style != "penstock":
        raise BadFunction(
            "--style applies to functions and cannot be combined with --command or --environment"
        )
    if options.style != "penstock":
        from penstock.client.plugins.worker import load_worker

        return load_worker(
            options.style,
            options.generate,
            options.reward,
            options.rollout_function,
            options.arguments,
            options.settings,
        )
    if options.external is not None:
        return _load_command(options, options.external)
    if options.arguments is not None or options.rollout_function is not None:
        raise BadFunction("--args and --rollout-function require --style")
    generate = single_turn
    if options.environments is not None:
        if options.generate is not None:
            raise BadFunction("--environment and --generate exclude each other: give one")
        from penstock.client.environments.naming import load_agent

        generate = load_agent(options.environments)
    elif options.generate is None and options.reward is None:
        raise BadFunction(
            "give --reward, or a --generate, --environment or --command that returns the reward"
        )
    elif options.reward is None and options.settings.group_reward:
        raise BadFunction("--group-reward requires --reward")
    elif options.generate is not None:
        generate = load_function(options.generate, "--generate")
    reward = load_function(options.reward, "--reward") if options.reward else None
    return lambda calls: Worker(calls, generate, reward, options.settings)


def _load_command(
    options: RolloutOptions, external: CommandSettings
) -> Callable[[Calls], AnyWorker]:
    if options.generate is not None or options.environments is not None:
        raise BadFunction("--command, --environment and --generate exclude each other: give one")
    try:
        from penstock.client.external.worker import load_worker as load_command
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        # Not part of the base install.
        raise BadFunction(f"--command needs an extra: {pip_install('command')}") from error

    return load_command(external, options.security, options.settings)


async def _work(
    options: RolloutOptions, make_workers: Sequence[Callable[[Calls], AnyWorker]]
) -> int:
    opened = [Calls(server, options.patience, options.security) for server in options.servers]
    workers = [make(calls) for make, calls in zip(make_workers, opened, strict=True)]
    loop = asyncio.get_running_loop()
    working = loop.create_task(_work_together(workers))

    def stop() -> None:
        # A second signal skips the drain.
        if any(worker.stopping for worker in workers):
            working.cancel()
        for worker in workers:
            worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    servers, concurrency = ", ".join(options.servers), options.settings.concurrency
    logger.info("%s: running up to %d attempts at a time", servers, concurrency)
    try:
        await working
    except asyncio.CancelledError:
        said = "stopped without draining; attempts in flight return to the server when their leases expire"
        return complain(PROGRAM, said, Exit.FAILED)
    except WorkerMisconfigured as error:
        divided = f" (--concurrency {concurrency} is divided among {len(workers)} servers)"
        return complain(PROGRAM, f"{error}{divided if len(workers) > 1 else ''}")
    except PenstockError as error:
        return complain(PROGRAM, error, Exit.FAILED)
    finally:
        for calls in opened:
            await calls.close()
    return 0


async def _work_together(workers: Sequence[AnyWorker]) -> None:
    """Runs all workers until they stop. If one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                group.create_task(worker.run())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
