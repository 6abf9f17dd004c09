"""Packs journal records into messages of a stream, and unpacks them.

A message of the log holds the same frames with checksums as a segment (`disk.segment`). Each frame names
the message that it is in, so that no message passes for another. The content of a frame begins with its
kind:

    RECORD, REFERENCE                      appended records
    BEGIN                                  start of a snapshot, which replaces everything before it
    SNAPSHOT_RECORD, SNAPSHOT_REFERENCE    records of the snapshot, interleaved with appended records
    END                                    completes the snapshot that began in the named message
    OWNER                                  another server writes from here on

A large record is stored outside the log: in separate messages before the one that refers to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from penstock.server.journal.disk.segment import frame_of, payload_length, read_frame
from penstock.server.journal.protocol import Payload, Stored
from penstock.wire.frames import frame_length

REFERENCE = struct.Struct("<QQQQ")
PLACE = struct.Struct("<Q")

MESSAGE_OVERHEAD = 256
"""Bytes that a message takes in a stream in addition to its body: subject, headers, and NATS's own."""


class FrameCorrupt(Exception):
    """The content of a message differs from what was written."""


class Kind(IntEnum):
    """Stored on disk, so never renumbered."""

    RECORD = 1
    REFERENCE = 2
    SNAPSHOT_RECORD = 3
    SNAPSHOT_REFERENCE = 4
    BEGIN = 5
    END = 6
    OWNER = 7


IN_SNAPSHOT = (Kind.SNAPSHOT_RECORD, Kind.SNAPSHOT_REFERENCE)
REFERENCES = (Kind.REFERENCE, Kind.SNAPSHOT_REFERENCE)


@dataclass(frozen=True, slots=True)
class Reference:
    """A record outside the log, in `count` messages starting at `first`."""

    first: int
    count: int
    length: int
    """Bytes of the record."""
    digest: int
    """XXH3-64 of the record."""

    def encode(self) -> bytes:
        return REFERENCE.pack(self.first, self.count, self.length, self.digest)

    def join(self, chunks: Sequence[bytes]) -> bytes:
        """Join the bodies of its messages. Raises FrameCorrupt."""
        record = b"".join(chunks)
        if len(record) != self.length or xxhash.xxh3_64_intdigest(record) != self.digest:
            raise FrameCorrupt(
                f"the {self.length} bytes starting at message {self.first} are not what was written"
            )
        return record


def outside_bytes(reference: Reference) -> int:
    """Bytes that the record takes in the stream."""
    return reference.length + reference.count * MESSAGE_OVERHEAD


@dataclass(slots=True, eq=False)
class StoredOutside(Stored):
    """A record outside the log; `length` is that of its frame plus the bytes outside."""

    reference: Reference


@dataclass(frozen=True, slots=True)
class Entry:
    """The content of one frame to write."""

    kind: Kind
    payload: Payload
    reference: Reference | None = None
    """Set if the record is outside the log already."""

    @property
    def frame_bytes(self) -> int:
        """Size of its frame; approximate for a reference."""
        return frame_length(payload_length(self.payload) + 1)


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message to store under exactly this sequence."""

    sequence: int
    subject: str
    body: bytes


class Subjects:
    """The NATS subjects of one stream."""

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.log = f"penstock.{stream}.log.frames"
        """Of messages with frames, other than `end`."""
        self.end = f"penstock.{stream}.log.end"
        """Of the message that completes a snapshot."""
        self.all_of_log = f"penstock.{stream}.log.*"
        self.all_outside = f"penstock.{stream}.payload.*"
        self.owner = f"penstock.{stream}.owner"
        """On which the writing server answers that it is the owner; not part of the stream."""

    def is_log(self, subject: str) -> bool:
        """Whether a message belongs to the log, and not to a record outside it."""
        return subject in (self.log, self.end)

    def outside(self, first: int) -> str:
        """Subject of the messages of one record outside the log."""
        return f"penstock.{self.stream}.payload.{first}"


@dataclass(frozen=True, slots=True)
class Packing:
    subjects: Subjects
    message_bytes: int
    """Maximum body size of a message."""
    inline_bytes: int
    """Largest record stored inside the log."""

    def pack(
        self, first: int, entries: Sequence[Entry]
    ) -> tuple[list[StreamMessage], list[Stored]]:
        """Pack entries into messages with sequences starting at `first`.

        Returns the messages, those outside the log first, and the location of each entry.
        """
        messages: list[StreamMessage] = []
        placed: list[Entry] = []
        for entry in entries:
            if entry.reference is None and payload_length(entry.payload) > self.inline_bytes:
                chunks, reference = self._put_outside(first + len(messages), entry.payload)
                messages += chunks
                kind = Kind.REFERENCE if entry.kind is Kind.RECORD else Kind.SNAPSHOT_REFERENCE
                placed.append(Entry(kind, (), reference))
            else:
                placed.append(entry)
        stored: list[Stored] = []
        frames: list[bytes | bytearray] = []
        length = 0
        for entry in placed:
            content = entry.payload if entry.reference is None else (entry.reference.encode(),)
            payload: Payload = (bytes([entry.kind]), *content)
            more = frame_length(payload_length(payload))
            if frames and length + more > self.message_bytes:
                messages.append(
                    StreamMessage(first + len(messages), self.subjects.log, b"".join(frames))
                )
                frames, length = [], 0
            sequence = first + len(messages)
            frames += frame_of(payload, sequence)
            stored.append(_stored(sequence, length, more, entry.reference))
            length += more
        if frames:
            subject = self.subjects.end if placed[-1].kind is Kind.END else self.subjects.log
            messages.append(StreamMessage(first + len(messages), subject, b"".join(frames)))
        return messages, stored

    def _put_outside(self, first: int, payload: Payload) -> tuple[list[StreamMessage], Reference]:
        record = memoryview(b"".join(payload))
        chunks = [
            bytes(record[begin : begin + self.message_bytes])
            for begin in range(0, len(record), self.message_bytes)
        ]
        subject = self.subjects.outside(first)
        messages = [
            StreamMessage(first + place, subject, chunk) for place, chunk in enumerate(chunks)
        ]
        digest = xxhash.xxh3_64_intdigest(record)
        return messages, Reference(first, len(chunks), len(record), digest)


def _stored(sequence: int, offset: int, length: int, reference: Reference | None) -> Stored:
    if reference is None:
        return Stored(sequence, offset, length)
    return StoredOutside(sequence, offset, length + reference.length, reference)


@dataclass(frozen=True, slots=True)
class Found:
    kind: Kind
    content: memoryview
    stored: Stored


def read_message(sequence: int, body: bytes) -> Iterator[Found]:
    """Yield the frames of one message. Raises FrameCorrupt."""
    offset = 0
    while offset < len(body):
        found, length = read_at(sequence, body, offset)
        yield found
        offset += length


def read_at(sequence: int, body: bytes, offset: int) -> tuple[Found, int]:
    """Read the frame at an offset of a message; returns also its length. Raises FrameCorrupt."""
    try:
        frame = read_frame(memoryview(body)[offset:], offset)
        # In a message, the frame's `durable` field holds the sequence of the message.
        if frame.durable != sequence or frame.closing:
            raise ValueError(f"it belongs to message {frame.durable}")
        kind = Kind(frame.payload[0])
        content = frame.payload[1:]
        reference = Reference(*REFERENCE.unpack(content)) if kind in REFERENCES else None
    except (ValueError, IndexError, struct.error) as error:
        raise FrameCorrupt(f"message {sequence} at {offset}: {error}") from error
    return Found(kind, content, _stored(sequence, offset, frame.length, reference)), frame.length
