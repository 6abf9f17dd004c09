"""What a server and its peers wait for, from the facts about it. No I/O, no clock.

Someone waits if the trainer has asked for groups that it does not get, or agents ask for attempts that
no server gives them. The causes come in this order, because each one may be the reason for those after it:

1. what stops the server itself: disk, memory, engines, weights;
2. what groups need, in the order in which they need it: a trainer, tasks, a place, a worker, an end;
3. that groups are under way, if there is no other cause.

A cause is reported once it has lasted for REPORT_SECONDS. `progress` collects the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

REPORT_SECONDS = 10.0
SILENT_SECONDS = 20.0
"""An engine or an attempt is silent after this long. Tools and long prompts may well take longer; it only
matters if someone waits for them."""
LONG_SILENT_SECONDS = 45.0
"""As `SILENT_SECONDS`, for an attempt while others sample."""
MANY_DROPS = 8
"""Fewer drops without a trained group between them are nothing special."""


@dataclass(frozen=True, slots=True)
class Cause:
    name: str
    message: str
    advice: str
    seconds: float = 0.0
    """How long it has lasted, if the facts tell."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A leased attempt without an open call."""

    trajectory_id: str
    agent: str
    seconds: float
    """Since its agent's last call."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Seconds are durations until now."""

    run: str = ""
    """The last trainer's run; empty if none has connected."""
    trainer_connected: bool = False
    trainer_seconds: float = 0.0
    """Since the trainer's last message, or since it left."""
    demand: int = 0
    evaluation_demand: int = 0
    buffered: int = 0
    """Groups that could be delivered if the trainer asked for them."""
    places: int = 0
    """Training groups begun and not delivered."""
    place_limit: int = 0
    under_way: int = 0
    """Groups with attempts that have not ended, evaluation included."""
    may_begin: bool = True
    """Whether the gate lets another training group begin."""
    pending: int = 0
    waiting: int = 0
    """Attempts of begun groups that wait for a lease."""
    untaken: tuple[str, ...] = ()
    """Tasks that wait, in words, and that none of the agents takes."""
    agents: int = 0
    idle_agents: int = 0
    """Those that wait for an attempt."""
    leased: int = 0
    silent: Silent | None = None
    """The attempt whose agent has been silent for the longest."""
    attempt_seconds: float = 0.0
    """Time limit of an attempt."""
    turns: int = 0
    token_seconds: float = 0.0
    """Since the last token, or since the oldest turn in flight began if that is less."""
    trainer_version: int = 0
    active_version: int = 0
    staged: tuple[int, ...] = ()
    switch: str = "idle"
    switch_seconds: float = 0.0
    awaits_trainer: bool = False
    evaluations: int = 0
    """Evaluation groups under way."""
    engines: Mapping[str, str] = field(default_factory=dict[str, str])
    """Engines that take no turns, and why. The address is empty for the server's own engine."""
    engines_serving: int = 1
    disk_problem: str = ""
    memory_full: bool = False
    drops: Mapping[str, int] = field(default_factory=dict[str, int])
    """Groups dropped or refused since one was trained, by reason."""
    groups_per_step: int = 1

    @property
    def trainer_waits(self) -> bool:
        return self.trainer_connected and (self.demand > 0 or self.evaluation_demand > 0)

    @property
    def in_use(self) -> bool:
        """Whether there is a run, or anything for one."""
        return bool(self.run or self.pending or self.waiting or self.leased or self.idle_agents)


def causes(facts: Facts) -> list[Cause]:
    """The most likely one first."""
    found = [*_own(facts)]
    # Groups wait for the engine too, so their own causes say no more.
    if not any(cause.name in _STOPPING for cause in found):
        found += _groups(facts)
    return found


_STOPPING = frozenset({"ENGINE_UNAVAILABLE", "ENGINE_SILENT", "WEIGHTS_AWAITED", "SWITCH_WAITS"})


def _own(facts: Facts) -> Iterator[Cause]:
    if facts.disk_problem:
        yield Cause(
            "DISK_FULL",
            facts.disk_problem,
            "free room on the disk, or raise journal.max_bytes; the server then continues",
        )
    if facts.memory_full:
        yield Cause(
            "MEMORY_FULL",
            "no group begins, because limits.memory_bytes is nearly used up",
            "let the trainer take groups, abandon open trajectories, or raise limits.memory_bytes",
        )
    yield from _engines(facts)
    yield from _weights(facts)


def _engines(facts: Facts) -> Iterator[Cause]:
    problems = "; ".join(f"{address or 'it'} {why}" for address, why in facts.engines.items())
    if facts.engines and not facts.engines_serving:
        what = "the engine takes" if len(facts.engines) == 1 else "none of the engines takes"
        yield Cause(
            "ENGINE_UNAVAILABLE", f"{what} turns: {problems}", "see the log of the engine's process"
        )
    elif facts.engines:
        yield Cause(
            "ENGINE_OUT",
            f"{len(facts.engines)} of {len(facts.engines) + facts.engines_serving} engines take no "
            f"turns: {problems}",
            "see the log of that engine's process; the others go on",
        )
    if facts.turns and facts.token_seconds >= SILENT_SECONDS and facts.switch == "idle":
        yield Cause(
            "ENGINE_SILENT",
            f"the engine has {facts.turns} turns in flight and has written no token for "
            f"{facts.token_seconds:.0f} s",
            "see the log of the engine's process; restart the server if it hangs",
            facts.token_seconds,
        )


