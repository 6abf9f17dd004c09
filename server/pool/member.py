"""One engine of a pool: whether it is in rotation, which weights it has, how many turns it may have.

States and transitions (docs/operations/many-engines.md has a diagram):

    JOINING    answers, but does not have the pool's weights      -> SERVING, once it was given them
    SERVING    in rotation                                        -> SWITCHING, JOINING, DRAINING, LOST
    SWITCHING  is activating the next version                     -> SERVING, JOINING if it refused
    DRAINING   is stopping; another process may replace it        -> LOST
    REFUSED    another model than the pool's, or lacks a feature  -> JOINING, as another process
               also in the pool under another address             -> JOINING, once it is not
    LOST       does not answer, or answers but samples nothing    -> JOINING

This module holds only state and arithmetic. `roster` contacts the engine server and decides when.

Version numbers: `wire_versions` maps the engine server's version numbers to the pool's. An engine server
that was never given weights samples the model as loaded, which is version 0 on both sides.

Weights: an engine server takes any number of adapters in a row, but no full weights while it has an
adapter. So the full weights below (`full_version`) must be the pool's before it is given the pool's
adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from penstock.server.engine.turn_limit import LimitRules, TurnLimit
from penstock.server.pool.health import Pace, Silence
from penstock.server.pool.remote import EngineServer
from penstock.server.pool.routing import EngineLoad, retry_seconds
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire.messages import ReplicaInfo, ServerLoad

KNOWN_VERSIONS = 64
MOST_MISSES = 2
"""Consecutive looks that may time out before the turns continue elsewhere. A single timeout may mean that
the hub itself stood still, with the answer or tokens still unread."""
LONGEST_OFFER_SECONDS = 60.0
"""Longest delay between two offers of a refused version. Each offer may transfer all of its bytes."""
UNKNOWN_VERSION = "the version it samples is not known"


class State(Enum):
    JOINING = rollout_service_pb2.REPLICA_STATE_JOINING
    SERVING = rollout_service_pb2.REPLICA_STATE_SERVING
    SWITCHING = rollout_service_pb2.REPLICA_STATE_PAUSED
    DRAINING = rollout_service_pb2.REPLICA_STATE_DRAINING
    REFUSED = 100
    LOST = rollout_service_pb2.REPLICA_STATE_UNAVAILABLE

    @property
    def message(self) -> rollout_service_pb2.ReplicaState.ValueType:
        """The state in GetServerInfo, which has no REFUSED and reports it as unavailable."""
        value = self.LOST.value if self is State.REFUSED else self.value
        return rollout_service_pb2.ReplicaState.ValueType(value)


@dataclass(frozen=True, slots=True)
class Declined:
    version: int
    times: int
    until: float
    """Clock time at which it is offered again."""


@dataclass(slots=True, eq=False)
class Member:
    """One address of the pool."""

    server: EngineServer
    rules: LimitRules
    clock: Callable[[], float]
    state: State = State.LOST
    problem: str = "has not answered yet"
    """Why it is not in rotation, or the error with which it last refused a turn."""
    setback: str = ""
    """Why it last left the rotation or was not brought up to date."""
    hung: bool = False
    """Whether it took too long with the last version that it was given."""
    refusal: str = ""
    """Why its process cannot join the pool; empty if it can."""
    server_id: str = ""
    """Id of its process; empty before the first answer."""
    host_id: str = ""
    hands_on: bool = False
    """Whether it can receive versions from other engine servers and pass them on."""
    version: int | None = None
    """Version that it samples, as the pool's number; None if not known."""
    full_version: int | None = None
    """Version of its full weights; equal to `version` unless that is an adapter."""
    delta_base: int | None = None
    """Version, as the pool's number, to which it last reported that a difference can be applied."""
    wire_adapters: tuple[int, ...] = ()
    """Adapters that it reported to be still sampling with, by its own numbers."""
    changes: int = 0
    """Number of weight changes made by this hub. An answer from before a change is outdated."""
    newest_wire_version: int = 0
    """Newest version number that its process has accepted."""
    reserved: set[int] = field(default_factory=set[int])
    """Version numbers of uploads under way."""
    wire_versions: dict[int, int] = field(default_factory=dict[int, int])
    turns: set[str] = field(default_factory=set[str])
    """Ids of the requests that it has."""
    between: int = 0
    """Number of its trajectories between two turns; maintained by `Placing`."""
    given: int = 0
    failures: int = 0
    refusals: int = 0
    """Consecutive turns that it refused although another engine may take them, or lost."""
    declined: Declined | None = None
    closed_until: float = 0.0
    """Clock time before which it gets no turns, because it was full or failed."""
    limit: TurnLimit = field(init=False)
    load: rollout_service_pb2.ServerLoad = field(default_factory=ServerLoad)
    pace: Pace = field(default_factory=Pace)
    silence: Silence = field(default_factory=Silence)
    silent: bool = False
    """Whether it sampled nothing for too long and lost its turns; LOST until it samples a token again."""
    misses: int = 0
    """Consecutive looks that timed out, with no token sampled in between."""
    missed_switching: bool = False
    """Whether the first of those looks happened during a switch."""
    usual_pace: float = 0.0
    """Usual seconds per token in the pool; 0 if not known."""

    def __post_init__(self) -> None:
        self.limit = TurnLimit(self.rules.first)

    @property
    def address(self) -> str:
        return self.server.address

    @property
    def answers(self) -> bool:
        """Whether a process with the pool's model answers at the address."""
        return self.state not in (State.LOST, State.REFUSED)

    def takes_turns(self, version: int = 0) -> bool:
        """Whether it is in rotation and not closed for now; with `version`, also samples that."""
        if self.state is not State.SERVING or self.clock() < self.closed_until:
            return False
        return not version or self.version == version

    @property
    def stays(self) -> bool:
        """Whether it takes turns now, or will after its switch."""
        return self.state in (State.SERVING, State.SWITCHING)

    def as_load(self) -> EngineLoad:
        turns = len(self.turns)
        slowness = self.pace.slowness(self.usual_pace, turns, self.clock())
        limit = self.limit
        return EngineLoad(
            self.address, turns, limit.value, slowness, self.given, self.between, limit.proven
        )

    def heard(self, info: rollout_service_pb2.GetServerInfoResponse) -> bool:
        """Take in an answer of the engine server; returns whether it comes from a new process."""
        other = info.server_id != self.server_id
        self.misses = 0
        if other:
            self.server_id = info.server_id
            self.limit = TurnLimit(self.rules.first)
            self.wire_versions.clear()
            self.reserved.clear()
            self.pace = Pace()
            self.speak()
            self.setback, self.hung = "", False
            self.refusals, self.closed_until = 0, 0.0
            self.declined = None
            self.state, self.problem = State.JOINING, ""
        elif self.state is State.LOST and not self.silent:
            # It was unreachable. It samples the same version as before, unless it reports otherwise.
            self.state, self.problem = State.JOINING, ""
        self.host_id = info.host_id
        self.hands_on = weights_pb2.WEIGHT_SOURCE_KIND_PEER in info.weight_sources
        accepted = [info.active_weight_version, *info.staged_weight_versions]
        self.newest_wire_version = max(accepted)
        self.version = self.pool_version(info.active_weight_version)
        self.full_version = self.pool_version(info.full_weight_version)
        base = info.delta_base_weight_version
        self.delta_base = self.pool_version(base) if base else None
        self.wire_adapters = tuple(info.adapter_weight_versions)
        self.load = info.load
        self.limit = self.limit.after(len(self.turns), info.load, self.rules)
        return other

    def pool_version(self, wire_version: int) -> int | None:
        """None if not known."""
        return self.wire_versions.get(wire_version) if wire_version else 0

    def wire_version(self, pool_version: int) -> int | None:
        """The newest number under which it was given the version; None if never."""
        found = [wire for wire, pool in self.wire_versions.items() if pool == pool_version]
        return max(found, default=None)

    def reserve(self, pool_version: int) -> int:
        """The number is larger than any that the engine server has accepted or is being given."""
        number = max(pool_version, self.newest_wire_version + 1, *(n + 1 for n in self.reserved))
        self.reserved.add(number)
        self.wire_versions[number] = pool_version
        # Keep the full weights' number: turns may sample them while any number of adapters pass.
        full = None if self.full_version is None else self.wire_version(self.full_version)
        for wire in [wire for wire in self.wire_versions if wire != full][:-KNOWN_VERSIONS]:
            del self.wire_versions[wire]
        return number

    def forget(self, pool_version: int) -> None:
        """Treat this version on the engine as foreign, because the pool refused it."""
        for wire in [wire for wire, pool in self.wire_versions.items() if pool == pool_version]:
            del self.wire_versions[wire]
        if self.version == pool_version:
            self.version = None
        if self.full_version == pool_version:
            self.full_version = None
        if self.delta_base == pool_version:
            self.delta_base = None

    def settle(self, wire_version: int, *, accepted: bool) -> None:
        """End a reservation; a number that was not accepted may be used again."""
        self.reserved.discard(wire_version)
        if accepted:
            self.newest_wire_version = max(self.newest_wire_version, wire_version)

    def has(self, pool_version: int, *, adapter: bool) -> None:
        """Record that it samples this version now; an adapter leaves the full weights unchanged."""
        self.version = pool_version
        self.declined = None
        if not adapter:
            self.full_version = pool_version
            # Unknown until it reports that it holds this version.
            self.delta_base = None
        self.changes += 1
        self.speak()

    @property
    def adapter_versions(self) -> list[int]:
        """As the pool's numbers."""
        known = (self.pool_version(wire) for wire in self.wire_adapters)
        return [version for version in known if version is not None] if self.answers else []

    def took(self, request_id: str) -> None:
        self.turns.add(request_id)
        self.given += 1
        self.silence = self.silence.given(self.clock())

    def left(self, request_id: str) -> None:
        self.turns.discard(request_id)
        if not self.turns:
            self.silence = self.silence.left(self.clock())

    def sampled(self) -> None:
        self.misses = 0
        self.silence = self.silence.broken(self.clock())

    def speak(self) -> None:
        """End its silence: it sampled again, took weights, or is another process."""
        self.silent, self.silence = False, self.silence.broken(self.clock())
        self.misses = 0

    def miss(self) -> None:
        if not self.misses:
            self.missed_switching = self.state is State.SWITCHING
        self.misses += 1

    @property
    def stands_still(self) -> bool:
        """Whether its process seems to hang. An engine that was switching when the timeouts began may
        stand still while it loads; only its silence limits for how long."""
        return self.misses >= MOST_MISSES and not self.missed_switching

    def paced(self, seconds: float, token_count: int) -> None:
        if token_count:
            self.pace = self.pace.after(seconds, token_count, self.clock(), self.usual_pace)

    def worked(self) -> None:
        if self.refusals:
            self.refusals = 0
            if self.state is State.SERVING:
                self.problem = ""

    def refused_at_limit(self) -> bool:
        """Returns whether it has other turns, and so can take the next one as soon as one of them ends."""
        others = len(self.turns) - 1
        if others:
            self.limit = self.limit.bounded(others, self.rules)
        return others > 0

    def refuse(self, problem: str) -> float:
        """Another engine may take the turn. Returns the seconds to leave this one alone."""
        self.refusals += 1
        if self.state is State.SERVING:
            self.problem = problem
        return retry_seconds(self.refusals)

    def decline(self, version: int) -> None:
        last = self.declined
        times = last.times + 1 if last is not None and last.version == version else 1
        seconds = retry_seconds(times, longest=LONGEST_OFFER_SECONDS)
        self.declined = Declined(version, times, self.clock() + seconds)

    def may_be_offered(self, version: int) -> bool:
        """Considers the back-off after it did not take the version."""
        last = self.declined
        return last is None or last.version != version or self.clock() >= last.until

    def close_for(self, seconds: float) -> None:
        self.closed_until = max(self.closed_until, self.clock() + seconds)

    def fail(self, problem: str) -> None:
        """Mark it LOST: it does not answer or cannot serve."""
        self.failures += 1
        self.state, self.problem = State.LOST, problem

    def leave_rotation(self, problem: str) -> None:
        """Mark it JOINING: it answers, but does not have the weights it should."""
        if self.state is State.SWITCHING:
            # Its silence was due to the failed switch.
            self.silence = self.silence.broken(self.clock())
        if self.state in (State.SERVING, State.SWITCHING, State.JOINING):
            self.failures += 1
            self.setback = problem
            self.state, self.problem = State.JOINING, problem

    def serve(self) -> None:
        """Mark it SERVING: it has the right weights and takes turns."""
        self.failures, self.setback = 0, ""
        self.state, self.problem = State.SERVING, ""

    @property
    def retry_seconds(self) -> float:
        return retry_seconds(self.failures)

    def message(self) -> rollout_service_pb2.ReplicaInfo:
        """Both an unknown version and the base model are reported as 0. In rotation, 0 is always the base
        model; otherwise `problem` states whether the version is unknown."""
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
