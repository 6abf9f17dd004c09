"""How long the server's event loop stands still with a full queue, and with many open conversations.

python -m benchmarks.serving.stalls --tasks 100000 --conversations 8192 --messages 200

A server with a journal on disk and the fake engine, in this process. The product's own watchdog measures:
while tasks are submitted or conversations opened, and while the journal is compacted. It misses up to
20 ms of each stall, and leaves out the time in which other processes had the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.harness import (
    ChatMessage,
    Conversation,
    GenerateRequest,
    Harness,
    SubmitTasksRequest,
    Task,
    collect,
    sampling,
    serve,
)

from penstock.server.journal.disk.journal import LogJournal

AT_A_TIME = 64
TASKS_PER_CALL = 1_000


async def submit(harness: Harness, count: int) -> None:
    for first in range(0, count, TASKS_PER_CALL):
        numbers = range(first, min(first + TASKS_PER_CALL, count))
        tasks = [Task(task_id=f"t{n}", group_size=4, text="x" * 200) for n in numbers]
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=tasks))


async def converse(harness: Harness, count: int, messages: int) -> None:
    async def open_one(number: int) -> None:
        talk = [
            ChatMessage(role=2 + place % 2, content=f"message {place} of {number} " + "x" * 40)
            for place in range(messages - 1)
        ]
        request = GenerateRequest(
            trajectory_id=f"c{number}",
            conversation=Conversation(messages=talk),
            sampling_params=sampling(4),
        )
        await collect(harness.wire.Generate(request))

    for first in range(0, count, AT_A_TIME):
        numbers = range(first, min(first + AT_A_TIME, count))
        await asyncio.gather(*map(open_one, numbers))


async def measure(what: str, fill: Callable[[Harness], Awaitable[None]], count: int) -> None:
    settings = (
        "journal.durability=process",
        f"limits.pending_tasks={max(count, 1)}",
        f"limits.open_trajectories={max(count, 1)}",
        f"limits.caller.open_trajectories={max(count, 1)}",
    )
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        journal = f"journal.folder={folder / 'journal'}"
        async with serve(folder, journal, *settings, max_context=1 << 20) as harness:
            watch = harness.life.watch
            await fill(harness)
            filling, watch.longest_seconds = watch.longest_seconds, 0.0
            begun = time.monotonic()
            written = harness.serving.journal
            assert isinstance(written, LogJournal)
            await written._begin_compaction()
            assert written._compacting is not None
            await written._compacting
            await asyncio.sleep(0.2)
            print(
                f"{count:>8,} {what:<24} filling {1000 * filling:>6.0f} ms   compaction "
                f"{1000 * watch.longest_seconds:>6.0f} ms (of {time.monotonic() - begun:.1f} s)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--conversations", type=int, default=8_192)
    parser.add_argument("--messages", type=int, default=200)
    given = parser.parse_args()
    print("longest time for which the server's event loop stood still; 0 is below 50 ms")
    asyncio.run(measure("tasks", lambda h: submit(h, given.tasks), given.tasks))
    count, messages = given.conversations, given.messages
    asyncio.run(
        measure(f"conversations of {messages}", lambda h: converse(h, count, messages), count)
    )


if __name__ == "__main__":
    main()
