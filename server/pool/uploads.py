"""One weight version on its way from the hub to its engine servers.

Once per host: the engine server that comes first there, its *leader*, gets the bytes, from the hub or
from another host's leader (`pool_branches`); the others take them from its memory. On the hub's own host
all take them from the hub's. Who cannot read what it is offered is sent the bytes, so that a wrong guess
about hosts costs time and nothing else. Where a leader fails, or takes longer than half of the time that
each has (`stage_seconds`), the next engine of its host leads.

Who holds the version before, and says so, is sent what changed, where that is less than the tree would
carry (`pool_differences`); each of those hosts then has all of it, and hands it on to hosts that do not.

An adapter, of a few megabytes, each takes from the hub: engine servers hand none on.

Every engine server verifies every byte by itself, against the hub's checksums.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from penstock.common.memory_file import host_id, host_namespace
from penstock.server.engine.protocol import StagedWeights
from penstock.server.pool.branches import Branches
from penstock.server.pool.differences import Differing, Sendable
from penstock.server.pool.member import Member
from penstock.server.pool.remote import Refused, StagedThere, Unanswered
from penstock.server.pool.rules import PoolRules
from penstock.server.weights.adapter_manifest import AdapterShape
from penstock.server.weights.probe import Probe
from penstock.server.weights.staging.assembly import lay_out
from penstock.v1 import weights_pb2
from penstock.wire.differences import NOT_THE_DIFFERENCE
from penstock.wire.reasons import Reason

logger = logging.getLogger(__name__)

POLICIES: Mapping[str, weights_pb2.InFlightPolicy.ValueType] = {
    "keep": weights_pb2.IN_FLIGHT_POLICY_KEEP,
    "recompute": weights_pb2.IN_FLIGHT_POLICY_RECOMPUTE,
    "drain": weights_pb2.IN_FLIGHT_POLICY_DRAIN,
    "abort": weights_pb2.IN_FLIGHT_POLICY_ABORT,
}


def not_taken(version: int, error: Refused) -> str:
    """Why an engine server has not a version, in words."""
    fenced = error.failure.reason == Reason.STALE_EPOCH
    why = "takes weights from a hub that began later: it " if fenced else ""
    return f"{why}did not take version {version}: {error}"


class Payload:
    """The bytes of a staged version, mapped, and what a header says of them."""

    def __init__(self, weights: StagedWeights, adapter: AdapterShape | None = None) -> None:
        """`adapter` is what they are, where they are not the model's own. Blocks: it reads every byte once.
        Raises OSError."""
        self.weight_version = weights.weight_version
        self.adapter = None if adapter is None else adapter.message()
        self._descriptor = os.open(weights.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.host_namespace = host_namespace(self._descriptor)
            self.length_bytes = max(
                (t.offset_bytes + t.length_bytes for t in weights.tensors), default=0
            )
            mapped = (
                mmap.mmap(self._descriptor, self.length_bytes, prot=mmap.PROT_READ)
                if self.length_bytes
                else b""
            )
        except BaseException:
            os.close(self._descriptor)
            raise
        self.view = memoryview(mapped)
        # Of this process, so that it is there for as long as this is.
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.tensors = [
            weights_pb2.TensorSpec(
                name=tensor.name,
                shape=tensor.shape,
                dtype=tensor.dtype,
                offset_bytes=tensor.offset_bytes,
                length_bytes=tensor.length_bytes,
                xxh3=xxhash.xxh3_64_intdigest(
                    self.view[tensor.offset_bytes : tensor.offset_bytes + tensor.length_bytes]
                ),
            )
            for tensor in weights.tensors
        ]

    @property
    def dense(self) -> Tensors:
        """Where an engine server has each that put the version together from what changed."""
        tensors = self.tensors
        places, _ = lay_out((t.name, tuple(t.shape), t.dtype, t.length_bytes) for t in tensors)
        dense: list[weights_pb2.TensorSpec] = []
        for tensor, place in zip(tensors, places, strict=True):
            dense.append(weights_pb2.TensorSpec())
            dense[-1].CopyFrom(tensor)
            dense[-1].offset_bytes = place.offset_bytes
        return dense

    def close(self) -> None:
        """Nobody reads it any more, but for who has it open."""
        os.close(self._descriptor)


Tensors = Sequence[weights_pb2.TensorSpec]


@dataclass(frozen=True, slots=True)
class Shared:
    """A version in memory of a host."""

    memory: weights_pb2.SharedMemorySource
    tensors: Tensors
    """Where each lies there."""


Source = Shared | weights_pb2.PeerSource | Sendable | None
"""Where an engine server takes a version from; the last two are the stream, with what changed or all."""

Leading = asyncio.Future[Shared | None]
"""Where a host's leader has all of a version, once it has; None where it has it in no memory that others
could read. Cancelled where it failed."""

BUSY_SECONDS = 1.0
"""Until one that is still at another upload is asked again, where it does not say."""
UNREADABLE = (Reason.SOURCE_UNAVAILABLE, Reason.FIELD_INVALID, Reason.CHECKSUM_MISMATCH)
"""Refusals after which the hub sends the bytes by itself."""


class Fanout:
    """One version for any number of engine servers, each asked once."""

    def __init__(
        self,
        payload: Payload,
        epoch: int,
        rules: PoolRules,
        probe: Probe | None = None,
        *,
        holders: Iterable[Member] = (),
        differing: Differing | None = None,
    ) -> None:
        """`epoch` is the hub's: engine servers refuse uploads of an older hub from then on. `holders`
        sample the version already, and are asked for it before the hub sends it. `differing` is what
        changed from the version before, where that could be sent."""
        self._payload = payload
        self._epoch = epoch
        self._differing = differing
        self._probe = None if probe is None else probe.message()
        self._host_id = host_id()
        self._leader_seconds = rules.stage_seconds / 2
        self._ready_seconds = rules.stage_seconds / 10
        holders = list(holders)
        self._branches = Branches(rules.branches, spare_hub=bool(holders))
        self._branches.add(holders)
        self._leaders: dict[str, Leading] = {}
        self._numbers: dict[tuple[Member, str], int] = {}
        """Under which each process is given it."""
        self._accepted: dict[Member, asyncio.Future[bool]] = {}
        """Whether an engine server takes it, once it has answered."""
        self._sending: dict[Member, asyncio.Task[StagedThere]] = {}
        self._processes: dict[Member, str] = {}
        """The one that it was begun for."""
        self.weight_version = payload.weight_version
        self.is_adapter = payload.adapter is not None

    def begin(self, member: Member) -> asyncio.Task[StagedThere]:
        """Stages it there, unless that was begun before for the same process and has not failed. The task
        raises Unanswered and Refused."""
        if self._processes.get(member) != member.server_id:
            self._begin_anew(member)
        task = self._sending.get(member)
        failed = task is not None and task.done() and (task.cancelled() or task.exception())
        if task is None or failed:
            name = f"version {self.weight_version} to {member.address}"
            task = self._sending[member] = asyncio.create_task(self._stage(member), name=name)
        return task

    def _begin_anew(self, member: Member) -> None:
        """Another process is there: what the one before was given is gone with it."""
        self.end(member)
        if member in self._processes:
            self._branches.drop(member)
        self._processes[member] = member.server_id

    def settle(self, member: Member, *, accepted: bool) -> None:
        """What came of it there; safe to repeat, the first time counts."""
        number = self._numbers.get((member, member.server_id))
        if number is not None and number in member.reserved:
            member.settle(number, accepted=accepted)

    def end(self, member: Member) -> None:
        """Ends what is under way there; `begin` begins from the beginning. Safe to repeat."""
        task = self._sending.pop(member, None)
        if task is None:
            return
        failed = task.done() and not task.cancelled() and task.exception() is not None
        task.cancel()
        task.add_done_callback(_leave)
        # Where it is cancelled, it may have been staged there just now.
        self.settle(member, accepted=not failed)
        self._numbers.pop((member, member.server_id), None)
        self._accepted.pop(member, None)

    async def close(self) -> None:
        """Ends what is under way; what is staged somewhere is left there."""
        for task in self._sending.values():
            task.cancel()
        found = await asyncio.gather(*self._sending.values(), return_exceptions=True)
        for member, there in zip(self._sending, found, strict=True):
            # Where it is staged and was not switched to, its number is taken.
            self.settle(member, accepted=not isinstance(there, Refused | Unanswered))
            if isinstance(there, StagedThere):
                there.cancel()
        self._sending.clear()
        if self._differing is not None:
            await self._differing.close()
        self._payload.close()

    async def _stage(self, member: Member) -> StagedThere:
        if member.host_id == self._host_id:
            memory = weights_pb2.SharedMemorySource(
                name=self._payload.path, host_namespace=self._payload.host_namespace
            )
            return await self._offer(member, Shared(memory, self._payload.tensors))
        if self._payload.adapter is not None:
            return (await self._send(member, None))[0]
        while (leading := self._leaders.get(member.host_id)) is not None:
            await asyncio.wait([leading], timeout=self._leader_seconds)
            if leading.done() and not leading.cancelled():
                if (shared := leading.result()) is not None:
                    return await self._offer(member, shared)
                return (await self._lead(member))[0]
            # It failed, or takes long. Who is the first to see that leads; the others wait for that one.
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
        """The next engine of a host leads, unless another one does already."""
        if self._leaders.get(host) is leading:
            del self._leaders[host]

    async def _offer(self, member: Member, shared: Shared) -> StagedThere:
        try:
            return (await self._send(member, shared))[0]
        except Refused as error:
            if error.failure.reason not in UNREADABLE:
                raise
            return (await self._send(member, None))[0]

    async def _lead(self, member: Member) -> tuple[StagedThere, Shared | None]:
        """The first of its host: what changed, or all of it, from another host or from here."""
        if (difference := await self._difference_for(member)) is not None:
            try:
                sent = await self._send(member, difference)
            except Refused as error:
                if error.failure.reason not in NOT_THE_DIFFERENCE:
                    raise
                logger.warning("engine %s is sent all of a version: %s", member.address, error)
            else:
                # Not before: it hands on what it has put together.
                self._branches.add([member])
                return sent
        tried: set[Member] = set()
        while member.hands_on and (peer := self._branches.take(tried)) is not None:
            tried.add(peer)
            try:
                return await self._grow(member, peer)
            except Refused as error:
                if error.failure.reason not in UNREADABLE:
                    raise
                logger.warning("engine %s: %s", member.address, error)
        return await self._grow(member, None)

    async def _difference_for(self, member: Member) -> Sendable | None:
        differing = self._differing
        if differing is None or member.delta_base != differing.base_version:
            return None
        return await differing.get(self._payload.tensors, self._payload.view)

    async def _grow(self, member: Member, peer: Member | None) -> tuple[StagedThere, Shared | None]:
        """A host more in the tree, where it stays unless this fails; from the hub where the peer has not
        the version."""
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
        """The version at another host, once that has begun to receive it; None where it does not, soon."""
        if (accepted := self._accepted.get(peer)) is not None:
            await asyncio.wait([accepted], timeout=self._ready_seconds)
            if not (accepted.done() and accepted.result()):
                return None
        if (number := peer.wire_version(self.weight_version)) is None:
            return None
        return weights_pb2.PeerSource(address=peer.address, weight_version=number)

    async def _send(self, member: Member, source: Source) -> tuple[StagedThere, Shared | None]:
        """Returns where it lies there, too, for others of that host."""
        while True:
            try:
                return await self._send_now(member, source)
            except Refused as error:
                if error.failure.reason != Reason.UPLOAD_IN_PROGRESS:
                    raise
                # One that was broken off is verified to its end there. Whoever waits for this has a limit.
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
            else self._payload.tensors,
            activation=weights_pb2.ACTIVATION_STAGED,
            trainer_epoch=self._epoch,
            probe=self._probe,
            adapter=self._payload.adapter,
        )
        pieces: tuple[memoryview, ...] = ()
        if source is None:
            header.inline.length_bytes = self._payload.length_bytes
            pieces = (self._payload.view,)
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
            raise Unanswered(f"it answered an upload with state {answer.state}")
        if not answer.HasField("memory"):
            return there, None
        memory = weights_pb2.SharedMemorySource(
            name=answer.memory.name, host_namespace=answer.memory.host_namespace
        )
        together = isinstance(source, Sendable)
        return there, Shared(memory, self._payload.dense if together else self._payload.tensors)


def _leave(task: asyncio.Task[StagedThere]) -> None:
    """Nobody waits for it any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().cancel()
