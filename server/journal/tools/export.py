"""Exports the finished groups of a journal as a table: JSON lines or Parquet, one row per trajectory.

Columns with a value per token are as long as `token_ids`. A context token has neither a log-probability nor
a weight version; `loss_mask` is true for tokens that the policy sampled. Numbers are exported as stored: a
float32 written as JSON reads back as the same float32. NaN and infinities are null in JSON, which cannot
express them. The file appears whole or not at all. At most one group is in memory at a time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from google.protobuf import struct_pb2

from penstock.server.groups.buffer import BufferedGroup
from penstock.v1 import journal_pb2, trajectory_pb2
from penstock.wire import codec

if TYPE_CHECKING:
    from numpy.typing import NDArray

State = Literal["waiting", "used"]

Row = Mapping[str, object]
"""Values are JSON types or PerToken."""
Write = Callable[[Iterable[Row]], None]


@dataclass(frozen=True, slots=True)
class PerToken:
    """One value per token, of shape [n]; some may be absent."""

    values: NDArray[Any]
    present: NDArray[np.bool_] | None = None
    """Mask of shape [n]; None if all values are present."""

    def to_list(self) -> list[object]:
        """Return the values, with None for each that is absent or not finite."""
        values: list[object] = self.values.tolist()
        if self.present is None:
            return values
        present = self.present & np.isfinite(self.values)
        return [
            value if there else None for value, there in zip(values, present.tolist(), strict=True)
        ]


def state_of(group: BufferedGroup) -> State:
    """Return `used` if a step trained the group and no durable checkpoint contains that step yet."""
    return "used" if group.step else "waiting"


def purpose_name(purpose: trajectory_pb2.Purpose.ValueType) -> str:
    return "eval" if purpose == trajectory_pb2.PURPOSE_EVAL else "train"


def group_rows(finished: journal_pb2.GroupFinished, group: BufferedGroup) -> list[Row]:
    return [
        {
            "group_id": group.group_id,
            "task_id": group.task_id,
            "state": state_of(group),
            "step": group.step or None,
            "purpose": purpose_name(group.purpose),
            "data_source": finished.task.data_source,
            "data_index": finished.task.index if finished.HasField("task") else None,
            "task_metadata": plain(finished.task.metadata),
            "admitted_weight_version": group.admitted_version,
            **_trajectory(trajectory),
        }
        for trajectory in finished.group.trajectories
    ]


def _trajectory(trajectory: trajectory_pb2.Trajectory) -> Row:
    outcome = trajectory.outcome
    failed = outcome.HasField("failure")
    reason = trajectory_pb2.FinishReason.Name(trajectory.finish_reason)
    return {
        "trajectory_id": trajectory.trajectory_id,
        "parent_trajectory_id": trajectory.parent_trajectory_id or None,
        "parent_token_count": trajectory.parent_token_count,
        "sample_index": trajectory.sample_index,
        "reward": outcome.reward if outcome.HasField("reward") else None,
        "failure_reason": outcome.failure.reason if failed else None,
        "failure_message": outcome.failure.message if failed else None,
        "metrics": dict(sorted(outcome.metrics.items())),
        "turn_rewards": list(outcome.turn_rewards),
        "metadata": plain(outcome.metadata),
        "turn_count": trajectory.turn_count,
        "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
        "traceparent": trajectory.traceparent or None,
        **_tokens(trajectory.segments),
    }


def _tokens(segments: Iterable[trajectory_pb2.Segment]) -> Row:
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    logprobs: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    policy: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    versions: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    turns: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    for segment in segments:
        tokens = codec.token_ids(segment)
        count = len(tokens)
        by_policy = segment.author == trajectory_pb2.AUTHOR_POLICY
        ids.append(tokens)
        policy.append(np.full(count, by_policy))
        logprobs.append(codec.logprobs(segment) if by_policy else np.full(count, np.nan, "<f4"))
        versions.append(np.full(count, segment.weight_version, np.int64))
        turns.append(np.full(count, segment.turn_index, np.int32))
    mask = np.concatenate(policy)
    return {
        "token_ids": PerToken(np.concatenate(ids)),
        "loss_mask": PerToken(mask),
        "logprobs": PerToken(np.concatenate(logprobs), mask),
        "weight_versions": PerToken(np.concatenate(versions), mask),
        "turn_indices": PerToken(np.concatenate(turns)),
    }


def plain(struct: struct_pb2.Struct) -> dict[str, object]:
    """Convert a protobuf structure to JSON values, with sorted keys."""
    return {name: _plain_value(value) for name, value in sorted(struct.fields.items())}


def _plain_value(value: struct_pb2.Value) -> object:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain_value(item) for item in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            return None
        return int(number) if number.is_integer() else number
    if kind == "string_value":
        return value.string_value
    return value.bool_value if kind == "bool_value" else None


def open_writer(path: Path) -> contextlib.AbstractContextManager[Write]:
    """Open a file named *.jsonl or *.parquet; the returned function writes the rows of one group.

    Raises OSError, and ModuleNotFoundError if pyarrow is not installed.
    """
    if path.suffix == ".parquet":
        return _parquet(path, importlib.import_module("pyarrow"))
    return _json_lines(path)


@contextlib.contextmanager
def _beside(path: Path) -> Generator[Path]:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def _json_lines(path: Path) -> Generator[Write]:
    with _beside(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:

        def write(rows: Iterable[Row]) -> None:
            for row in rows:
                values = {
                    name: value.to_list() if isinstance(value, PerToken) else value
                    for name, value in row.items()
                }
                file.write(json.dumps(values, ensure_ascii=False, allow_nan=False))
                file.write("\n")

        yield write


@contextlib.contextmanager
def _parquet(path: Path, arrow: Any) -> Generator[Write]:
    parquet: Any = importlib.import_module("pyarrow.parquet")
    schema = parquet_schema(arrow)
    with (
        _beside(path) as unfinished,
        parquet.ParquetWriter(unfinished, schema, compression="zstd") as file,
    ):

        def write(rows: Iterable[Row]) -> None:
            columns = list(zip(*(row.values() for row in rows), strict=True))
            arrays = [
                _arrow_column(arrow, values, field.type)
                for values, field in zip(columns, schema, strict=True)
            ]
            # A row group per group.
            file.write_table(arrow.Table.from_arrays(arrays, schema=schema))

        yield write


def parquet_schema(arrow: Any) -> Any:
    """Return the columns, in the order of a row. User-defined structures are JSON strings."""
    text, long, whole = arrow.string(), arrow.int64(), arrow.int32()
    columns = {
        "group_id": text,
        "task_id": text,
        "state": text,
        "step": long,
        "purpose": text,
        "data_source": text,
        "data_index": long,
        "task_metadata": text,
        "admitted_weight_version": long,
        "trajectory_id": text,
        "parent_trajectory_id": text,
        "parent_token_count": whole,
        "sample_index": whole,
        "reward": arrow.float64(),
        "failure_reason": text,
        "failure_message": text,
        "metrics": arrow.map_(text, arrow.float64()),
        "turn_rewards": arrow.list_(arrow.float64()),
        "metadata": text,
        "turn_count": whole,
        "finish_reason": text,
        "traceparent": text,
        "token_ids": arrow.list_(whole),
        "loss_mask": arrow.list_(arrow.bool_()),
        "logprobs": arrow.list_(arrow.float32()),
        "weight_versions": arrow.list_(long),
        "turn_indices": arrow.list_(whole),
    }
    return arrow.schema(list(columns.items()))


def _arrow_column(arrow: Any, values: tuple[object, ...], kind: Any) -> Any:
    columns = [value for value in values if isinstance(value, PerToken)]
    if columns:
        offsets = np.cumsum([0, *(len(column.values) for column in columns)], dtype=np.int32)
        items = [
            arrow.array(
                column.values,
                kind.value_type,
                mask=None if column.present is None else ~column.present,
            )
            for column in columns
        ]
        return arrow.ListArray.from_arrays(offsets, arrow.concat_arrays(items), type=kind)
    if arrow.types.is_map(kind):
        maps = cast("tuple[Mapping[str, float], ...]", values)
        return arrow.array([list(each.items()) for each in maps], kind)
    return arrow.array([json.dumps(v) if isinstance(v, dict) else v for v in values], kind)
