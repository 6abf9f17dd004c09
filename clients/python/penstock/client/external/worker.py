from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from penstock.client.calls import Calls
from penstock.client.external.agent import CommandUnusable, ExternalProcesses
from penstock.client.external.settings import EXIT_STATUS, RESULT_FILE, CommandSettings
from penstock.client.scoring import Agent, BadFunction, is_group_reward, load_function
from penstock.client.statistics import Statistics
from penstock.client.worker import Worker, WorkerMisconfigured, WorkerSettings
from penstock.wire.security import Security


def load_worker(
    external: CommandSettings, security: Security, settings: WorkerSettings
) -> Callable[[Calls], CommandWorker]:
    reward: Agent | None = None
    if external.reward not in (None, EXIT_STATUS, RESULT_FILE):
        reward = load_function(external.reward, "--reward")
    elif settings.group_reward:
        raise BadFunction("--group-reward requires a --reward function")
    return lambda calls: CommandWorker(
        calls, ExternalProcesses(calls, security, external, reward), reward, settings
    )


class CommandWorker(Worker):
    """Its running processes can finish within the drain bound, then they are ended."""

    def __init__(
        self,
        calls: Calls,
        processes: ExternalProcesses,
        reward: Agent | None,
        settings: WorkerSettings,
    ) -> None:
        settings = replace(settings, group_reward=settings.group_reward or is_group_reward(reward))
        score = None if reward is None else processes.reward
        super().__init__(calls, processes.generate, score, settings)
        self._processes = processes

    async def run(self) -> Statistics:
        """Works like `Worker.run`. Also raises WorkerMisconfigured if no process can be run."""
        try:
            if not await self._open():
                return Statistics()
            return await super().run()
        except CommandUnusable as error:
            raise WorkerMisconfigured(str(error)) from error
        finally:
            await self._processes.close()

    async def _open(self) -> bool:
        """Returns False if the worker was stopped while it waited for its server."""
        opening = asyncio.create_task(self._processes.open())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
            return opening.done()
        finally:
            for task in (opening, stopping):
                task.cancel()
            await asyncio.wait([opening, stopping])
