"""Distributes one weight version from the hub to its engine servers.

Each host receives the bytes once. The first engine server on a host, its *leader*, gets them from the hub
or from another host, and the others on that host read the leader's memory. On the hub's own host all read
the hub's memory. An engine server that cannot read the offered memory is sent the bytes, so a wrong guess
about hosts costs only time. If a leader fails, or takes longer than half of `stage_seconds`, the next
engine on its host leads.

A leader that reports holding the previous version is sent only what changed, if that is fewer bytes than
the tree would carry (`differences`). Its host then has the whole version, and hands it on to other hosts.
An adapter is only a few megabytes: each engine server gets it from the hub, and hands none on. Every
engine server verifies every byte itself, against the hub's checksums.

The hosts form a tree. The hub hands the version to `most` hosts, each of those to as many more, and so on;
with one each, it is a chain. A host passes on what it has while it still receives, so the last host has
all of it about as soon as the first. If a host fails, it leaves the tree. Those that took the version from
it start over with another one, and after a second failure with the hub.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from penstock.common.memory_file import host_id
from penstock.server.config.pool import PoolSection
from penstock.server.pool.differences import Differing, Sendable
from penstock.server.pool.member import Member
from penstock.server.pool.payload import Tensors, VersionPayload
from penstock.server.pool.remote import EngineRefused, StagedThere, Unanswered
from penstock.server.weights.probe import Probe
from penstock.v1 import weights_pb2
from penstock.wire.differences import NOT_THE_DIFFERENCE
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

PEERS_TRIED = 2
"""Number of hosts that are asked before the hub sends the version itself."""


def not_taken(version: int, error: EngineRefused) -> str:
    fenced = error.failure.reason == Reason.STALE_EPOCH
    why = "takes weights from a newer hub: it " if fenced else ""
    return f"{why}did not take version {version}: {error}"


@dataclass(frozen=True, slots=True)
class Shared:
    """A version in shared memory of a host."""

    memory: weights_pb2.SharedMemorySource
    tensors: Tensors
    """The tensors with their offsets in that memory."""


Source = Shared | weights_pb2.PeerSource | Sendable | None
"""A Sendable streams the difference, None the whole."""

Leading = asyncio.Future[Shared | None]
"""Memory where a host's leader has the version; None if not readable by others. Cancelled on failure."""

BUSY_SECONDS = 1.0
"""Default delay before an upload is retried on an engine server that is busy with another one."""
UNREADABLE = (Reason.SOURCE_UNAVAILABLE, Reason.FIELD_INVALID, Reason.CHECKSUM_MISMATCH)
"""Refusals of a source after which the hub sends the bytes itself."""


@dataclass(slots=True)
class Branches:
    """The hosts that can hand one version on, in the order in which they got it."""

    most: int
    """Hosts that each host, and the hub, hands it on to; with 0, the hub sends it to each."""
    spare_hub: bool = False
    """Whether the hub sends only if no other host can."""
    _hub_given: int = 0
    _given: dict[Member, int] = field(default_factory=dict[Member, int])
    """How many hosts take the version from each one."""

    def add(self, members: Iterable[Member]) -> None:
        """Add hosts that have the version or are receiving it."""
        self._given |= {member: 0 for member in members if member.hands_on}

    def drop(self, member: Member) -> None:
        self._given.pop(member, None)

    def take(self, tried: Collection[Member]) -> Member | None:
        """The next host's source, None for the hub. `tried` already failed to give it the version."""
        if self._hub_given < self.most and not self.spare_hub:
            self._hub_given += 1
            return None
        for host, given in self._given.items():
            untried = host not in tried and len(tried) < PEERS_TRIED
            if untried and given < self.most:
                self._given[host] = given + 1
                return host
        self._hub_given += 1
        return None


