"""Records of a journal as messages of a stream, and messages as records.

A message of the log is a piece of a segment: frames of checked bytes, one after the other
(`journal_segment`), each of which names the message that it is in, so that none passes for another. What is
in a frame begins with its kind:

    RECORD, REFERENCE                      what was appended
    BEGIN                                  a snapshot begins: it says all that was appended before
    SNAPSHOT_RECORD, SNAPSHOT_REFERENCE    of the snapshot, between what is appended meanwhile
    END                                    the snapshot that began in the named message is whole
    OWNER                                  another server writes from here on

A large record is outside: in messages of its own before the one that refers to it, by their place, length
and checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from penstock.server.journal.disk.segment import Payload, frame_of, payload_length, read_frame
from penstock.server.journal.records import Stored
from penstock.wire.frames import frame_length

REFERENCE = struct.Struct("<QQQQ")
PLACE = struct.Struct("<Q")

MESSAGE_OVERHEAD = 256
"""Bytes that a message takes in a stream beside its body: subject, headers, and NATS's own."""


class FrameCorrupt(Exception):
    """A message is not what was written."""


class Kind(IntEnum):
    """What a frame is; on the disk, so never renumbered."""

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
    """A record that is outside: in so many messages from `first` on."""

    first: int
    count: int
    length: int
    """Bytes of the record."""
    digest: int
    """XXH3-64 of the record."""

    def encode(self) -> bytes:
        """As the content of a frame."""
        return REFERENCE.pack(self.first, self.count, self.length, self.digest)

    def join(self, chunks: Sequence[bytes]) -> bytes:
        """The record, from its messages. Raises FrameCorrupt."""
        record = b"".join(chunks)
        if len(record) != self.length or xxhash.xxh3_64_intdigest(record) != self.digest:
            raise FrameCorrupt(
                f"the {self.length} bytes from message {self.first} on are not what was written"
            )
        return record


def outside_bytes(reference: Reference) -> int:
    """What a record that is outside takes in the stream."""
    return reference.length + reference.count * MESSAGE_OVERHEAD


@dataclass(slots=True, eq=False)
class StoredOutside(Stored):
    """A record that is referred to; its length is that of its frame and of what is outside."""

    reference: Reference


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes a frame."""

    kind: Kind
    payload: Payload
    reference: Reference | None = None
    """Of a record that is outside already."""


@dataclass(frozen=True, slots=True)
class Message:
    """One that is to be stored in exactly this place."""

    sequence: int
    subject: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Subjects:
    """Where the messages of one stream go."""

    stream: str

    @property
    def log(self) -> str:
        """Frames."""
        return f"penstock.{self.stream}.log.frames"

    @property
    def end(self) -> str:
        """The one with which a snapshot is whole."""
        return f"penstock.{self.stream}.log.end"

    @property
    def all_of_log(self) -> str:
        """Either of them."""
        return f"penstock.{self.stream}.log.*"

    @property
    def all_outside(self) -> str:
        """Whatever is outside."""
        return f"penstock.{self.stream}.payload.*"

    @property
    def owner(self) -> str:
        """Where the server that writes answers whoever asks; no part of the stream."""
        return f"penstock.{self.stream}.owner"

    def is_log(self, subject: str) -> bool:
        """Whether a message is of the log, and not of what is outside."""
        return subject in (self.log, self.end)

    def outside(self, first: int) -> str:
        """The messages of one record."""
        return f"penstock.{self.stream}.payload.{first}"


@dataclass(frozen=True, slots=True)
class Packing:
    """How records become messages."""

    subjects: Subjects
    message_bytes: int
    """Most bytes of one."""
    inline_bytes: int
    """Longest record that is in the log itself."""

    def pack(self, first: int, entries: Sequence[Entry]) -> tuple[list[Message], list[Stored]]:
        """Messages from place `first` on, and where each entry lies; what is outside comes first."""
        messages: list[Message] = []
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
                messages.append(Message(first + len(messages), self.subjects.log, b"".join(frames)))
                frames, length = [], 0
            sequence = first + len(messages)
            frames += frame_of(payload, sequence)
            stored.append(_stored(sequence, length, more, entry.reference))
            length += more
        if frames:
            subject = self.subjects.end if placed[-1].kind is Kind.END else self.subjects.log
            messages.append(Message(first + len(messages), subject, b"".join(frames)))
        return messages, stored

    def _put_outside(self, first: int, payload: Payload) -> tuple[list[Message], Reference]:
        record = memoryview(b"".join(payload))
        chunks = [
            bytes(record[begin : begin + self.message_bytes])
            for begin in range(0, len(record), self.message_bytes)
        ]
        subject = self.subjects.outside(first)
        messages = [Message(first + place, subject, chunk) for place, chunk in enumerate(chunks)]
        digest = xxhash.xxh3_64_intdigest(record)
        return messages, Reference(first, len(chunks), len(record), digest)


def _stored(sequence: int, offset: int, length: int, reference: Reference | None) -> Stored:
    if reference is None:
        return Stored(sequence, offset, length)
    return StoredOutside(sequence, offset, length + reference.length, reference)


@dataclass(frozen=True, slots=True)
class Found:
    """A frame of a message."""

    kind: Kind
    content: memoryview
    stored: Stored


def read_message(sequence: int, body: bytes) -> Iterator[Found]:
    """The frames of one message. Raises FrameCorrupt."""
    offset = 0
    while offset < len(body):
        found, length = _read_at(sequence, body, offset)
        yield found
        offset += length


def read_at(sequence: int, body: bytes, offset: int) -> Found:
    """One frame of a message. Raises FrameCorrupt."""
    return _read_at(sequence, body, offset)[0]


def _read_at(sequence: int, body: bytes, offset: int) -> tuple[Found, int]:
    try:
        frame = read_frame(memoryview(body)[offset:], offset)
        # What a file has of its durable bytes, a message has of its place.
        if frame.durable != sequence or frame.closing:
            raise ValueError(f"it belongs into message {frame.durable}")
        kind = Kind(frame.payload[0])
        content = frame.payload[1:]
        reference = Reference(*REFERENCE.unpack(content)) if kind in REFERENCES else None
    except (ValueError, IndexError, struct.error) as error:
        raise FrameCorrupt(f"message {sequence} at {offset}: {error}") from error
    return Found(kind, content, _stored(sequence, offset, frame.length, reference)), frame.length
