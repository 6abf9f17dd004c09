"""What commands that ask a server share: the question, and errors in words."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import grpc

from penstock.client.errors import DeadlineExceeded, from_rpc
from penstock.common.answers import Exit, complain
from penstock.v1 import rollout_service_pb2
from penstock.wire import methods
from penstock.wire.security import CredentialsUnusable

CALL_SECONDS = 10.0

Info = rollout_service_pb2.GetServerInfoResponse


async def server_info(channel: grpc.aio.Channel, *, with_progress: bool = False) -> Info:
    request = rollout_service_pb2.GetServerInfoRequest(with_progress=with_progress)
    return await methods.unary(channel, Info)(request, timeout=CALL_SECONDS)


def answered(
    program: str, address: str, work: Coroutine[None, None, None], *refusals: type[Exception]
) -> int:
    """Runs the command. Returns its exit status, and explains a failure on stderr: of the call, of the
    credentials, or one of `refusals`, whose messages say all."""
    try:
        asyncio.run(work)
    except grpc.aio.AioRpcError as error:
        problem: object = from_rpc(error)
        if isinstance(problem, DeadlineExceeded) and not problem.reason:
            problem = "no answer in time"
        return complain(program, problem, Exit.FAILED, address)
    except (CredentialsUnusable, *refusals) as error:
        return complain(program, error, Exit.FAILED)
    return Exit.DONE
