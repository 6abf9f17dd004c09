"""Groups that the server only tells the place of: they lie in its journal's folder, on this host.

    Welcome with a folder -> the same folder is found here -> demands say `by_place` -> StoredGroup -> read
                          -> another host, another file system, not allowed to -> groups come as messages

What may go wrong with one: its file was removed by a compaction that did not wait for us, or what is read
is not what was written. Then nobody has the group here, and the server, to which the trainer says Hello
again without `by_place`, delivers it as a message, or finds itself that it is lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from penstock.common.memory_file import host_id
from penstock.v1 import journal_pb2, trainer_service_pb2, trajectory_pb2
from penstock.wire import codec
from penstock.wire.frames import read_payload_at
from penstock.wire.referred import put_together

LOCK = "LOCK"
JournalRecord = codec.twin(journal_pb2.JournalRecord)


class GroupUnreadable(Exception):
    """A group is not where the server says."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A group that came, in whatever way."""

    delivery_id: int
    group: trajectory_pb2.TrajectoryGroup


class StoredGroups:
    """A folder of groups that can be read here."""

    def __init__(self, folder: Path) -> None:
        """`find` says whether it is the server's."""
        self._folder = folder

    @classmethod
    def find(cls, told: trainer_service_pb2.GroupFolder) -> StoredGroups | None:
        """The server's folder; None where it is not here, or not for us to read."""
        if not told.path:
            return None
        folder = Path(told.path)
        try:
            # A host that has no boot id is not the server's, which told one.
            here = host_id() == told.host_id and os.access(folder, os.R_OK | os.X_OK)
            lock = (folder / LOCK).stat() if here else None
        except OSError:
            return None
        same = lock is not None and (lock.st_dev, lock.st_ino) == (told.device, told.inode)
        return cls(folder) if same else None

    def read(self, stored: trainer_service_pb2.StoredGroup) -> trajectory_pb2.TrajectoryGroup:
        """A group. Raises GroupUnreadable."""
        with contextlib.ExitStack() as stack:
            files = _Files(self._folder, stack)
            record = files.read(stored)
            if record.HasField("group_finished"):
                return record.group_finished.group
            if not record.HasField("group_referred"):
                raise GroupUnreadable(f"{stored.file} at {stored.offset_bytes}: it is no group")
            turns = (files.read(turn).turn_changed for turn in stored.turns)
            try:
                return put_together(record.group_referred, turns).group
            except ValueError as error:
                raise GroupUnreadable(f"{stored.file} at {stored.offset_bytes}: {error}") from error


class _Files:
    """Files of the folder that are open while a group is read."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        """`stack` closes them."""
        self._folder = folder
        self._stack = stack
        self._descriptors: dict[str, int] = {}

    def read(
        self, place: trainer_service_pb2.StoredGroup | trainer_service_pb2.StoredTurn
    ) -> journal_pb2.JournalRecord:
        """The record at a place. Raises GroupUnreadable."""
        try:
            if place.file not in self._descriptors:
                self._descriptors[place.file] = self._open(place.file)
            payload = read_payload_at(
                self._descriptors[place.file], place.offset_bytes, place.length_bytes
            )
        except (OSError, ValueError) as error:
            raise GroupUnreadable(f"{place.file} at {place.offset_bytes}: {error}") from error
        try:
            return JournalRecord.FromString(payload)
        except DecodeError as error:
            raise GroupUnreadable(f"{place.file} at {place.offset_bytes}: no record") from error

    def _open(self, name: str) -> int:
        if not name or Path(name).name != name:
            raise GroupUnreadable(f"{name!r} is no file of {self._folder}")
        path = self._folder / name
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._stack.callback(os.close, descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise GroupUnreadable(f"{path} is no file")
        return descriptor
