"""The client of `penstock.v1`: sample from a policy, lease tasks and score the attempts.

    async def agent(task, trajectory):
        return float(task.metadata["answer"] in (await trajectory.turn()).text)

    async with connect("127.0.0.1:50051") as penstock:
        await penstock.work(agent, concurrency=8)

Uses `v1`, `wire` and `common`; imports neither torch nor vllm. Begin with `client.py`.
"""

from penstock.client.blocking import BlockingTrajectory
from penstock.client.calls import Patience
from penstock.client.client import Client, Replica, ServerInfo, ServerLoad, connect
from penstock.client.conversation import Message, Tool, ToolCall
from penstock.client.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidRequest,
    NotAllowedNow,
    NotFound,
    Overloaded,
    PenstockError,
    ServerUnavailable,
)
from penstock.client.leases import Attempt, Leases
from penstock.client.outcome import Closed, Failed, Outcome
from penstock.client.sampling import SamplingParams
from penstock.client.scoring import group_reward
from penstock.client.statistics import Statistics
from penstock.client.tasks import Purpose, Submission, Task
from penstock.client.trajectory import Trajectory
from penstock.client.turns import FinishReason, SegmentView, TrajectoryRecord, Turn
from penstock.client.worker import Worker, WorkerSettings
from penstock.wire.security import CredentialsUnusable, Security

__all__ = [
    "AccessDenied",
    "Attempt",
    "BlockingTrajectory",
    "Client",
    "Closed",
    "CredentialsUnusable",
    "DeadlineExceeded",
    "Failed",
    "FinishReason",
    "InvalidRequest",
    "Leases",
    "Message",
    "NotAllowedNow",
    "NotFound",
    "Outcome",
    "Overloaded",
    "Patience",
    "PenstockError",
    "Purpose",
    "Replica",
    "SamplingParams",
    "Security",
    "SegmentView",
    "ServerInfo",
    "ServerLoad",
    "ServerUnavailable",
    "Statistics",
    "Submission",
    "Task",
    "Tool",
    "ToolCall",
    "Trajectory",
    "TrajectoryRecord",
    "Turn",
    "Worker",
    "WorkerSettings",
    "connect",
    "group_reward",
]
