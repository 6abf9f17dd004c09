"""The processes of a run that Python code started, and the worker in this process, which has the reward.

    server ──► worker here, trainer ──► the trainer is done, or the caller ──► all end

If any of them fails for good, all end. So they do if this process is interrupted or killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue

from penstock.client.calls import Patience
from penstock.client.client import connect
from penstock.client.scoring import Agent
from penstock.client.worker import WorkerSettings
from penstock.up.cast import Programs, local_placement, make_cast
from penstock.up.config import UpConfig
from penstock.up.processes import end_in_turn
from penstock.up.state import EVENTS, locked, write_state
from penstock.up.supervisor import Restarts, Supervisor
from penstock.up.telling import NAME_WIDTH, log_events

Say = Callable[[str], None]


@dataclass(frozen=True)
class Functions:
    """What the worker calls."""

    generate: Agent
    reward: Agent


@dataclass(frozen=True)
class Started:
    address: str
    """Of the server."""
    trainer_environment: dict[str, str]
    """Variables with which a trainer sees its own GPUs."""
    trained: asyncio.Task[None]
    """Ends once the trainer is done; never without one."""


@asynccontextmanager
async def started(
    config: UpConfig,
    programs: Programs,
    functions: Functions,
    say: Say,
    *,
    resume: bool,
    trains: bool,
) -> AsyncGenerator[Started]:
    """Runs server and worker, and the trainer if `trains`; none is left afterwards. Raises FolderUnusable,
    PlacementFailed, and in groups ProcessFailed, PenstockError and WorkerMisconfigured."""
    out = config.up.out
    cast = make_cast(config, programs, resume=resume)
    placement = local_placement(config)
    serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with locked(out):
        supervisor = Supervisor(
            cast if trains else replace(cast, trainer=None),
            Restarts(config.up.restarts, config.up.restart_window_seconds),
            log_events(out / EVENTS, lambda who, what: say(f"{who:{NAME_WIDTH}} {what}")),
            placement=placement,
            on_serving=serving.set_result,
            on_trainer_line=say,
            on_change=partial(write_state, out, config.cluster.placement),
        )
        try:
            async with asyncio.TaskGroup() as group:
                trained = group.create_task(supervisor.run())
                address = await serving
                concurrency = int(str(config.worker_options["concurrency"]))
                settings = WorkerSettings(concurrency, drain_seconds=0.0)
                patience = Patience(reconnect_seconds=config.up.patience_seconds)
                async with connect(address, patience=patience) as client:
                    worker = client.worker(settings, functions.generate, functions.reward)
                    working = group.create_task(worker.run())
                    environment = dict(placement.environments.get("trainer", {}))
                    yield Started(address, environment, trained)
                    worker.stop()
                    await working
                trained.cancel()
        finally:
            try:
                await end_in_turn(supervisor.started, config.up.stop_seconds)
            finally:
                supervisor.ended()


def run_in_thread(work: Callable[[Say], Coroutine[object, object, None]]) -> None:
    """Runs `work` on an event loop in a thread, because the thread of a notebook has a loop that runs. What
    it says is printed here. An interruption cancels it, and a second one cancels how it ends."""
    said: SimpleQueue[str | None] = SimpleQueue()
    done: Future[None] = Future()
    begun: Future[Callable[[], object]] = Future()

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        await work(said.put)

    def run() -> None:
        try:
            done.set_result(asyncio.run(main()))
        except BaseException as error:
            done.set_exception(error)
        finally:
            said.put(None)

    thread = threading.Thread(target=run, name="penstock")
    thread.start()
    cancel = begun.result()
    try:
        while (line := said.get()) is not None:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    except BaseException:
        _end(thread, cancel)
        raise
    thread.join()
    done.result()


def _end(thread: threading.Thread, cancel: Callable[[], object]) -> None:
    # The loop may have ended just now.
    with contextlib.suppress(RuntimeError):
        cancel()
    try:
        thread.join()
    except KeyboardInterrupt:
        _end(thread, cancel)
