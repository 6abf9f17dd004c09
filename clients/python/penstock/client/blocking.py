"""Runs plain functions in their own threads, with a trajectory whose calls block."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

if TYPE_CHECKING:
    from penstock.client.conversation import Observation, Tool
    from penstock.client.outcome import ProcessRecord
    from penstock.client.sampling import SamplingOptions
    from penstock.client.tasks import Task
    from penstock.client.trajectory import Trajectory
    from penstock.client.turns import TrajectoryRecord, Turn

T = TypeVar("T")


class BlockingTrajectory:
    """A Trajectory for a plain function. It has the same methods, and each call blocks."""

    def __init__(self, trajectory: Trajectory, loop: asyncio.AbstractEventLoop) -> None:
        self._trajectory = trajectory
        self._loop = loop

    @property
    def trajectory_id(self) -> str:
        return self._trajectory.trajectory_id

    @property
    def task(self) -> Task | None:
        return self._trajectory.task

    @property
    def sample_index(self) -> int:
        return self._trajectory.sample_index

    @property
    def turns(self) -> Sequence[Turn]:
        return self._trajectory.turns

    @property
    def last_turn(self) -> Turn:
        return self._trajectory.last_turn

    @property
    def text(self) -> str:
        return self._trajectory.text

    @property
    def process(self) -> ProcessRecord | None:
        return self._trajectory.process

    def turn(
        self,
        observation: Observation | None = None,
        *,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Turn:
        return self._wait(
            self._trajectory.turn(observation, tools=tools, timeout=timeout, **sampling)
        )

    def resume(self, timeout: float | None = None) -> Turn:
        return self._wait(self._trajectory.resume(timeout))

    def get(self) -> TrajectoryRecord:
        return self._wait(self._trajectory.get())

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__.
    )


async def run_in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Runs a function in a daemon thread, so that a function that never returns cannot block the exit.

    If the caller is cancelled, the thread continues alone and its result is ignored.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # pyright: ignore[reportArgumentType] - set with no error.
        elif isinstance(error, StopIteration):
            # A future refuses StopIteration, because it would end the awaiting coroutine.
            future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            result, error = context.run(function, *arguments), None
        except BaseException as raised:
            result, error = None, raised
        # The loop may be closed. Then no caller waits for the result.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="penstock-function", daemon=True).start()
    return await future
