"""Weights by a collective: joining it, and the rounds of an upload while the engine is paused.

The bytes go directly from the trainer to the engine's workers. Only their description passes through here:

    join                                       -> READY, and the engine joins       -> the stream ends
    header -> gate closed, engine paused -> READY -> round -> READY -> ... -> commit -> finished, resumed

An upload is therefore a load that lasts as long as its trainer takes, and every step has a deadline. If it
ends before its commit, the engine leaves the collective, which must be joined again. A backend that keeps
what it receives until the commit (gloo) has changed no weights then; one that writes into the model (nccl)
may have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

from penstock.server.core.errors import DomainError, FieldInvalid
from penstock.server.engine.protocol import (
    CollectiveUpdate,
    EngineDescription,
    EngineLoadFailed,
    EngineLost,
)
from penstock.server.weights.engine_switch import EngineSwitch
from penstock.server.weights.header import Announced
from penstock.server.weights.staging.manifest import (
    ManifestTensor,
    WeightRefused,
    check_unplaced,
    checksum_mismatch,
    dtype_mismatch,
    shape_mismatch,
)
from penstock.server.weights.switch import InFlight, Switched, VersionBefore
from penstock.v1 import weights_pb2
from penstock.wire.reasons import Reason
from penstock.wire.upload_messages import Chunk, Header, UploadMessage

PATCHES_IN_PLACE = frozenset({"sparse_nccl"})
"""Backends that change single elements. All others replace whole layers, and fill tensors that were
left out with arbitrary memory."""


@dataclass(frozen=True, slots=True)
class Join:
    backend: str
    rendezvous: Mapping[str, object]
    """Fields that the backend defines."""
    trainer_epoch: int


class Collective:
    def __init__(self, switch: EngineSwitch | None, seconds: float) -> None:
        """`switch` is None on a hub. `seconds` is the limit of joining and of each step of an upload."""
        self._switch = switch
        self.seconds = seconds
        self.backend: str | None = None

    @property
    def switch(self) -> EngineSwitch:
        """Raises WeightRefused on a hub."""
        if self._switch is None:
            problem = "a hub has no local engine to join a collective; upload through the stream"
            raise WeightRefused(Reason.SOURCE_UNAVAILABLE, problem)
        return self._switch

    async def join(self, join: Join) -> None:
        """Replaces the previous collective. Raises WeightRefused and EngineLost."""
        self.backend = None
        await self.switch.engine.join_collective(join.backend, join.rendezvous, self.seconds)
        self.backend = join.backend

    def check_joined(self, backend: str) -> None:
        """Raise WeightRefused unless the engine has joined this backend."""
        if backend != self.backend:
            but = f" but {self.backend!r}" if self.backend else ""
            problem = f"the engine has not joined {backend!r}{but}: join first"
            joined = self.backend or ""
            raise WeightRefused(Reason.SOURCE_UNAVAILABLE, problem, backend=backend, joined=joined)


def kind_of(message: UploadMessage) -> str:
    if isinstance(message, Header):
        return "header"
    return "chunk" if isinstance(message, Chunk) else message.WhichOneof("message") or "unset"


def read_join(join: weights_pb2.CollectiveJoin) -> Join:
    """Raises FIELD_INVALID."""
    if not join.backend:
        raise FieldInvalid("join.backend", "must be set")
    rendezvous = _read_json("join.rendezvous_json", join.rendezvous_json)
    if not isinstance(rendezvous, dict):
        raise FieldInvalid("join.rendezvous_json", "must be a JSON object", join.rendezvous_json)
    return Join(join.backend, cast("dict[str, object]", rendezvous), join.trainer_epoch)


def check_announced(
    announced: Announced,
    collective: Collective,
    description: EngineDescription,
    active_version: int | None,
) -> None:
    """`active_version` is None if the weights cannot be trusted. Raises DomainError and WeightRefused."""
    backend, base = announced.header.collective.backend, announced.base_version
    if announced.adapter is not None:
        raise FieldInvalid("header.adapter", "cannot be sent by a collective")
    if base and backend not in PATCHES_IN_PLACE:
        raise FieldInvalid(
            "header.base_weight_version",
            f"must be zero with {backend!r}, which replaces whole layers",
            base,
        )
    if base and base != active_version:
        problem = f"a delta of version {base} does not apply: {active_version or 'none'} is active"
        active = active_version or 0
        raise WeightRefused(Reason.BASE_VERSION_MISMATCH, problem, base=base, active=active)
    collective.check_joined(backend)
    check_unplaced(
        announced.manifest,
        description.tensors,
        description.weight_dtype,
        "by a collective",
        whole=not base,
    )


class Rounds:
    """The rounds of one upload, run as a load of a switch. The call that brings them is another task."""

    def __init__(
        self,
        collective: Collective,
        announced: Announced,
        requests: AsyncIterator[UploadMessage],
        ready: Callable[[], Awaitable[None]],
        on_commit: Callable[[], None],
    ) -> None:
        """`ready` tells the trainer to send the next message."""
        self._collective = collective
        self._switch = collective.switch
        self._engine = self._switch.engine
        self._seconds = collective.seconds
        self._announced = announced
        self._waiting = {tensor.name: tensor for tensor in announced.manifest}
        self._named = True
        self._requests = requests
        self._ready = ready
        self._on_commit = on_commit
        self._lost = asyncio.Event()
        self._open = False
        """Whether an update is under way that the engine has not ended itself."""

    def break_off(self) -> None:
        """End the rounds because their call is gone. Without effect after the commit."""
        self._lost.set()

    async def switch(self, policy: InFlight, before: VersionBefore) -> Switched:
        announced = self._announced
        return await self._switch.change(
            announced.weight_version, self._load, policy, before, announced.probe
        )

    async def _load(self) -> None:
        """Load the new weights into the paused engine; see `engine_switch.Load`."""
        await self._engine.begin_collective()
        self._open = True
        try:
            await self._tell_ready()
            while (update := await self._next_update()) is not None:
                self._open = False
                await self._engine.receive_collective(update, self._seconds)
                self._open = True
                await self._tell_ready()
            self._check_complete()
            self._on_commit()
            self._open = False
            await self._engine.finish_collective(self._announced.weight_version, self._seconds)
        except Exception as error:
            self._collective.backend = None
            if (
                self._open
                and not isinstance(error, EngineLost)
                and not await self._engine.abandon_collective(self._seconds)
            ):
                raise EngineLoadFailed(str(error)) from error
            raise

    async def _next_update(self) -> CollectiveUpdate | None:
        """None at the commit. Raises DomainError and WeightRefused."""
        request = await self._read()
        kind = kind_of(request)
        if isinstance(request, Header | Chunk) or kind not in ("round", "commit"):
            raise FieldInvalid("message", "must be a round or the commit here", kind)
        if kind == "round":
            update = read_update(request.round)
            self._check_update(update)
            return update
        self._announced.read_commit(request.commit)
        return None

    async def _read(self) -> UploadMessage:
        """Raises WeightRefused if the message does not arrive."""
        reading = asyncio.ensure_future(anext(self._requests, None))
        lost = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait(
                {reading, lost}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if reading.done() and not reading.cancelled():
                if isinstance(reading.exception(), DomainError):
                    reading.result()
                if reading.exception() is None and (request := reading.result()) is not None:
                    return request
            if lost.done() or reading.done():
                raise _trainer_gone("the trainer is gone or ended its stream before the commit")
            raise _trainer_gone(f"the trainer sent nothing for {self._seconds:g} s")
        finally:
            reading.cancel()
            lost.cancel()

    async def _tell_ready(self) -> None:
        task = asyncio.current_task()
        try:
            async with asyncio.timeout(self._seconds):
                await self._ready()
        except asyncio.CancelledError:
            # gRPC raises this on a call that has ended, although this task was not cancelled.
            if task is None or task.cancelling():
                raise
            raise _trainer_gone("the trainer is gone") from None
        except Exception as error:
            raise _trainer_gone("the trainer is gone") from error

    def _check_update(self, update: CollectiveUpdate) -> None:
        """Check a round against the header, as far as the round describes its tensors."""
        announced = {tensor.name: tensor for tensor in self._announced.manifest}
        for part in [update] if isinstance(update, Mapping) else update:
            if "names" not in part:
                self._named = False
                continue
            for found in _described(part):
                _check_described(found, announced)
                self._waiting.pop(found.name, None)

    def _check_complete(self) -> None:
        if self._named and self._waiting:
            count, first = len(self._waiting), next(iter(self._waiting))
            problem = f"{count} announced tensors were never sent, first {first}"
            raise WeightRefused(Reason.TENSOR_MISSING, problem, tensor=first, count=count)


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as a round describes it. None means that the round leaves the field out."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    xxh3: int | None


def read_update(message: weights_pb2.CollectiveRound) -> CollectiveUpdate:
    """Raises FIELD_INVALID."""
    field = "round.update_json"
    update = _read_json(field, message.update_json)
    if isinstance(update, dict):
        return cast("dict[str, object]", update)
    if isinstance(update, list):
        parts = cast("list[object]", update)
        if parts and all(isinstance(part, dict) for part in parts):
            return cast("list[dict[str, object]]", parts)
    raise FieldInvalid(field, "must be a JSON object, or one for each worker", message.update_json)


def _described(update: Mapping[str, object]) -> list[_Described]:
    """Read the field names that all of vLLM's backends use. Raises FIELD_INVALID."""
    columns: dict[str, list[object]] = {}
    for name in ("names", "dtype_names", "shapes", "xxh3"):
        column = update.get(name) or list[object]()
        if not isinstance(column, list):
            raise FieldInvalid("round.update_json", f"has no list of {name}", column)
        columns[name] = cast("list[object]", column)
    count = len(columns["names"])
    for name, column in columns.items():
        if column and len(column) != count:
            raise FieldInvalid("round.update_json", f"has {count} names", f"{len(column)} {name}")
    return [
        _Described(
            str(name),
            str(columns["dtype_names"][place]) if columns["dtype_names"] else None,
            _shape(columns["shapes"][place]) if columns["shapes"] else None,
            _integer(columns["xxh3"][place]) if columns["xxh3"] else None,
        )
        for place, name in enumerate(columns["names"])
    ]


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FieldInvalid("round.update_json", "has a shape that is not a list", value)
    return tuple(_integer(size) for size in cast("list[object]", value))


