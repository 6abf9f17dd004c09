"""The tokens that a branch shares with its parent; they are delivered only once, with the parent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.wire import codec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.v1 import trajectory_pb2


def shared_prefixes(group: trajectory_pb2.TrajectoryGroup) -> dict[str, NDArray[np.int32]]:
    """The tokens that precede each trajectory's own segments, by trajectory id; empty without a parent.

    `group` is a twin. Raises MalformedMessage if a parent is not in the group or has too few tokens.
    """
    trajectories = {trajectory.trajectory_id: trajectory for trajectory in group.trajectories}
    found: dict[str, NDArray[np.int32]] = {}

    def find(trajectory: trajectory_pb2.Trajectory, depth: int) -> NDArray[np.int32]:
        known = found.get(trajectory.trajectory_id)
        if known is not None:
            return known
        count = trajectory.parent_token_count
        prefix = np.zeros(0, np.int32)
        if count:
            parent = trajectories.get(trajectory.parent_trajectory_id)
            if parent is None or depth > len(trajectories):
                raise codec.MalformedMessage(
                    f"{trajectory.trajectory_id} branches from {trajectory.parent_trajectory_id!r}, "
                    "which is not in its group"
                )
            before = [find(parent, depth + 1), *map(codec.token_ids, parent.segments)]
            prefix = np.concatenate(before)[:count]
            if len(prefix) < count:
                raise codec.MalformedMessage(
                    f"{trajectory.trajectory_id} shares {count} tokens with its parent, "
                    f"which has {len(prefix)}"
                )
        found[trajectory.trajectory_id] = prefix
        return prefix

    for trajectory in group.trajectories:
        find(trajectory, 0)
    return found
