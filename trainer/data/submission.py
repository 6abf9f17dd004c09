"""The call `SubmitTasks`: cuts tasks into calls that a server accepts, and names its refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import grpc

from penstock.trainer.core.errors import ServerFull, ServerLost, SessionRefused
from penstock.v1 import task_service_pb2
from penstock.wire import methods
from penstock.wire.failure import read_failure
from penstock.wire.messages import SubmitTasksRequest
from penstock.wire.reasons import Reason

SUBMIT_TIMEOUT_SECONDS = 60.0
# Delay before submitting again to a full server that named no delay.
FULL_SECONDS = 1.0
# Keeps a request far below the message size limit, and the server's reply quick.
MOST_TASKS_PER_CALL = 512
MOST_BYTES_PER_CALL = 8 << 20


async def submit_tasks(
    channel: grpc.aio.Channel,
    tasks: Sequence[task_service_pb2.Task],
    run_id: str = "",
    trainer_epoch: Callable[[], int] = lambda: 0,
) -> int:
    """Submit tasks in as many calls as they need; return how many then wait at the server.

    The call names the run and the trainer's current epoch. If a newer trainer took over, the stream
    of `Exchange` ends for good; here that counts as a lost server. A server without room for a
    whole call is sent halves of it, for as long as they fit. The caller submits everything again
    later, and the server ignores the tasks it has accepted before.

    Raises ServerFull, ServerLost and SessionRefused.
    """
    pending = 0
    call = partial(_call_submit, channel, run_id=run_id, trainer_epoch=trainer_epoch)
    for some in _parts(tasks):
        pending = await _submit_some(call, some)
    return pending


def _parts(tasks: Sequence[task_service_pb2.Task]) -> Iterator[Sequence[task_service_pb2.Task]]:
    """Split tasks into portions that each fit one call. Without tasks, yield one empty portion."""
    begin = size = 0
    for end, task in enumerate(tasks):
        count = task.ByteSize()
        full = end - begin == MOST_TASKS_PER_CALL or size + count > MOST_BYTES_PER_CALL
        if end > begin and full:
            yield tasks[begin:end]
            begin, size = end, 0
        size += count
    yield tasks[begin:]


async def _submit_some(
    call: Callable[[Sequence[task_service_pb2.Task]], Awaitable[int]],
    tasks: Sequence[task_service_pb2.Task],
) -> int:
    try:
        return await call(tasks)
    except ServerFull:
        if len(tasks) < 2:
            raise
    half = len(tasks) // 2
    await _submit_some(call, tasks[:half])
    return await _submit_some(call, tasks[half:])


async def _call_submit(
    channel: grpc.aio.Channel,
    tasks: Sequence[task_service_pb2.Task],
    run_id: str,
    trainer_epoch: Callable[[], int],
) -> int:
    call = methods.unary(channel, task_service_pb2.SubmitTasksResponse)
    epoch = trainer_epoch()
    request = SubmitTasksRequest(tasks=tasks, run_id=run_id, trainer_epoch=epoch)
    try:
        response = await call(request, timeout=SUBMIT_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        failure = read_failure(error)
        text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
        if failure.is_full or failure.reason == Reason.QUEUE_FULL:
            raise ServerFull(text, failure.retry_after_seconds or FULL_SECONDS) from error
        if failure.is_unanswered or failure.reason == Reason.STALE_EPOCH:
            raise ServerLost(text) from error
        raise SessionRefused(text) from error
    return response.pending_count
