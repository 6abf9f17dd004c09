"""TaskService: accepts tasks, leases attempts and takes their outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from penstock.server.core.errors import FieldInvalid
from penstock.server.core.memory_budget import MemoryBudget
from penstock.server.groups.attempts import Holder, group_changed
from penstock.server.groups.task_queue import TaskQueue
from penstock.server.journal.protocol import Journal
from penstock.server.journal.records import task_accepted
from penstock.server.rollouts.complete import Closing
from penstock.server.rpc.lease_lines import LeaseLines
from penstock.server.turns import requests
from penstock.v1 import task_service_pb2
from penstock.wire.messages import (
    CompleteTrajectoryResponse,
    LeaseTasksResponse,
    RenewLeaseResponse,
    SubmitTasksResponse,
)

logger = logging.getLogger(__name__)

CHECKED_AT_A_TIME = 500


@dataclass(eq=False)
class TaskServicer:
    queue: TaskQueue
    lines: LeaseLines
    closing: Closing
    journal: Journal
    budget: MemoryBudget
    vocab_size: int
    check_session: Callable[[str, int], None]
    """Raises STALE_EPOCH for the run and epoch of a trainer that was replaced."""

    async def submit_tasks(
        self, request: task_service_pb2.SubmitTasksRequest
    ) -> task_service_pb2.SubmitTasksResponse:
        """All or none."""
        self.check_session(request.run_id, request.trainer_epoch)
        self.queue.pending.check_room(len(request.tasks))
        for index, task in enumerate(request.tasks):
            requests.task(f"tasks[{index}]", task, self.vocab_size)
            if not index % CHECKED_AT_A_TIME:
                # Nothing has changed yet, and other calls wait for the event loop.
                await asyncio.sleep(0)
        # A newer trainer may have connected meanwhile.
        self.check_session(request.run_id, request.trainer_epoch)
        self.budget.check(request.ByteSize())
        if any(task.task_id not in self.queue.pending.known for task in request.tasks):
            # A repeated request for known tasks is answered even if the disk is full.
            self.journal.check_room(request.ByteSize())
        accepted, duplicates = self.queue.pending.submit(request.tasks)
        # Wait even if no task is new, because the known ones may not be durable yet.
        await self.journal.append([task_accepted(task) for task in accepted])
        return SubmitTasksResponse(
            accepted_count=len(accepted),
            duplicate_count=duplicates,
            pending_count=self.queue.pending.count_of(request.tasks),
        )

    async def lease_tasks(
        self, request: task_service_pb2.LeaseTasksRequest
    ) -> AsyncIterator[task_service_pb2.LeaseTasksResponse]:
        """Runs as long as the stream. Waits for an attempt, for the agent to have capacity and for the
        staleness gate."""
        holder = Holder(
            requests.identifier("agent_id", request.agent_id),
            request.concurrency,
            requests.purpose("purpose", request.purpose),
            request.whole_groups,
        )
        if not 1 <= request.concurrency <= requests.MAX_CONCURRENCY:
            problem = f"must be from 1 to {requests.MAX_CONCURRENCY}"
            raise FieldInvalid("concurrency", problem, request.concurrency)
        rules = self.queue.leases.rules
        length = requests.as_duration(rules.seconds)
        limit = requests.as_duration(rules.attempt_seconds)
        self.queue.holders.add(holder)
        logger.info("agent %s leases up to %d attempts", holder.agent_id, holder.concurrency)
        try:
            while True:
                lease = await self.lines.next(holder, self.closing.give_back)
                try:
                    # Durable first: work on a lease that a restarted server does not know would be lost.
                    await self.journal.append([group_changed(lease.group)])
                except BaseException:
                    self.closing.give_back(lease)
                    raise
                yield LeaseTasksResponse(
                    task=lease.group.task,
                    trajectory_id=lease.trajectory_id,
                    group_id=lease.group.group_id,
                    sample_index=lease.sample_index,
                    retry_count=lease.retry_count,
                    lease=length,
                    time_limit=limit,
                )
        finally:
            logger.info(
                "agent %s is gone; %d of its attempts return to the queue in %.0f s unless it calls",
                holder.agent_id,
                len(holder.held),
                self.queue.leases.rules.grace_seconds,
            )
            self.queue.holder_lost(holder)

    async def renew_lease(
        self, request: task_service_pb2.RenewLeaseRequest
    ) -> task_service_pb2.RenewLeaseResponse:
        """Returns the leases that have expired."""
        ids = requests.identifiers("trajectory_ids", request.trajectory_ids)
        expired = [found for found in ids if not self.queue.renew(found)]
        retried = filter(self.queue.leases.retried, expired)
        return RenewLeaseResponse(expired_trajectory_ids=expired, retried_trajectory_ids=retried)

    async def complete_trajectory(
        self, request: task_service_pb2.CompleteTrajectoryRequest
    ) -> task_service_pb2.CompleteTrajectoryResponse:
        """Answered once the close is durable."""
        trajectory_id = requests.identifier("trajectory_id", request.trajectory_id)
        if not request.HasField("outcome"):
            raise FieldInvalid("outcome", "must be set")
        closed = await self.closing.complete(trajectory_id, request.outcome)
        return CompleteTrajectoryResponse(
            group_completed=closed.group_completed, retried=closed.retried
        )
