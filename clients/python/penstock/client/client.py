"""`connect`: the client of one rollout server."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from penstock.client.calls import Calls, Patience
from penstock.client.leases import Leases, default_agent_id
from penstock.client.scoring import Agent
from penstock.client.statistics import Statistics
from penstock.client.tasks import Purpose, Submission, Task, write_task
from penstock.client.trajectory import Trajectory
from penstock.client.turn_stream import get_trajectory
from penstock.client.turns import TrajectoryRecord
from penstock.client.worker import Worker, WorkerSettings
from penstock.v1 import rollout_service_pb2, task_service_pb2
from penstock.wire import codec
from penstock.wire.security import Security

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Load of a server now."""

    running_turn_count: int
    waiting_turn_count: int
    kv_cache_usage: float
    """From 0 to 1."""
    open_trajectory_count: int
    buffered_group_count: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    server_version: str
    model: str
    active_weight_version: int
    """Version now sampling."""
    staged_weight_versions: tuple[int, ...]
    max_context_length: int
    vocab_size: int
    weight_dtype: str
    """Torch dtype name an uploaded tensor must have."""
    load: ServerLoad
    replicas: tuple[Replica, ...]
    """One per engine behind the server."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine behind a server."""

    address: str
    """Where it listens; empty for an engine in the server's own process."""
    state: str
    """"serving", "paused", "draining", "joining" or "unavailable"."""
    active_weight_version: int | None
    """Version it samples, or did when it was heard of last; None where that is not known."""
    problem: str
    """Why it takes no turns, where it does not."""


def version_of(replica: rollout_service_pb2.ReplicaInfo) -> int | None:
    """Version that an engine samples; None where its server does not know.

    On the wire that is 0, as is the base model: which it is, is sure where the engine takes turns or is the
    server's own.
    """
    serving, paused = (
        rollout_service_pb2.REPLICA_STATE_SERVING,
        rollout_service_pb2.REPLICA_STATE_PAUSED,
    )
    known = not replica.address or replica.state in (serving, paused)
    return replica.active_weight_version or (0 if known else None)


def connect(
    address: str, *, patience: Patience | None = None, security: Security | None = None
) -> Client:
    """A client of the server at `address` ("host:port"); nothing is sent before the first call.

    `security` says how the connection is encrypted and who calls; without it neither is the case. Use the
    client as an async context manager, or close it yourself. Raises CredentialsUnusable, and ValueError
    where that is no address.
    """
    return Client(address, patience or Patience(), security)


class Client:
    """Everything an agent's process asks of one server. Made by `connect`."""

    def __init__(self, address: str, patience: Patience, security: Security | None = None) -> None:
        self.address = address
        self._calls = Calls(address, patience, security)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

        The agent returns the reward: a number or an Outcome. One that raises fails its attempt,
        which the server has made again; the work goes on. Returns after `attempts`, or never.
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
        """The worker behind `work` and `penstock rollout`, to be stopped by its `stop`."""
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
        """Attempts as they are leased, at most `concurrency` at a time, to be closed by the caller.

        With `whole_groups` every attempt of a group comes here; a group larger than `concurrency`
        never does. With `resume_aborted` a turn that a weight update ended goes on by itself.
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
        """A trajectory without a lease; the first turn opens it.

        Without a group it is one of its own, which is never delivered to a trainer. Of turns that wait,
        those of lower `priority` run first. With `required_weight_version` a turn under another version
        is refused; zero takes any.
        """
        return Trajectory(
            self._calls,
            trajectory_id or uuid.uuid4().hex,
            group_id=group_id,
            group_size=group_size,
            sample_index=sample_index,
            priority=priority,
            required_weight_version=required_weight_version,
            resume_aborted=resume_aborted,
        )

    async def submit_tasks(self, tasks: Iterable[Task]) -> Submission:
        """Adds tasks; a known id changes nothing. Waits, within a bound, for a full queue."""
        request = codec.twin(task_service_pb2.SubmitTasksRequest)(
            tasks=[write_task(task) for task in tasks]
        )
        response = await self._calls.submit_tasks(request)
        return Submission(response.accepted_count, response.duplicate_count, response.pending_count)

    async def server_info(self) -> ServerInfo:
        """Model, versions, limits and load."""
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
            tuple(
                Replica(
                    replica.address,
                    rollout_service_pb2.ReplicaState.Name(replica.state)
                    .removeprefix("REPLICA_STATE_")
                    .lower(),
                    version_of(replica),
                    replica.problem,
                )
                for replica in info.replicas
            ),
        )

    async def get_trajectory(self, trajectory_id: str) -> TrajectoryRecord:
        """A trajectory as the server holds it, open or closed. Raises NotFound."""
        return await get_trajectory(self._calls, trajectory_id)

    async def abort(
        self,
        *,
        trajectory_ids: Sequence[str] = (),
        group_ids: Sequence[str] = (),
        everything: bool = False,
        reason: str = "",
    ) -> dict[str, int]:
        """Stops turns in flight: of these trajectories, of these groups, or every one.

        Returns once the engine is done with them: trajectory id -> tokens of the turn that are kept.
        Raises ValueError unless exactly one of the three is given.
        """
        if bool(trajectory_ids) + bool(group_ids) + everything != 1:
            raise ValueError("give trajectory_ids, group_ids or everything")
        request = codec.twin(rollout_service_pb2.AbortRequest)(reason=reason)
        if trajectory_ids:
            request.trajectories.trajectory_ids.extend(trajectory_ids)
        elif group_ids:
            request.groups.group_ids.extend(group_ids)
        else:
            request.all.SetInParent()
        response = await self._calls.abort(request)
        return {turn.trajectory_id: turn.policy_token_count for turn in response.aborted_turns}
