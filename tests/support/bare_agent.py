"""An agent written only from docs/guides/clients.md.

    python -S bare_agent.py STUBS ADDRESS < docs/guides/clients.md

It uses generated stubs, gRPC and the messages on that page, with its own attempt's id filled in. It
imports nothing from this project. It prints the results as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse

from penstock.v1 import rollout_service_pb2_grpc, task_service_pb2_grpc, trajectory_pb2

ABORTED = trajectory_pb2.FINISH_REASON_ABORTED


class Page:
    """The messages on the page, in page order."""

    def __init__(self, text: str) -> None:
        self._blocks = re.findall(r"```textproto\n# penstock\.v1\.(\w+)\n(.*?)```", text, re.DOTALL)

    def message(self, name: str, index: int = 0) -> Any:
        """The page's message of type `name`; `index` chooses among several."""
        body = [body for found, body in self._blocks if found == name][index]
        kind = GetMessageClass(Default().FindMessageTypeByName(f"penstock.v1.{name}"))
        return Parse(body, kind())

    def own(self, name: str, index: int, trajectory_id: str) -> Any:
        """The page's message of type `name`, addressed to this trajectory."""
        message = self.message(name, index)
        message.trajectory_id = trajectory_id
        return message


def turn(stream: Any) -> tuple[int, Any]:
    """Return the number of tokens a stream delivered, and its `finished` event."""
    events = list(stream)
    kinds = [event.WhichOneof("event") for event in events]
    assert (kinds[0], kinds[-1]) == ("started", "finished"), kinds
    tokens = sum(len(event.segment.token_ids) for event in events[1:-1])
    return tokens, events[-1].finished


def drive(page: Page, tasks: Any, rollouts: Any) -> dict[str, Any]:
    """Drive one attempt through the steps on the page."""
    leases = tasks.LeaseTasks(page.message("LeaseTasksRequest"))
    leased = next(leases)
    mine = leased.trajectory_id

    tokens, finished = turn(rollouts.Generate(page.own("GenerateRequest", 0, mine)))
    aborted = finished.finish_reason == ABORTED
    while finished.finish_reason == ABORTED:
        more, finished = turn(rollouts.Continue(page.own("ContinueRequest", 1, mine)))
        tokens += more
    assert tokens == finished.policy_token_count

    renewal = page.message("RenewLeaseRequest")
    renewal.trajectory_ids[:] = [mine, "nobody's"]
    expired = list(tasks.RenewLease(renewal).expired_trajectory_ids)

    answer = page.own("ContinueRequest", 0, mine)
    again, other = turn(rollouts.Continue(answer))
    assert again == other.policy_token_count

    closed = tasks.CompleteTrajectory(page.own("CompleteTrajectoryRequest", 0, mine))
    leases.cancel()
    return {
        "trajectory_id": mine,
        "answer": leased.task.metadata["answer"],
        "texts": [finished.message.content, other.message.content],
        "aborted": aborted,
        "expired": expired,
        "completed": closed.group_completed,
    }


def main(stubs: str, address: str) -> None:
    assert Path(trajectory_pb2.__file__).is_relative_to(stubs)
    assert importlib.util.find_spec("penstock.client") is None
    with grpc.insecure_channel(address) as channel:
        tasks = task_service_pb2_grpc.TaskServiceStub(channel)
        rollouts = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        json.dump(drive(Page(sys.stdin.read()), tasks, rollouts), sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
