"""Groups whose record leaves large segments to the records of the turns that sampled them.

A finished group is written after its turns, which have all of its tokens. Its record (`GroupReferred`) says
of a large segment only where in its trajectory it lies; what it says of it the record of a turn says, too,
so that a wrong turn is recognised. The server puts a group together from them, and so does a trainer that
reads it where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock.v1 import journal_pb2, trajectory_pb2
from penstock.wire.codec import TOKEN


def put_together(
    referred: journal_pb2.GroupReferred, turns: Iterable[journal_pb2.TurnChanged]
) -> journal_pb2.GroupFinished:
    """The whole group, in place; `turns` has the one of each of its segments, in order; twin messages.

    Raises ValueError where one is not what the group was made of.
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
    """Segments of a twin turn, each with how many tokens of its trajectory come before it."""
    position = turn.token_count
    for segment in turn.segments:
        yield position, segment
        position += len(segment.token_ids) // TOKEN.itemsize


def _head(segment: trajectory_pb2.Segment) -> tuple[object, ...]:
    """What a segment says beside its arrays."""
    return segment.author, segment.weight_version, segment.turn_index, segment.temperature