def _weights(facts: Facts) -> Iterator[Cause]:
    if facts.awaits_trainer:
        yield Cause(
            "WEIGHTS_AWAITED",
            f"turns wait until the trainer's version is active; version {facts.active_version} is",
            "start the trainer of this run, which uploads it",
        )
    elif facts.switch != "idle" and facts.switch_seconds >= REPORT_SECONDS:
        yield Cause(
            "SWITCH_WAITS",
            f"a switch of weights is {facts.switch} for {facts.switch_seconds:.0f} s with "
            f"{facts.turns} turns in flight",
            "it ends with those turns if it drains them; see the server's log otherwise",
            facts.switch_seconds,
        )
    elif facts.staged and facts.evaluations and max(facts.staged) > facts.active_version:
        yield Cause(
            "SWITCH_WAITS",
            f"version {max(facts.staged)} is uploaded, and the trainer does not switch to it: "
            f"{facts.evaluations} evaluation groups of version {facts.active_version} are under way",
            "the switch waits for a pinned evaluation; its timeout_seconds bounds the wait",
        )


def _groups(facts: Facts) -> Iterator[Cause]:
    if not facts.trainer_connected and facts.in_use:
        yield _no_trainer(facts)
    found = [*_attempts(facts)]
    yield from found
    if not facts.trainer_waits:
        idle = facts.idle_agents and not facts.pending and not facts.waiting
        if facts.trainer_connected and (facts.buffered or idle):
            yield Cause(
                "TRAINER_BUSY",
                f"the trainer has asked for no groups for {facts.trainer_seconds:.0f} s; "
                f"{facts.buffered} are finished",
                "it trains, or it stands still: see its log",
                facts.trainer_seconds,
            )
        return
    if sum(facts.drops.values()) >= max(MANY_DROPS, 2 * facts.groups_per_step):
        yield _dropped(facts)
    if found or facts.buffered:
        return
    if not facts.under_way and not facts.pending and not facts.waiting:
        yield Cause(
            "NO_TASKS",
            "the trainer waits for groups, and there are no tasks",
            "the trainer submits them: see its log",
        )
    elif not facts.under_way and not facts.may_begin:
        yield Cause(
            "NO_PLACE",
            f"no group may begin: the trainer holds version {facts.trainer_version}, version "
            f"{facts.active_version} is active, and {facts.places} of {facts.place_limit} places are taken",
            "the trainer has to switch to its version, or to take finished groups",
        )
    else:
        yield Cause(
            "SAMPLING",
            f"{facts.under_way} groups are under way: {facts.leased} attempts are leased, "
            f"{facts.turns} turns are in flight",
            "more engines or workers, or shorter answers, make it faster",
        )


def _no_trainer(facts: Facts) -> Cause:
    if not facts.run:
        return Cause(
            "NO_TRAINER", "no trainer has connected yet", "start one with this server's address"
        )
    return Cause(
        "NO_TRAINER",
        f"the trainer of run {facts.run} is gone for {facts.trainer_seconds:.0f} s; "
        f"{facts.buffered} groups are kept for it",
        "start it again with --resume",
        facts.trainer_seconds,
    )


def _attempts(facts: Facts) -> Iterator[Cause]:
    tasks = facts.waiting or (facts.pending and facts.may_begin)
    if tasks and not facts.agents:
        yield Cause(
            "NO_WORKER",
            f"{facts.waiting} attempts and {facts.pending} tasks wait, and no worker is connected",
            "start one: penstock rollout --server HOST:PORT",
        )
    elif facts.untaken:
        yield Cause(
            "WORKER_TOO_SMALL",
            f"none of the {facts.agents} workers takes {'; '.join(facts.untaken)}",
            "start a worker with a larger --concurrency, or one without a group reward",
        )
    waits = facts.trainer_waits or (facts.idle_agents and not facts.pending)
    silent = facts.silent
    least = LONG_SILENT_SECONDS if facts.turns else SILENT_SECONDS
    if waits and silent is not None and silent.seconds >= least:
        agent = silent.agent or "an agent whose stream was lost"
        yield Cause(
            "ATTEMPT_SILENT",
            f"{facts.leased} attempts are leased, and {facts.turns} turns are in flight; {agent} has made "
            f"no call on {silent.trajectory_id} for {silent.seconds:.0f} s",
            f"its function or tool takes long, or hangs; the attempt fails {facts.attempt_seconds:g} s "
            "after its lease (leases.attempt_seconds)",
            silent.seconds,
        )


def _dropped(facts: Facts) -> Cause:
    drops = ", ".join(f"{count} {reason}" for reason, count in sorted(facts.drops.items()))
    return Cause(
        "GROUPS_DROPPED",
        f"since a group was last trained, these were dropped: {drops}",
        "the reasons are in the trainer's log and in docs/reference/errors.md",
    )
