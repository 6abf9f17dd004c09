"""A function of slime's that makes whole rollouts, in a worker's place.

    leases -> groups whose attempts are all here -> data_source.get_samples(n) -> the function
           -> the groups that it returns -> each attempt settled and closed -> the function again

The function is called in a thread, again and again, with `rollout_id` counting from zero; one that keeps
groups in flight from one call to the next may. `data_source` says how it waits for groups. What becomes of
a group that it was given:

| the function | its attempts |
|---|---|
| returns it | are closed with what their samples say |
| gives it back with `add_samples` | wait, and are the next that `get_samples` gives |
| drops it by `call_dynamic_filter` | are closed at once, for the next group takes its place at the gate; |
|  | it is marked as of no use, for the reason the filter gave |
| keeps it | stay leased, and count against the concurrency |

An attempt that failed and comes again without its siblings cannot be given as a group: it fails again,
until the server counts it as failed. Order of shutdown: no more leases; a function that waits for a group
is told; what it holds is failed with WORKER_STOPPED, so that the server has it made elsewhere; the thread
is left to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.client.blocking import is_async, run_in_thread
from penstock.client.errors import PenstockError
from penstock.client.leases import Attempt, Leases
from penstock.client.outcome import Failed, Outcome
from penstock.client.plugins.data_source import DataSource, RolloutMisused, RolloutStopped
from penstock.client.plugins.episode import Episode
from penstock.client.plugins.samples import RolloutFnTrainOutput, Sample, flatten
from penstock.client.plugins.slime_functions import run
from penstock.client.scoring import as_failed
from penstock.client.statistics import Reporter, Statistics
from penstock.client.tasks import Purpose
from penstock.client.worker import WorkerSettings

if TYPE_CHECKING:
    from penstock.client.calls import Calls
    from penstock.client.plugins.slime import SlimeAgent

logger = logging.getLogger("penstock.rollout")

# How long another group is waited for by a function that has one to go on with: those that were admitted
# together arrive together.
_MOMENT_SECONDS = 0.5
# After which a function that has groups and waits for more is spoken of.
_SILENCE_SECONDS = 30.0
_SIBLINGS_GONE = Failed("SIBLINGS_GONE", "a whole rollout makes groups as a whole")


@dataclass(eq=False)
class _Group:
    size: int
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    episodes: list[Episode] = field(default_factory=list[Episode])
    given: bool = False
    """Whether the function has it."""

    @property
    def whole(self) -> bool:
        return len(self.attempts) == self.size


class WholeRollout:
    """Runs a function `(args, rollout_id, data_source, evaluation)`."""

    def __init__(
        self,
        calls: Calls,
        function: Callable[..., Any],
        agent: SlimeAgent,
        settings: WorkerSettings,
    ) -> None:
        self._calls, self._function, self._agent = calls, function, agent
        self._settings = settings
        self._given_back: deque[list[Sample]] = deque()
        self._groups: dict[str, _Group] = {}
        """Those of which an attempt is leased, until each is closed."""
        self._ready: deque[_Group] = deque()
        self._alone: Counter[tuple[str, int]] = Counter()
        """Places in groups whose attempt failed here and is to come again; below zero where it came before
        the answer to its close."""
        self._arrived = asyncio.Condition()
        self._ended: Exception | None = None
        """What ended the leasing; whoever asks for a group hears of it."""
        self._dropped: list[tuple[Episode, asyncio.Task[None]]] = []
        """What the function dropped since it was called, being closed."""
        self._calling_thread = 0
        """In which the function runs."""
        self._stopped = asyncio.Event()
        self._statistics = Statistics()
        self._reporter = Reporter(self._statistics, settings.report_seconds)

    def stop(self) -> None:
        """Asks `run` to return."""
        self._stopped.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped.is_set()

    @property
    def calling_thread(self) -> int:
        """The identity of the thread in which the function was called last."""
        return self._calling_thread

    @property
    def held(self) -> list[str]:
        """Trajectories that are leased, by their ids."""
        attempts = (a for group in self._groups.values() for a in group.attempts.values())
        return [attempt.trajectory.trajectory_id for attempt in attempts]

    async def run(self) -> Statistics:
        """Calls the function until stopped, or until so many attempts were closed.

        Raises PenstockError where the server refuses to lease, RolloutMisused, and what the function
        raises.
        """
        settings = self._settings
        leases = Leases(
            self._calls,
            concurrency=settings.concurrency,
            agent_id=settings.agent_id,
            purpose=Purpose.TRAIN,
            whole_groups=True,
            resume_aborted=True,
        )
        source = DataSource(self, asyncio.get_running_loop())
        stopping = asyncio.create_task(self._stopped.wait())
        async with leases:
            taking = asyncio.create_task(self._receive(leases))
            calling = asyncio.create_task(self._call(source))
            await asyncio.wait((stopping, calling), return_when=asyncio.FIRST_COMPLETED)
            await leases.stop_leasing()
            # A function that is left to itself holds up what it shares, such as slime's loop, no longer.
            await self._end_leasing(RolloutStopped("the worker was stopped"))
            for task in (stopping, taking, calling):
                task.cancel()
            await asyncio.wait((stopping, taking, calling))
            await self._give_up()
        self._reporter.report(0, last=True)
        if not calling.cancelled():
            calling.result()
        return self._statistics

    @property
    def given_back_count(self) -> int:
        """Groups that the function gave back and has not taken again."""
        return len(self._given_back)

    async def give_back(self, groups: Sequence[list[Sample]]) -> None:
        """Groups that the function takes again later."""
        async with self._arrived:
            self._given_back.extend(groups)
            self._arrived.notify_all()

    async def take(self, count: int, *, aside: bool) -> list[list[Sample]]:
        """Groups for the function: waits for the first, and a moment for each other one. `aside`: who waits
        must not be held up, so a function that has groups already may get none.

        Raises RolloutMisused, and what ended the leasing.
        """
        loop = asyncio.get_running_loop()
        found: list[list[Sample]] = []
        while len(found) < count:
            bounded = bool(found) or (aside and self._given_count > 0)
            group = await self._next_group(_MOMENT_SECONDS if bounded else None, aside=aside)
            if group is None:
                break
            if isinstance(group, _Group):
                for attempt in _ordered(group):
                    episode = await self._agent.begin(attempt.task, attempt.trajectory)
                    episode.on_dropped = partial(loop.call_soon_threadsafe, self._drop)
                    group.episodes.append(episode)
                group = [episode.sample for episode in group.episodes]
            found.append(group)
        return found

    @property
    def _given_count(self) -> int:
        """Attempts that the function has."""
        return sum(len(group.attempts) for group in self._groups.values() if group.given)

    async def _next_group(
        self, seconds: float | None, *, aside: bool
    ) -> _Group | list[Sample] | None:
        """The next group; None where none comes within so many seconds."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self._arrived:
            while True:
                if self._given_back:
                    return self._given_back.popleft()
                if self._ready:
                    group = self._ready.popleft()
                    group.given = True
                    return group
                if self._ended is not None:
                    raise self._ended
                if not aside:
                    self._check_room()
                waited = loop.time() - begun
                if seconds is not None and waited >= seconds:
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        _SILENCE_SECONDS if seconds is None else seconds - waited
                    ):
                        await self._arrived.wait()
                        continue
                if seconds is None and self._given_count:
                    logger.warning(
                        "the function has %d attempts and has waited %.0f s for another group: the server "
                        "admits none before the trainer has taken what is made, so what the function "
                        "needs at a time has to fit train.groups_per_step",
                        *(self._given_count, loop.time() - begun),
                    )

    def _check_room(self) -> None:
        """Raises RolloutMisused where all leases are with the function, which waits for another one."""
        held = self._given_count
        size = max((group.size for group in self._groups.values()), default=1)
        limit = self._settings.concurrency
        if held + size > limit:
            raise RolloutMisused(
                f"the function has {held} attempts and asks for another group of {size}; "
                f"--concurrency is {limit}"
            )

    async def _receive(self, leases: Leases) -> None:
        """Consumes leases; waits for more; produces whole groups; is unblocked by closes."""
        try:
            async for attempt in leases:
                if self._comes_alone(attempt):
                    self._count_alone(attempt, -1)
                    await self._close(attempt, _SIBLINGS_GONE)
                    continue
                group = self._groups.setdefault(attempt.group_id, _Group(attempt.task.group_size))
                group.attempts[attempt.sample_index] = attempt
                if group.whole:
                    await self._close_remains(group)
                    async with self._arrived:
                        self._ready.append(group)
                        self._arrived.notify_all()
        except Exception as error:
            await self._end_leasing(error)

    def _comes_alone(self, attempt: Attempt) -> bool:
        """Whether it failed here before, and its siblings did not."""
        group = self._groups.get(attempt.group_id)
        # What the function has is closed while leases are received: its close may not be answered yet.
        is_closing = group is not None and group.given and attempt.sample_index in group.attempts
        return is_closing or self._alone[attempt.group_id, attempt.sample_index] > 0

    def _count_alone(self, attempt: Attempt, change: int) -> None:
        """Keeps nothing of a place for which nothing is to come: there is no end of groups."""
        place = attempt.group_id, attempt.sample_index
        self._alone[place] += change
        if self._alone[place] == 0:
            del self._alone[place]

    async def _end_leasing(self, error: Exception) -> None:
        async with self._arrived:
            self._ended = self._ended or error
            self._arrived.notify_all()

    async def _close_remains(self, whole: _Group) -> None:
        """Fails what a worker of before left of groups whose other attempts it had closed: a group is
        leased as a whole, so of one that is older than a whole one no more comes."""
        for group in list(self._groups.values()):
            if group is whole:
                return
            if not group.whole and not group.given and all(a.retry_count for a in _ordered(group)):
                for attempt in _ordered(group):
                    await self._close(attempt, _SIBLINGS_GONE)

    async def _call(self, source: DataSource) -> None:
        await self._use_sampling()
        args = await self._agent.args()
        rollout_id = 0
        while (
            self._settings.attempts is None
            or self._statistics.ended_count < self._settings.attempts
        ):
            output: Any = await run_in_thread(self._call_function, args, rollout_id, source)
            samples = output.samples if isinstance(output, RolloutFnTrainOutput) else output
            await self._settle(flatten(samples))
            rollout_id += 1

    async def _use_sampling(self) -> None:
        """Waits for the first group, whose tasks say how this run samples; the function is told."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._ready or self._ended is not None)
            first = _ordered(self._ready[0])[0].task if self._ready else None
        if first is not None:
            await self._agent.use_sampling(first)

    def _call_function(self, args: Any, rollout_id: int, source: DataSource) -> Any:
        self._calling_thread = threading.get_ident()
        if is_async(self._function):
            return run(self._function(args, rollout_id, source, evaluation=False))
        output: Any = self._function(args, rollout_id, source, evaluation=False)
        return run(output) if inspect.iscoroutine(output) else output

    def _drop(self, episode: Episode) -> None:
        """Closes an attempt of a group that the function dropped, and so makes room for another."""
        for attempt, each in self._held_episodes():
            if each is episode:
                self._dropped.append((episode, asyncio.create_task(self._end(attempt, episode))))

    def _held_episodes(self) -> list[tuple[Attempt, Episode]]:
        return [
            (attempt, episode)
            for group in self._groups.values()
            for episode in group.episodes
            for attempt in _ordered(group)
            if attempt.trajectory is episode.trajectory
        ]

    async def _settle(self, samples: Sequence[Sample]) -> None:
        """Closes the attempts of what the function returned; what it had dropped is closed by then."""
        dropped, self._dropped = self._dropped, []
        await asyncio.gather(*(closing for _, closing in dropped))
        held = self._held_episodes()
        known = [*(episode for episode, _ in dropped), *(episode for _, episode in held)]
        by_id = {episode.sample.session_id: episode for episode in known}
        by_index = {episode.sample.index: episode for episode in known}
        for sample in samples:
            episode = by_id.get(sample.session_id) or by_index.get(sample.index)
            if episode is None:
                raise RolloutMisused(
                    f"the function returned a sample of no attempt it was given: index {sample.index}, "
                    f"session_id {sample.session_id}"
                )
            episode.returned.append(sample)
        given_back = {s.session_id for group in self._given_back for s in flatten(group)}
        over = {attempt.group_id for attempt, episode in held if episode.returned}
        ending: list[tuple[Attempt, Episode]] = []
        for attempt, episode in held:
            if attempt.group_id not in over:
                continue
            if not episode.returned and episode.sample.session_id not in given_back:
                # A group is delivered as a whole: one that was left out counts in the baseline, if it was
                # scored, and is not trained.
                episode.leave_out()
            if episode.returned:
                ending.append((attempt, episode))
        await asyncio.gather(*(self._end(attempt, episode) for attempt, episode in ending))

    async def _end(self, attempt: Attempt, episode: Episode) -> None:
        outcome: Outcome | Failed
        try:
            await episode.router.stop()
            if episode.unwanted:
                # What it was worth is not known, and nothing of it is trained.
                sample = episode.sample
                sample.reward, sample.remove_sample = sample.reward or 0.0, True
                episode.returned = [sample]
            outcome = await episode.settle()
        except Exception as error:
            outcome = _failed(error)
        await self._close(attempt, outcome)

    async def _close(self, attempt: Attempt, outcome: Outcome | Failed) -> None:
        count = sum(len(turn.token_ids) for turn in attempt.trajectory.turns)
        try:
            closed = await attempt.trajectory.close(outcome)
            self._statistics.add(outcome, count)
            self._count_alone(attempt, int(closed.retried))
        except (PenstockError, ValueError) as error:
            if isinstance(error, ValueError) and isinstance(outcome, Outcome):
                # The outcome itself is what cannot be sent, such as a reward that is not finite.
                await self._close(attempt, _failed(error))
                return
            logger.info("attempt %s is lost: %s", attempt.trajectory.trajectory_id, error)
            self._statistics.add(None, count)
            # Whether it comes again nobody says; where it has, that is settled.
            if self._alone[attempt.group_id, attempt.sample_index] < 0:
                del self._alone[attempt.group_id, attempt.sample_index]
        group = self._groups.get(attempt.group_id)
        if group is not None and group.attempts.get(attempt.sample_index) is attempt:
            del group.attempts[attempt.sample_index]
            group.episodes = [e for e in group.episodes if e.trajectory is not attempt.trajectory]
            if not group.attempts:
                del self._groups[attempt.group_id]
        async with self._arrived:
            self._arrived.notify_all()
        self._reporter.report(sum(len(g.attempts) for g in self._groups.values()))

    async def _give_up(self) -> None:
        stopped = Failed("WORKER_STOPPED", "the worker was stopped")
        held = [a for group in list(self._groups.values()) for a in list(group.attempts.values())]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.gather(*(self._close(attempt, stopped) for attempt in held))


def _ordered(group: _Group) -> list[Attempt]:
    return [group.attempts[index] for index in sorted(group.attempts)]


def _failed(error: Exception) -> Failed:
    failed = as_failed(error)
    logger.warning("an attempt failed with %s: %s", failed.reason, failed.message)
    return failed
