"""Encode plus decode of one long trajectory, to and from numpy: `python -m benchmarks.codec.trajectories`.

Each format takes the same numpy arrays (int32 token ids, float32 log-probabilities) and must return equal
numpy arrays, which is checked first. Rounds are interleaved, so that a busy moment of the machine affects
every format alike. The figures are medians. The last line is one JSON object with those of penstock.v1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, cast

import click
import cloudpickle
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.v1 import trajectory_pb2
from penstock.wire import codec

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from numpy.typing import NDArray

Arrays = tuple["NDArray[np.int32]", "NDArray[np.float32]"]

TOKENS = 8_192
VOCABULARY = 151_936
"""Vocabulary size of Qwen3: token ids take up to three bytes as varints."""

SEGMENTS = 2
"""The weights changed once while the policy wrote the trajectory."""

FIRST_VERSION = 7
ROUNDS = 51
ROUND_SECONDS = 5e-3
"""A round repeats a format for about this long, so that the measurement is warm."""

WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Format:
    """One way to serialize a trajectory."""

    name: str
    encode: Callable[[NDArray[np.int32], NDArray[np.float32]], bytes]
    decode: Callable[[bytes], list[Arrays]]


@dataclass(frozen=True)
class Figure:
    """Medians of one format."""

    name: str
    encode_ns: float
    decode_ns: float
    bytes_per_token: float

    @property
    def round_trip_ns(self) -> float:
        """Nanoseconds per token, encode plus decode."""
        return self.encode_ns + self.decode_ns


def penstock_format() -> Format:
    """penstock.v1 through the twin messages, as in product code: one segment per weight version."""
    trajectory_class = codec.twin(trajectory_pb2.Trajectory)

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        trajectory = trajectory_class(trajectory_id="trajectory", turn_count=1)
        length = -(-len(ids) // SEGMENTS)
        for index in range(SEGMENTS):
            part = slice(index * length, (index + 1) * length)
            trajectory.segments.add(
                author=trajectory_pb2.AUTHOR_POLICY,
                token_ids=codec.array_bytes(ids[part]),
                logprobs=codec.array_bytes(logprobs[part], codec.LOGPROB),
                weight_version=FIRST_VERSION + index,
                temperature=1.0,
            )
        return codec.encode(trajectory)

    def decode(data: bytes) -> list[Arrays]:
        segments = codec.decode(trajectory_pb2.Trajectory, data).segments
        return [(codec.token_ids(segment), codec.logprobs(segment)) for segment in segments]

    return Format("penstock.v1", encode, decode)


def typed_format() -> Format:
    """penstock.v1 through the generated classes: the same bytes, one Python object per token."""

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        segment = trajectory_pb2.Segment(
            author=trajectory_pb2.AUTHOR_POLICY,
            token_ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            weight_version=FIRST_VERSION,
        )
        return trajectory_pb2.Trajectory(segments=[segment]).SerializeToString()

    def decode(data: bytes) -> list[Arrays]:
        segment = trajectory_pb2.Trajectory.FromString(data).segments[0]
        return [(np.array(segment.token_ids, np.int32), np.array(segment.logprobs, np.float32))]

    return Format("penstock.v1, generated classes", encode, decode)


def varint_format() -> Format:
    """Packed varints and floats with a parallel array of versions, a common design of token messages."""
    message_class = varint_message()

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        message = message_class(
            token_ids=ids.tolist(), logprobs=logprobs.tolist(), versions=[FIRST_VERSION] * len(ids)
        )
        return message.SerializeToString()

    def decode(data: bytes) -> list[Arrays]:
        message = message_class.FromString(data)
        ids: list[int] = getattr(message, "token_ids")  # noqa: B009 - the class is made at run time
        logprobs: list[float] = getattr(message, "logprobs")  # noqa: B009
        return [(np.array(ids, np.int32), np.array(logprobs, np.float32))]

    return Format("protobuf, packed varints", encode, decode)


def varint_message() -> type[Message]:
    """A message of three repeated fields: int32 token_ids, float logprobs, int32 versions."""
    scalar = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="benchmark/tokens.proto", package="benchmark", syntax="proto3"
    )
    fields = (
        ("token_ids", scalar.TYPE_INT32),
        ("logprobs", scalar.TYPE_FLOAT),
        ("versions", scalar.TYPE_INT32),
    )
    message = file.message_type.add(name="Tokens")
    for number, (name, kind) in enumerate(fields, start=1):
        message.field.add(name=name, number=number, type=kind, label=scalar.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("benchmark.Tokens"))


def pickled(sample: Mapping[str, object]) -> bytes:
    """Serializes a sample with cloudpickle; the only function that has to deal with its missing types."""
    dumps = cast("Callable[[object], bytes]", cloudpickle.dumps)  # pyright: ignore[reportUnknownMemberType]
    return dumps(sample)


def cloudpickle_format() -> Format:
    """A dictionary of lists, like a Ray object that an agent makes itself."""

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        sample = {
            "token_ids": ids.tolist(),
            "logprobs": logprobs.tolist(),
            "version": FIRST_VERSION,
        }
        return pickled(sample)

    def decode(data: bytes) -> list[Arrays]:
        sample = cloudpickle.loads(data)
        ids = np.array(sample["token_ids"], np.int32)
        return [(ids, np.array(sample["logprobs"], np.float32))]

    return Format("cloudpickle, lists", encode, decode)


def cloudpickle_numpy_format() -> Format:
    """A dictionary of numpy arrays: the best case for pickle."""

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        return pickled({"token_ids": ids, "logprobs": logprobs, "version": FIRST_VERSION})

    def decode(data: bytes) -> list[Arrays]:
        sample = cloudpickle.loads(data)
        return [(sample["token_ids"], sample["logprobs"])]

    return Format("cloudpickle, numpy", encode, decode)


def json_format() -> Format:
    """Two arrays of numbers: the smallest form of JSON over HTTP."""

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        sample = {
            "token_ids": ids.tolist(),
            "logprobs": logprobs.tolist(),
            "version": FIRST_VERSION,
        }
        return json.dumps(sample).encode()

    def decode(data: bytes) -> list[Arrays]:
        sample = json.loads(data)
        ids = np.array(sample["token_ids"], np.int32)
        return [(ids, np.array(sample["logprobs"], np.float32))]

    return Format("JSON, arrays", encode, decode)


def openai_format() -> Format:
    """The response of an OpenAI-compatible endpoint: one object per token."""

    def encode(ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> bytes:
        content: list[dict[str, object]] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None}
            for token, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]
        return json.dumps({"choices": [{"logprobs": {"content": content}}]}).encode()

    def decode(data: bytes) -> list[Arrays]:
        content = json.loads(data)["choices"][0]["logprobs"]["content"]
        ids = np.array([int(entry["token"][9:]) for entry in content], np.int32)
        return [(ids, np.array([entry["logprob"] for entry in content], np.float32))]

    return Format("JSON, OpenAI's logprobs", encode, decode)


def sample_arrays(tokens: int) -> Arrays:
    """Returns random token ids over the whole vocabulary and log-probabilities of policy tokens."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, VOCABULARY, tokens, dtype=np.int32)
    logprobs = -generator.exponential(0.5, tokens).astype(np.float32)
    return ids, logprobs


