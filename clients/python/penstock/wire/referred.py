"""Group records that refer to the records of turns for their large segments.

A finished group is written after its turns, which have all of its tokens. Its record (`GroupReferred`)
stores only the position of a large segment in its trajectory. The segment's other fields are in both
records, so that a wrong turn is detected. The server reassembles a group from these records, and so does a
trainer that reads a group from the journal directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.v1 import journal_pb2, trajectory_pb2
from penstock.wire.codec import TOKEN


def put_together(
    referred: journal_pb2.GroupReferred, turns: Iterable[journal_pb2.TurnChanged]
) -> journal_pb2.GroupFinished:
    """Reassembles the group in place. `turns` has one turn for each referred segment, in order; all
    messages are twins.

    Raises ValueError if a turn is not the one that the group was made from.
    """
    trajectories = referred.finished.group.trajectories
    for place, turn in zip(referred.segments, turns, strict=True):
        try:
            trajectory = trajectories[place.trajectory]
            segment = trajectory.segments[place.segment]
        except IndexError:
            raise ValueError("the group has no such segment") from None
        found = next((s for start, s in positions(turn) if start == place.token_position), None)
        if found is not None and _head(found) == _head(segment):
            segment.CopyFrom(found)
        if (
            turn.trajectory_id != trajectory.trajectory_id
            or len(segment.token_ids) != place.token_count * TOKEN.itemsize
        ):
            raise ValueError(
                f"a turn of {turn.trajectory_id!r} does not have the {place.token_count} tokens at "
                f"{place.token_position} of {trajectory.trajectory_id!r}"
            )
    return referred.finished


def positions(turn: journal_pb2.TurnChanged) -> Iterator[tuple[int, trajectory_pb2.Segment]]:
    """Segments of a twin turn, each with its token position in the trajectory."""
    position = turn.token_count
    for segment in turn.segments:
        yield position, segment
        position += len(segment.token_ids) // TOKEN.itemsize


def _head(segment: trajectory_pb2.Segment) -> tuple[object, ...]:
    return segment.author, segment.weight_version, segment.turn_index, segment.temperature
