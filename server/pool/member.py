"""One engine of a pool: whether it is in rotation, which weights it has, how much it is given.

States, and what moves it (docs/pool.md has the picture):

    JOINING    answers, and has not the pool's weights            -> SERVING, once it was given them
    SERVING    in rotation                                        -> SWITCHING, JOINING, DRAINING, LOST
    SWITCHING  is being given the next version                    -> SERVING, JOINING where it refused
    DRAINING   was told to stop; another process may follow it    -> LOST
    REFUSED    is not the model of this pool, or knows too little -> JOINING, as another process
               is in the pool by another address                 -> JOINING, once it is not
    LOST       nobody answers, or it answers and samples nothing  -> JOINING

State only, and the arithmetic of it: what asks the engine server, and when, is in `pool_roster`.

Version numbers: `wire_versions` maps what the engine server calls a version to what the pool calls it. An
engine server that was never given weights by anybody samples the model as it was loaded, which is version 0
on both sides.

Weights: what it samples is full weights, or an adapter on full weights that stay there below it. An engine
server takes adapter after adapter, and no full weights any more once it has one: so those below have to be
the pool's before it is given the pool's adapter, and `full_version` says whether they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from penstock.server.engine.protocol import AdapterLimits, EngineDescription, TensorMeta
from penstock.server.engine.turn_limit import LimitRules, LoadReport, TurnLimit
from penstock.server.pool.pace import Pace
from penstock.server.pool.remote import EngineServer
from penstock.server.pool.routing import EngineLoad, retry_seconds
from penstock.server.pool.silence import Silence
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire.codec import twin

ReplicaInfo = twin(rollout_service_pb2.ReplicaInfo)
ServerLoad = twin(rollout_service_pb2.ServerLoad)
KNOWN_VERSIONS = 64
MOST_MISSES = 2
"""Looks in a row that run out of time before the turns go on elsewhere. One may be a hub that stood still
itself, and has the answer, or tokens, still to read."""
LONGEST_OFFER_SECONDS = 60.0
"""Between two offers of a version that it did not take: each may be all of its bytes."""
UNKNOWN_VERSION = "which version it samples is not known"


class State(Enum):
    """Of an engine of the pool."""

    JOINING = rollout_service_pb2.REPLICA_STATE_JOINING
    SERVING = rollout_service_pb2.REPLICA_STATE_SERVING
    SWITCHING = rollout_service_pb2.REPLICA_STATE_PAUSED
    DRAINING = rollout_service_pb2.REPLICA_STATE_DRAINING
    REFUSED = 100
    LOST = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE

    @property
    def message(self) -> rollout_service_pb2.ReplicaState.ValueType:
        """As GetServerInfo names it."""
        value = self.LOST.value if self is State.REFUSED else self.value
        return rollout_service_pb2.ReplicaState.ValueType(value)


@dataclass(frozen=True, slots=True)
class Declined:
    """A version that an engine server did not take."""

    version: int
    times: int
    until: float
    """When it is offered again, on the clock."""


@dataclass(slots=True, eq=False)
class Member:
    """One address of the pool."""

    server: EngineServer
    rules: LimitRules
    clock: Callable[[], float]
    state: State = State.LOST
    problem: str = "has not answered yet"
    """Why it is not in rotation, or what it refused turns with."""
    setback: str = ""
    """Why it left the rotation, or was not brought up to date, the last time."""
    hung: bool = False
    """Whether it took too long over the last version that it was given."""
    refusal: str = ""
    """Why its process cannot be one of the pool; empty where it can."""
    server_id: str = ""
    """Its process; empty before the first answer."""
    host_id: str = ""
    hands_on: bool = False
    """Whether it takes versions from other engine servers, and gives them."""
    version: int | None = None
    """The pool's number of what it samples; None where that is not known."""
    full_version: int | None = None
    """That of its full weights: the same, unless what it samples is an adapter."""
    delta_base: int | None = None
    """The pool's number of the version that a difference can be put on there, as it said last; None for
    none."""
    wire_adapters: tuple[int, ...] = ()
    """Adapters that it said it still samples with."""
    changes: int = 0
    """How often its weights were changed from here: what it said of them before counts no more."""
    newest_wire_version: int = 0
    """Newest version that its process has accepted."""
    reserved: set[int] = field(default_factory=set[int])
    """Versions on their way there."""
    wire_versions: dict[int, int] = field(default_factory=dict[int, int])
    turns: set[str] = field(default_factory=set[str])
    """Requests that it has."""
    between: int = 0
    """Trajectories between two turns, which `Placing` counts."""
    given: int = 0
    failures: int = 0
    """In a row."""
    refusals: int = 0
    """Turns in a row that it refused, and another engine may take, or times in a row that it lost some."""
    declined: Declined | None = None
    """The version that it was to be given, and did not take the last time."""
    closed_until: float = 0.0
    """No turns go there before this time, on the clock, for it was full or failed."""
    limit: TurnLimit = field(init=False)
    load: rollout_service_pb2.ServerLoad = field(default_factory=ServerLoad)
    pace: Pace = field(default_factory=Pace)
    silence: Silence = field(default_factory=Silence)
    silent: bool = False
    """Whether it had turns, and sampled nothing for so long that it lost them. It is LOST until it has
    sampled a token again."""
    misses: int = 0
    """Looks in a row that ran out of time, while it sampled nothing either."""
    missed_switching: bool = False
    """Whether the first of them did while it switched."""
    usual_pace: float = 0.0
    """Seconds per token in its pool; 0 where that is not known."""

    def __post_init__(self) -> None:
        self.limit = TurnLimit.begin(self.rules)

    @property
    def address(self) -> str:
        """Where it is, which is its name."""
        return self.server.address

    @property
    def answers(self) -> bool:
        """Whether a process of the pool's model is there."""
        return self.state not in (State.LOST, State.REFUSED)

    def takes_turns(self, version: int = 0) -> bool:
        """Whether it is in rotation and not left alone just now; with a version, that it samples it."""
        if self.state is not State.SERVING or self.clock() < self.closed_until:
            return False
        return not version or self.version == version

    @property
    def stays(self) -> bool:
        """Whether it takes turns, or will once it has switched."""
        return self.state in (State.SERVING, State.SWITCHING)

    def as_load(self) -> EngineLoad:
        """As the routing sees it."""
        turns = len(self.turns)
        slowness = self.pace.slowness(self.usual_pace, turns, self.clock())
        limit = self.limit
        return EngineLoad(
            self.address, turns, limit.value, slowness, self.given, self.between, limit.proven
        )

    # What it says of itself

    def heard(self, info: rollout_service_pb2.GetServerInfoResponse) -> bool:
        """Takes in an answer; returns whether it is of another process than before."""
        other = info.server_id != self.server_id
        self.misses = 0
        if other:
            self.server_id = info.server_id
            self.limit = TurnLimit.begin(self.rules)
            self.wire_versions.clear()
            self.reserved.clear()
            self.pace = Pace()
            self.speak()
            self.setback, self.hung = "", False
            self.refusals, self.closed_until = 0, 0.0
            self.declined = None
            self.state, self.problem = State.JOINING, ""
        elif self.state is State.LOST and not self.silent:
            # It was out of reach; what it samples is what it did, unless it says otherwise.
            self.state, self.problem = State.JOINING, ""
        self.host_id = info.host_id
        self.hands_on = weights_pb2.WEIGHT_SOURCE_KIND_PEER in info.weight_sources
        self.load = info.load
        accepted = [info.active_weight_version, *info.staged_weight_versions]
        self.newest_wire_version = max(accepted)
        self.version = self.pool_version(info.active_weight_version)
        self.full_version = self.pool_version(info.full_weight_version)
        base = info.delta_base_weight_version
        self.delta_base = self.pool_version(base) if base else None
        self.wire_adapters = tuple(info.adapter_weight_versions)
        self.limit = self.limit.after(
            LoadReport(
                len(self.turns),
                info.load.running_turn_count,
                info.load.waiting_turn_count,
                info.load.kv_cache_usage,
                info.load.preemption_count,
            ),
            self.rules,
        )
        return other

    def pool_version(self, wire_version: int) -> int | None:
        """What the pool calls what the engine server calls so; None where that is not known."""
        if wire_version == 0:
            return 0
        return self.wire_versions.get(wire_version)

    def wire_version(self, pool_version: int) -> int | None:
        """Newest number under which it was given a version of the pool's."""
        found = [wire for wire, pool in self.wire_versions.items() if pool == pool_version]
        return max(found, default=None)

    def reserve(self, pool_version: int) -> int:
        """A number under which the engine server takes a version: larger than any it has accepted or is
        being given."""
        number = max(pool_version, self.newest_wire_version + 1, *(n + 1 for n in self.reserved))
        self.reserved.add(number)
        self.wire_versions[number] = pool_version
        # While adapters come and go, turns go on under the full weights for as long as they like.
        full = None if self.full_version is None else self.wire_version(self.full_version)
        for wire in [wire for wire in self.wire_versions if wire != full][:-KNOWN_VERSIONS]:
            del self.wire_versions[wire]
        return number

    def forget(self, pool_version: int) -> None:
        """What it may have of this version is not the pool's: it is as if it had somebody else's."""
        for wire in [wire for wire, pool in self.wire_versions.items() if pool == pool_version]:
            del self.wire_versions[wire]
        if self.version == pool_version:
            self.version = None
        if self.full_version == pool_version:
            self.full_version = None
        if self.delta_base == pool_version:
            self.delta_base = None

    def settle(self, wire_version: int, *, accepted: bool) -> None:
        """What came of a number; one that was not accepted may be used again."""
        self.reserved.discard(wire_version)
        if accepted:
            self.newest_wire_version = max(self.newest_wire_version, wire_version)

    def has(self, pool_version: int, *, adapter: bool) -> None:
        """It samples this version now; an adapter leaves the full weights what they were."""
        self.version = pool_version
        self.declined = None
        if not adapter:
            self.full_version = pool_version
            # Until it says that it holds this one.
            self.delta_base = None
        self.changes += 1
        self.speak()

    @property
    def adapter_versions(self) -> list[int]:
        """The pool's numbers of the adapters that it still samples with, as far as they are the pool's."""
        known = (self.pool_version(wire) for wire in self.wire_adapters)
        return [version for version in known if version is not None] if self.answers else []

    # What becomes of its turns

    def took(self, request_id: str) -> None:
        """It is given a request."""
        self.turns.add(request_id)
        self.given += 1
        self.silence = self.silence.given(self.clock())

    def left(self, request_id: str) -> None:
        """It has a request no more."""
        self.turns.discard(request_id)
        if not self.turns:
            self.silence = self.silence.left(self.clock())

    def sampled(self) -> None:
        """It has sampled tokens of a turn."""
        self.misses = 0
        self.silence = self.silence.broken(self.clock())

    @property
    def silent_seconds(self) -> float:
        """How long it has had turns, and sampled nothing."""
        return self.silence.seconds(self.clock())

    def speak(self) -> None:
        """It samples again, has taken weights, or is another process."""
        self.silent, self.silence = False, self.silence.broken(self.clock())
        self.misses = 0

    def miss(self) -> None:
        """A look at it ran out of time."""
        if not self.misses:
            self.missed_switching = self.state is State.SWITCHING
        self.misses += 1

    @property
    def stands_still(self) -> bool:
        """Whether its process is there and does nothing, as far as looks can tell, so that its turns go on
        elsewhere. One that switched as that began may stand still for its weights: how long, its silence
        says."""
        return self.misses >= MOST_MISSES and not self.missed_switching

    def paced(self, seconds: float, token_count: int) -> None:
        """A turn of so many tokens took so long."""
        if token_count:
            self.pace = self.pace.after(seconds, token_count, self.clock(), self.usual_pace)

    def worked(self) -> None:
        """A turn came to its end there."""
        if self.refusals:
            self.refusals = 0
            if self.state is State.SERVING:
                self.problem = ""

    def refused_at_limit(self) -> bool:
        """It refused one of its turns for having as many as it may; returns whether it has others, and so
        takes the next one as soon as one of them ends."""
        others = len(self.turns) - 1
        if others:
            self.limit = self.limit.bounded(others, self.rules)
        return others > 0

    def refuse(self, problem: str) -> float:
        """It refused a turn that another one may take; returns for how many seconds to leave it alone."""
        self.refusals += 1
        if self.state is State.SERVING:
            self.problem = problem
        return retry_seconds(self.refusals)

    def decline(self, version: int) -> None:
        """It did not take a version that it was to be given."""
        last = self.declined
        times = last.times + 1 if last is not None and last.version == version else 1
        seconds = retry_seconds(times, longest=LONGEST_OFFER_SECONDS)
        self.declined = Declined(version, times, self.clock() + seconds)

    def may_be_offered(self, version: int) -> bool:
        """Whether a version that it did not take is worth another upload by now."""
        last = self.declined
        return last is None or last.version != version or self.clock() >= last.until

    def close_for(self, seconds: float) -> None:
        """It is left alone for so long."""
        self.closed_until = max(self.closed_until, self.clock() + seconds)

    def fail(self, problem: str) -> None:
        """It does not answer, or cannot serve."""
        self.failures += 1
        self.state, self.problem = State.LOST, problem

    def leave_rotation(self, problem: str) -> None:
        """It answers, and has not what it should."""
        if self.state is State.SWITCHING:
            # It stood still for what it did not take.
            self.silence = self.silence.broken(self.clock())
        if self.state in (State.SERVING, State.SWITCHING, State.JOINING):
            self.failures += 1
            self.setback = problem
            self.state, self.problem = State.JOINING, problem

    def serve(self) -> None:
        """It has what it should, and takes turns."""
        self.failures, self.setback = 0, ""
        self.state, self.problem = State.SERVING, ""

    @property
    def retry_seconds(self) -> float:
        """How long it is left alone after what failed so often."""
        return retry_seconds(self.failures)

    def message(self) -> rollout_service_pb2.ReplicaInfo:
        """As GetServerInfo has it.

        A version that is not known is 0 there, as is the base model's. One in rotation has the latter; of
        another one that answers, `problem` says which it is.
        """
        problem = self.problem
        if self.version is None and self.answers:
            problem = "; ".join(filter(None, (problem, UNKNOWN_VERSION)))
        return ReplicaInfo(
            address=self.address,
            state=self.state.message,
            active_weight_version=self.version or 0,
            load=self.load if self.answers else None,
            problem=problem,
            turn_count=len(self.turns),
            turn_limit=self.limit.value,
        )