def check(form: Format, arrays: Arrays) -> None:
    """Raises ValueError if a round trip does not return equal arrays of the same types."""
    parts = form.decode(form.encode(*arrays))
    decoded = [np.concatenate([part[column] for part in parts]) for column in range(2)]
    for before, after in zip(arrays, decoded, strict=True):
        if after.dtype != before.dtype or not np.array_equal(before, after):
            raise ValueError(f"{form.name}: the round trip changed the arrays")


def calls_per_round(form: Format, arrays: Arrays) -> int:
    """Repetitions of a format in one round; measured warm, like the rounds themselves."""
    encode = partial(form.encode, *arrays)
    seconds_per_call(encode, WARM_UP_CALLS)
    return max(WARM_UP_CALLS, round(ROUND_SECONDS / seconds_per_call(encode, WARM_UP_CALLS)))


def seconds_per_call(call: Callable[[], object], repeats: int) -> float:
    """Mean time of `repeats` calls."""
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def measure(formats: list[Format], arrays: Arrays, rounds: int) -> list[Figure]:
    """Medians over interleaved rounds."""
    repeats = {form.name: calls_per_round(form, arrays) for form in formats}
    encoded = {form.name: form.encode(*arrays) for form in formats}
    encode_seconds: dict[str, list[float]] = {form.name: [] for form in formats}
    decode_seconds: dict[str, list[float]] = {form.name: [] for form in formats}
    for _ in range(rounds):
        for form in formats:
            name = form.name
            encode = partial(form.encode, *arrays)
            encode_seconds[name].append(seconds_per_call(encode, repeats[name]))
            decode = partial(form.decode, encoded[name])
            decode_seconds[name].append(seconds_per_call(decode, repeats[name]))
    tokens = len(arrays[0])
    return [
        Figure(
            form.name,
            median(encode_seconds[form.name]) / tokens * 1e9,
            median(decode_seconds[form.name]) / tokens * 1e9,
            len(encoded[form.name]) / tokens,
        )
        for form in formats
    ]


@click.command()
@click.option("--tokens", default=TOKENS, show_default=True, help="Length of the trajectory.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Rounds to take medians over.")
def main(tokens: int, rounds: int) -> None:
    """Compare penstock.v1 with other ways to move a trajectory."""
    formats = [
        penstock_format(),
        typed_format(),
        varint_format(),
        cloudpickle_numpy_format(),
        cloudpickle_format(),
        json_format(),
        openai_format(),
    ]
    arrays = sample_arrays(tokens)
    for form in formats:
        check(form, arrays)
    figures = measure(formats, arrays, rounds)
    print(f"One trajectory of {tokens:,} tokens with log-probabilities, to and from numpy\n")
    print(f"{'':32}{'encode':>10}{'decode':>10}{'both':>10}{'size':>10}")
    print(f"{'':32}{'ns/token':>10}{'ns/token':>10}{'ns/token':>10}{'B/token':>10}")
    for figure in figures:
        print(
            f"{figure.name:32}{figure.encode_ns:10.2f}{figure.decode_ns:10.2f}"
            f"{figure.round_trip_ns:10.2f}{figure.bytes_per_token:10.2f}"
        )
    ours = figures[0]
    print()
    print(
        json.dumps(
            {
                "ns_per_token": round(ours.round_trip_ns, 3),
                "bytes_per_token": round(ours.bytes_per_token, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
