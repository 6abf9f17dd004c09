"""The server's load over time, for the picture: one line of JSON per sample."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import grpc

from penstock.v1 import rollout_service_pb2
from penstock.wire import channel, methods
from penstock.wire.messages import GetServerInfoRequest

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE_SECONDS = 0.5
CALL_TIMEOUT_SECONDS = 2.0


async def record_activity(address: str, path: Path) -> None:
    """Samples the server's load until cancelled. Measurement only: nothing depends on it.

    A sample is skipped if the server does not answer. The supervisor notices and reports a dead server.
    """
    async with grpc.aio.insecure_channel(address, options=channel.client_options()) as connection:
        get_server_info = methods.unary(connection, rollout_service_pb2.GetServerInfoResponse)
        with path.open("w") as file:
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                try:
                    info = await get_server_info(
                        GetServerInfoRequest(), timeout=CALL_TIMEOUT_SECONDS
                    )
                except grpc.RpcError:
                    continue
                sample = {
                    "time": time.time(),
                    "running": info.load.running_turn_count,
                    "waiting": info.load.waiting_turn_count,
                    "buffered_groups": info.load.buffered_group_count,
                    "weight_version": info.active_weight_version,
                }
                file.write(json.dumps(sample) + "\n")
                file.flush()
