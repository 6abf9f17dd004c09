"""Reads groups from the server's journal folder, if it is on this host and the server sends places only.

    Welcome with a folder -> the same folder is found here -> demands set `by_place` -> StoredGroup -> read
                          -> another host or file system, or no permission -> groups arrive as messages

A stored group can be unreadable, because a compaction removed its file without waiting, or because the
content is not what was written. The trainer then says Hello again without `by_place`. The server delivers
the group as a message, or finds that it has lost the group itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.common.memory_file import host_id
from penstock.v1 import journal_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire.frames import read_payload_at
from penstock.wire.messages import JournalRecord
from penstock.wire.referred import put_together

LOCK = "LOCK"


class GroupUnreadable(Exception):
    """A group cannot be read from the place that the server named."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A delivered group, read from a message or from the journal."""

    delivery_id: int
    group: trajectory_pb2.TrajectoryGroup


@dataclass(frozen=True, slots=True)
class StoredGroups:
    """A journal folder from which groups can be read. `find` checks that the folder is the server's."""

    folder: Path

    @classmethod
    def find(cls, told: trainer_service_pb2.GroupFolder) -> StoredGroups | None:
        """Open the server's folder; None if it is on another host or not readable."""
        if not told.path:
            return None
        folder = Path(told.path)
        try:
            # A host without a boot id cannot be the server's, which sent one.
            here = host_id() == told.host_id and os.access(folder, os.R_OK | os.X_OK)
            lock = (folder / LOCK).stat() if here else None
        except OSError:
            return None
        same = lock is not None and (lock.st_dev, lock.st_ino) == (told.device, told.inode)
        return cls(folder) if same else None

    def read(self, stored: trainer_service_pb2.StoredGroup) -> trajectory_pb2.TrajectoryGroup:
        """Read a group. Raises GroupUnreadable."""
        with contextlib.ExitStack() as stack:
            files = _Files(self.folder, stack)
            record = files.read(stored)
            if record.HasField("group_finished"):
                return record.group_finished.group
            if not record.HasField("group_referred"):
                raise GroupUnreadable(f"{stored.file} at {stored.offset_bytes}: not a group")
            turns = (files.read(turn).turn_changed for turn in stored.turns)
            try:
                return put_together(record.group_referred, turns).group
            except ValueError as error:
                raise GroupUnreadable(f"{stored.file} at {stored.offset_bytes}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Files:
    """The files that are open while a group is read."""

    folder: Path
    stack: contextlib.ExitStack
    """Closes the files."""
    descriptors: dict[str, int] = field(default_factory=dict[str, int])

    def read(
        self, place: trainer_service_pb2.StoredGroup | trainer_service_pb2.StoredTurn
    ) -> journal_pb2.JournalRecord:
        """Read the record at a place. Raises GroupUnreadable."""
        try:
            if place.file not in self.descriptors:
                self.descriptors[place.file] = self._open(place.file)
            descriptor = self.descriptors[place.file]
            payload = read_payload_at(descriptor, place.offset_bytes, place.length_bytes)
        except (OSError, ValueError) as error:
            raise GroupUnreadable(f"{place.file} at {place.offset_bytes}: {error}") from error
        try:
            return JournalRecord.FromString(payload)
        except DecodeError as error:
            raise GroupUnreadable(f"{place.file} at {place.offset_bytes}: not a record") from error

    def _open(self, name: str) -> int:
        if not name or Path(name).name != name:
            raise GroupUnreadable(f"{name!r} is not a file of {self.folder}")
        path = self.folder / name
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self.stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise GroupUnreadable(f"{path} is not a regular file")
        return descriptor
