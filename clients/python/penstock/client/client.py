"""`connect`: the client of one rollout server."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.client.calls import Calls, Patience
from penstock.client.leases import Leases, default_agent_id
from penstock.client.scoring import Agent
from penstock.client.statistics import Statistics
from penstock.client.tasks import Purpose, Submission, Task, write_task
from penstock.client.trajectory import Place, Trajectory
from penstock.client.turn_stream import get_trajectory
from penstock.client.turns import TrajectoryRecord
from penstock.client.worker import Worker, WorkerSettings
from penstock.v1 import rollout_service_pb2, task_service_pb2
from penstock.wire import messages
from penstock.wire.security import Security


@dataclass(frozen=True, slots=True)
class ServerLoad:
    running_turn_count: int
    waiting_turn_count: int
    kv_cache_usage: float
    """From 0 to 1."""
    open_trajectory_count: int
    buffered_group_count: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    server_version: str
    model: str
    active_weight_version: int
    staged_weight_versions: tuple[int, ...]
    max_context_length: int
    vocab_size: int
    weight_dtype: str
    """Name of the torch dtype that uploaded tensors must have."""
    load: ServerLoad
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine behind a server."""

    address: str
    """Address it listens at; empty for an engine in the server's own process."""
    state: str
    """"serving", "paused", "draining", "joining" or "unavailable"."""
    active_weight_version: int | None
    """Version it samples with, as last reported. None if the server does not know."""
    problem: str
    """Why it takes no turns; empty if it takes turns."""


def version_of(replica: rollout_service_pb2.ReplicaInfo) -> int | None:
    """Returns None if the server does not know the version.

    On the wire, 0 stands for both "unknown" and the base model. It means the base model if the
    engine takes turns or is the server's own.
    """
    known = not replica.address or replica.state in (
        rollout_service_pb2.REPLICA_STATE_SERVING,
        rollout_service_pb2.REPLICA_STATE_PAUSED,
    )
    return replica.active_weight_version or (0 if known else None)


def state_of(replica: rollout_service_pb2.ReplicaInfo) -> str:
    name = rollout_service_pb2.ReplicaState.Name(replica.state)
    return name.removeprefix("REPLICA_STATE_").lower()


def connect(
    address: str, *, patience: Patience | None = None, security: Security | None = None
) -> Client:
    """Returns a client of the server at `address` ("host:port"). Sends nothing before the first call.

    `security` holds the TLS settings and credentials. Without it, the connection is plaintext and
    carries no token. Use the client as an async context manager, or close it yourself. Raises
    CredentialsUnusable, and ValueError if `address` is not an address.
    """
    return Client(address, patience or Patience(), security)