def _integer(value: object) -> int:
    if not isinstance(value, int):
        problem = "has a size or checksum that is not an integer"
        raise FieldInvalid("round.update_json", problem, value)
    return value


def _check_described(found: _Described, announced: Mapping[str, ManifestTensor]) -> None:
    wanted = announced.get(found.name)
    if wanted is None:
        problem = f"a round brings {found.name!r}, which the header does not announce"
        raise WeightRefused(Reason.TENSOR_UNKNOWN, problem, tensor=found.name)
    if found.shape is not None and found.shape != wanted.shape:
        raise shape_mismatch(found.name, wanted.shape, found.shape)
    if found.dtype is not None and found.dtype != wanted.dtype:
        raise dtype_mismatch(found.name, wanted.dtype, found.dtype)
    if found.xxh3 is not None and wanted.xxh3 and found.xxh3 != wanted.xxh3:
        raise checksum_mismatch(found.name, wanted.xxh3, found.xxh3)


def _read_json(field: str, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise FieldInvalid(field, f"is not JSON: {error}") from error
    except RecursionError as error:
        raise FieldInvalid(field, "is nested too deeply") from error


def _trainer_gone(problem: str) -> WeightRefused:
    return WeightRefused(Reason.SOURCE_UNAVAILABLE, problem, problem=problem)
