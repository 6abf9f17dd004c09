"""A trainer that sends late: `python -m tests.faults.late_trainer HOST:PORT EPOCH GROUPS`.

Takes that many groups, prints `holding`, and waits for a line. Then it sends everything that a
trainer can send: receipts and a switch on its stream, and an upload. It prints the reason with
which each of the two ends, or gRPC's own words if no reason reached it.
"""

from __future__ import annotations

import asyncio
import sys

import grpc

from penstock.wire.channel import client_options
from penstock.wire.failure import read_failure
from tests.support.harness import Wire, hello, upload


async def main(address: str, epoch: int, groups: int) -> None:
    async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
        wire = Wire(channel)
        exchange = await hello(wire, epoch, max_lag=1_000, groups_per_step=1_000)
        exchange.send(demand={"group_count": groups})
        ids = [(await exchange.receive("delivery")).delivery_id for _ in range(groups)]
        say("holding")
        await asyncio.to_thread(sys.stdin.readline)
        exchange.send(receipt={"delivery_ids": ids, "step": 1})
        exchange.send(switch_weights={"weight_version": 1})
        exchange.send(checkpoint={"step": 1})
        try:
            while await exchange.call.read() is not grpc.aio.EOF:
                pass
            say("no error")
        except grpc.aio.AioRpcError as error:
            say(read_failure(error).reason or error.details() or "")
        try:
            await upload(wire, 1, trainer_epoch=epoch)
            say("no error")
        except grpc.aio.AioRpcError as error:
            say(read_failure(error).reason)


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
