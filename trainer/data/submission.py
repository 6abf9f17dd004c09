"""The call `SubmitTasks`: cuts tasks into calls that a server accepts, and names its refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    call = methods.unary(channel, task_service_pb2.SubmitTasksResponse)

    async def submit(some: Sequence[task_service_pb2.Task]) -> int:
        request = SubmitTasksRequest(tasks=some, run_id=run_id, trainer_epoch=trainer_epoch())
        try:
            return (await call(request, timeout=SUBMIT_TIMEOUT_SECONDS)).pending_count
        except grpc.aio.AioRpcError as error:
            lost = _lost(error)
            if not isinstance(lost, ServerFull) or len(some) < 2:
                raise lost from error
        half = len(some) // 2
        await submit(some[:half])
        return await submit(some[half:])

    return [await submit(some) for some in _parts(tasks)][-1]


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


def _lost(error: grpc.aio.AioRpcError) -> ServerLost | SessionRefused:
    failure = read_failure(error)
    text = f"SubmitTasks: {failure.reason or failure.code.name}: {failure.message}"
    if failure.is_full or failure.reason == Reason.QUEUE_FULL:
        return ServerFull(text, failure.retry_after_seconds or FULL_SECONDS)
    if failure.is_unanswered or failure.reason == Reason.STALE_EPOCH:
        return ServerLost(text)
    return SessionRefused(text)