class Client:
    """An agent's connection to one server. Made by `connect`."""

    def __init__(self, address: str, patience: Patience, security: Security | None = None) -> None:
        self.address = address
        self._calls = Calls(address, patience, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; calls in flight are cancelled."""
        await self._calls.close()

    async def work(
        self,
        agent: Agent,
        *,
        concurrency: int = 8,
        attempts: int | None = None,
        attempt_seconds: float | None = None,
        agent_id: str = "",
        purpose: Purpose | None = None,
    ) -> Statistics:
        """Leases attempts and runs `agent(task, trajectory)` on each, `concurrency` at a time.

        The agent returns the reward: a number or an Outcome. If it raises, its attempt fails and
        the server schedules it again; the work continues. Returns after `attempts` attempts, or
        never if that is None.
        """
        settings = WorkerSettings(
            concurrency=concurrency,
            agent_id=agent_id or default_agent_id(),
            purpose=purpose,
            attempts=attempts,
            attempt_seconds=attempt_seconds,
        )
        return await Worker(self._calls, agent, None, settings).run()

    def worker(self, settings: WorkerSettings, generate: Agent, reward: Agent | None) -> Worker:
        """Makes the worker behind `work` and `penstock rollout`. End it with its `stop`."""
        return Worker(self._calls, generate, reward, settings)

    def lease_tasks(
        self,
        concurrency: int = 1,
        *,
        agent_id: str = "",
        purpose: Purpose | None = None,
        whole_groups: bool = False,
        resume_aborted: bool = False,
    ) -> Leases:
        """Yields leased attempts, at most `concurrency` at a time. The caller closes them.

        With `whole_groups`, this client receives every attempt of a group. It never receives a
        group larger than `concurrency`. With `resume_aborted`, a turn that a weight update aborted
        resumes automatically.
        """
        return Leases(
            self._calls,
            concurrency=concurrency,
            agent_id=agent_id or default_agent_id(),
            purpose=purpose,
            whole_groups=whole_groups,
            resume_aborted=resume_aborted,
        )

    def trajectory(
        self,
        trajectory_id: str = "",
        *,
        group_id: str = "",
        group_size: int = 0,
        sample_index: int = 0,
        priority: int = 0,
        required_weight_version: int = 0,
        resume_aborted: bool = False,
    ) -> Trajectory:
        """Makes a trajectory without a lease. The first turn opens it.

        Without `group_id` it forms its own group, which is never delivered to a trainer. Waiting
        turns with a lower `priority` run first. With `required_weight_version`, the server refuses
        turns under another version; zero accepts any version.
        """
        return Trajectory(
            self._calls,
            trajectory_id or uuid.uuid4().hex,
            place=Place(group_id, group_size, sample_index),
            priority=priority,
            required_weight_version=required_weight_version,
            resume_aborted=resume_aborted,
        )

    async def submit_tasks(self, tasks: Iterable[Task]) -> Submission:
        """Submits tasks. A task whose id is known changes nothing. Waits, within a bound, if the
        queue is full."""
        request = messages.SubmitTasksRequest(tasks=[write_task(task) for task in tasks])
        response = await self._calls.ask(request, task_service_pb2.SubmitTasksResponse)
        return Submission(response.accepted_count, response.duplicate_count, response.pending_count)

    async def server_info(self) -> ServerInfo:
        info = await self._calls.get_server_info()
        load = ServerLoad(
            info.load.running_turn_count,
            info.load.waiting_turn_count,
            info.load.kv_cache_usage,
            info.load.open_trajectory_count,
            info.load.buffered_group_count,
        )
        return ServerInfo(
            info.server_version,
            info.model,
            info.active_weight_version,
            tuple(info.staged_weight_versions),
            info.max_context_length,
            info.vocab_size,
            info.weight_dtype,
            load,
            tuple(Replica(r.address, state_of(r), version_of(r), r.problem) for r in info.replicas),
        )

    async def get_trajectory(self, trajectory_id: str) -> TrajectoryRecord:
        """Returns a trajectory as the server holds it, open or closed. Raises NotFound."""
        return await get_trajectory(self._calls, trajectory_id)

    async def abort(
        self,
        *,
        trajectory_ids: Sequence[str] = (),
        group_ids: Sequence[str] = (),
        everything: bool = False,
        reason: str = "",
    ) -> dict[str, int]:
        """Stops turns in flight: those of the given trajectories or groups, or all of them.

        Returns once the engine has stopped them, with the number of kept tokens per trajectory id.
        Raises ValueError unless exactly one of the three is given.
        """
        if bool(trajectory_ids) + bool(group_ids) + everything != 1:
            raise ValueError("give trajectory_ids, group_ids or everything")
        request = rollout_service_pb2.AbortRequest(reason=reason)
        if trajectory_ids:
            request.trajectories.trajectory_ids.extend(trajectory_ids)
        elif group_ids:
            request.groups.group_ids.extend(group_ids)
        else:
            request.all.SetInParent()
        response = await self._calls.ask(request, rollout_service_pb2.AbortResponse)
        return {turn.trajectory_id: turn.policy_token_count for turn in response.aborted_turns}