def describe(info: rollout_service_pb2.GetServerInfoResponse) -> EngineDescription:
    """What an engine server says that does not change; asked with its tensors."""
    return EngineDescription(
        model=info.model,
        vocab_size=info.vocab_size,
        max_context_length=info.max_context_length,
        eos_token_ids=tuple(info.eos_token_ids),
        weight_dtype=info.weight_dtype,
        tensors={t.name: TensorMeta(tuple(t.shape), t.optional) for t in info.tensors},
        adapters=AdapterLimits(info.lora.max_rank, info.lora.max_adapters)
        if info.HasField("lora")
        else None,
    )


def difference(pool: EngineDescription, engine: EngineDescription) -> str:
    """How an engine differs from its pool, in words; empty where it can be one of it.

    Models are known by their shapes: the same one may be under another path on another host. An engine may
    offer a longer context, and more for adapters, than its pool does.
    """
    for name in ("vocab_size", "max_context_length", "eos_token_ids", "weight_dtype"):
        ours, theirs = getattr(pool, name), getattr(engine, name)
        if ours != theirs and not (name == "max_context_length" and theirs > ours):
            return f"{name} is {theirs}, the pool's is {ours}"
    if pool.tensors != engine.tensors:
        names = sorted(
            name
            for name in pool.tensors.keys() | engine.tensors.keys()
            if pool.tensors.get(name) != engine.tensors.get(name)
        )
        return f"{len(names)} tensors differ from the pool's, {names[0]} among them"
    return _lacks(pool.adapters, engine.adapters) if pool.adapters is not None else ""


def _lacks(pool: AdapterLimits, engine: AdapterLimits | None) -> str:
    """How an engine offers less for adapters than its pool does; empty where it does not."""
    if engine is None:
        return "it takes no LoRA adapters, as the pool does: start it with --enable-lora"
    for name in ("max_rank", "max_adapters"):
        ours, theirs = getattr(pool, name), getattr(engine, name)
        if theirs < ours:
            return f"{name} of its LoRA adapters is {theirs}, the pool's is {ours}"
    return ""