@dataclass(eq=False)
class Fanout:
    """Distributes one version to any number of engine servers, once to each."""

    payload: VersionPayload
    epoch: int
    """The hub's: engine servers refuse uploads below it."""
    rules: PoolSection
    probe: Probe | None = None
    _: KW_ONLY
    holders: Sequence[Member] = ()
    """Engine servers that sample the version already. They are asked before the hub sends it."""
    differing: Differing | None = None
    """Set if the difference may be sent."""

    def __post_init__(self) -> None:
        self._probe = None if self.probe is None else self.probe.message()
        self._host_id = host_id()
        self._branches = Branches(self.rules.branches, spare_hub=bool(self.holders))
        self._branches.add(self.holders)
        self._leaders: dict[str, Leading] = {}
        self._numbers: dict[tuple[Member, str], int] = {}
        """Version number under which each engine process receives it."""
        self._accepted: dict[Member, asyncio.Future[bool]] = {}
        """Whether an engine server accepted the upload; completes with its first answer."""
        self._sending: dict[Member, asyncio.Task[StagedThere]] = {}
        self._processes: dict[Member, str] = {}
        """Process (server id) at each address for which the upload was begun."""
        self.weight_version = self.payload.weight_version
        self.is_adapter = self.payload.adapter is not None

    def begin(self, member: Member) -> asyncio.Task[StagedThere]:
        """Reuses the process's task, unless it failed. The task raises Unanswered and EngineRefused."""
        if self._processes.get(member) != member.server_id:
            # The weights of the previous process at this address are gone.
            self.end(member)
            if member in self._processes:
                self._branches.drop(member)
            self._processes[member] = member.server_id
        task = self._sending.get(member)
        failed = task is not None and task.done() and (task.cancelled() or task.exception())
        if task is None or failed:
            name = f"version {self.weight_version} to {member.address}"
            task = self._sending[member] = asyncio.create_task(self._stage(member), name=name)
        return task

    def settle(self, member: Member, *, accepted: bool) -> None:
        """Record whether the engine took the version. Only the first call counts."""
        number = self._numbers.get((member, member.server_id))
        if number is not None and number in member.reserved:
            member.settle(number, accepted=accepted)

    def end(self, member: Member) -> None:
        """Cancel the upload to an engine; a later `begin` starts over. Idempotent."""
        task = self._sending.pop(member, None)
        if task is None:
            return
        failed = task.done() and not task.cancelled() and task.exception() is not None
        task.cancel()
        task.add_done_callback(_leave)
        # A cancelled upload may have been staged there just before.
        self.settle(member, accepted=not failed)
        self._numbers.pop((member, member.server_id), None)
        self._accepted.pop(member, None)

    async def close(self) -> None:
        """Cancel all uploads; versions already staged on engines stay there."""
        for task in self._sending.values():
            task.cancel()
        found = await asyncio.gather(*self._sending.values(), return_exceptions=True)
        for member, there in zip(self._sending, found, strict=True):
            # If it was staged, its number is used up, even without a switch.
            self.settle(member, accepted=not isinstance(there, EngineRefused | Unanswered))
            if isinstance(there, StagedThere):
                there.cancel()
        self._sending.clear()
        if self.differing is not None:
            await self.differing.close()
        self.payload.close()

    async def _stage(self, member: Member) -> StagedThere:
        if member.host_id == self._host_id:
            memory = weights_pb2.SharedMemorySource(
                name=self.payload.path, host_namespace=self.payload.host_namespace
            )
            return await self._offer(member, Shared(memory, self.payload.tensors))
        if self.payload.adapter is not None:
            return (await self._send(member, None))[0]
        while (leading := self._leaders.get(member.host_id)) is not None:
            await asyncio.wait([leading], timeout=self.rules.stage_seconds / 2)
            if leading.done() and not leading.cancelled():
                if (shared := leading.result()) is not None:
                    return await self._offer(member, shared)
                return (await self._lead(member))[0]
            # The leader failed or is slow. The first engine to notice leads; the others wait for it.
            self._follow_no_more(member.host_id, leading)
        leading = self._leaders[member.host_id] = asyncio.get_running_loop().create_future()
        try:
            there, shared = await self._lead(member)
            leading.set_result(shared)
            return there
        finally:
            if not leading.done():
                self._follow_no_more(member.host_id, leading)
                leading.cancel()

    def _follow_no_more(self, host: str, leading: Leading) -> None:
        if self._leaders.get(host) is leading:
            del self._leaders[host]

    async def _offer(self, member: Member, shared: Shared) -> StagedThere:
        try:
            return (await self._send(member, shared))[0]
        except EngineRefused as error:
            if error.failure.reason not in UNREADABLE:
                raise
            return (await self._send(member, None))[0]

    async def _lead(self, member: Member) -> tuple[StagedThere, Shared | None]:
        """Send the difference to a host's leader, or the whole from another host or the hub."""
        if (difference := await self._difference_for(member)) is not None:
            try:
                sent = await self._send(member, difference)
            except EngineRefused as error:
                if error.failure.reason not in NOT_THE_DIFFERENCE:
                    raise
                logger.warning("sending engine %s the whole version: %s", member.address, error)
            else:
                # Only now, because it can hand the version on once it has assembled all of it.
                self._branches.add([member])
                return sent
        tried: set[Member] = set()
        while member.hands_on and (peer := self._branches.take(tried)) is not None:
            tried.add(peer)
            try:
                return await self._grow(member, peer)
            except EngineRefused as error:
                if error.failure.reason not in UNREADABLE:
                    raise
                logger.warning("engine %s, trying another source: %s", member.address, error)
        return await self._grow(member, None)

    async def _difference_for(self, member: Member) -> Sendable | None:
        differing = self.differing
        if differing is None or member.delta_base != differing.base_version:
            return None
        return await differing.get(self.payload.tensors, self.payload.view)

    async def _grow(self, member: Member, peer: Member | None) -> tuple[StagedThere, Shared | None]:
        """From `peer`, or from the hub if the peer lacks it. On failure the host leaves the tree."""
        accepted = self._accepted[member] = asyncio.get_running_loop().create_future()
        self._branches.add([member])
        try:
            source = None if peer is None else await self._source_at(peer)
            return await self._send(member, source)
        except BaseException:
            self._branches.drop(member)
            raise
        finally:
            if not accepted.done():
                accepted.set_result(False)

    async def _source_at(self, peer: Member) -> weights_pb2.PeerSource | None:
        """Wait until the other host has begun to receive the version; None if it does not begin soon."""
        if (accepted := self._accepted.get(peer)) is not None:
            await asyncio.wait([accepted], timeout=self.rules.stage_seconds / 10)
            if not (accepted.done() and accepted.result()):
                return None
        if (number := peer.wire_version(self.weight_version)) is None:
            return None
        return weights_pb2.PeerSource(address=peer.address, weight_version=number)

    async def _send(self, member: Member, source: Source) -> tuple[StagedThere, Shared | None]:
        """Also returns the version's shared memory there, for other engines on that host."""
        while True:
            try:
                return await self._send_now(member, source)
            except EngineRefused as error:
                if error.failure.reason != Reason.UPLOAD_IN_PROGRESS:
                    raise
                # The engine still verifies an upload that was cancelled. The caller limits the time.
                await asyncio.sleep(error.failure.retry_after_seconds or BUSY_SECONDS)

    async def _send_now(self, member: Member, source: Source) -> tuple[StagedThere, Shared | None]:
        process = member, member.server_id
        version = self._numbers.get(process)
        if version is None:
            version = self._numbers[process] = member.reserve(self.weight_version)
        header = weights_pb2.WeightHeader(
            weight_version=version,
            tensors=source.tensors
            if isinstance(source, Shared | Sendable)
            else self.payload.tensors,
            activation=weights_pb2.ACTIVATION_STAGED,
            trainer_epoch=self.epoch,
            probe=self._probe,
            adapter=self.payload.adapter,
        )
        pieces: tuple[memoryview, ...] = ()
        if source is None:
            header.inline.length_bytes = self.payload.length_bytes
            pieces = (self.payload.view,)
        elif isinstance(source, Sendable):
            header.inline.length_bytes = len(source.payload)
            header.base_weight_version = member.wire_version(source.base_version) or 0
            pieces = (source.payload,)
        elif isinstance(source, weights_pb2.PeerSource):
            header.peer.CopyFrom(source)
        else:
            header.shared_memory.CopyFrom(source.memory)
        there = member.server.stage(header, pieces)
        try:
            ready = await there.ready()
            if (accepted := self._accepted.get(member)) is not None and not accepted.done():
                accepted.set_result(ready)
            answer = await there.staged()
        except BaseException:
            there.cancel()
            raise
        if answer.state != weights_pb2.WEIGHT_STATE_STAGED:
            there.cancel()
            raise Unanswered(f"it answered an upload with the unexpected state {answer.state}")
        if not answer.HasField("memory"):
            return there, None
        memory = weights_pb2.SharedMemorySource(
            name=answer.memory.name, host_namespace=answer.memory.host_namespace
        )
        together = isinstance(source, Sendable)
        return there, Shared(memory, self.payload.dense if together else self.payload.tensors)


def _leave(task: asyncio.Task[StagedThere]) -> None:
    """Cancel a staged version that no caller waits for any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()
