"""Runs a slime function that makes whole rollouts, in place of a worker.

    leases -> groups whose attempts are all here -> data_source.get_samples(n) -> the function
           -> the groups that it returns -> each attempt settled and closed -> the function again

A thread calls the function again and again, with `rollout_id` counting from zero. The function can
keep groups in flight from one call to the next. `data_source` describes how it waits for groups.
The function decides what happens to the attempts of a group:

- It returns the group: they are closed with the result in their samples.
- It gives the group back with `add_samples`: they wait, and `get_samples` returns them next.
- It drops the group through `call_dynamic_filter`: they are closed at once, because the next group
  needs the slot at the staleness gate. The group is marked as unwanted, with the filter's reason.
- It keeps the group: they stay leased and count against the concurrency.

If a failed attempt is leased again without its siblings, it does not make a whole group. It then
fails again until the server counts it as failed.

Order of shutdown: stop leasing; raise RolloutStopped in a function that waits for a group; fail its
attempts with WORKER_STOPPED; abandon the thread. The server schedules the attempts elsewhere.
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
from penstock.client.statistics import STOPPED, Reporter, Statistics
from penstock.client.tasks import Purpose
from penstock.client.worker import WorkerSettings

if TYPE_CHECKING:
    from penstock.client.calls import Calls
    from penstock.client.plugins.slime import SlimeAgent

logger = logging.getLogger("penstock.rollout")

# How long a function that already has a group waits for another one. Groups admitted together
# arrive together.
_MOMENT_SECONDS = 0.5
# A function that has groups and waits longer than this for more causes a warning.
_SILENCE_SECONDS = 30.0
_SIBLINGS_GONE = Failed("SIBLINGS_GONE", "a whole rollout needs every attempt of a group")


@dataclass(eq=False)
class _Group:
    size: int
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])
    episodes: list[Episode] = field(default_factory=list[Episode])
    given: bool = False

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
        """Groups with leased attempts, until each attempt is closed."""
        self._ready: deque[_Group] = deque()
        self._alone: Counter[tuple[str, int]] = Counter()
        """Places in groups whose attempt failed here and will be leased again. Negative if the new
        lease came before the answer to the close."""
        self._arrived = asyncio.Condition()
        self._ended: Exception | None = None
        """The error that ended leasing. A call that asks for a group raises it."""
        self._dropped: list[tuple[Episode, asyncio.Task[None]]] = []
        """Groups' attempts that the function dropped since its last call; they are being closed."""
        self.calling_thread = 0
        """Identity of the thread in which the function was last called."""
        self._stopped = asyncio.Event()
        self._statistics = Statistics()
        self._reporter = Reporter(self._statistics, settings.report_seconds)

    def stop(self) -> None:
        self._stopped.set()

    @property
    def stopping(self) -> bool:
        return self._stopped.is_set()

    async def run(self) -> Statistics:
        """Calls the function until stopped, or until `attempts` attempts were closed.

        Raises PenstockError if the server refuses to lease, RolloutMisused, and what the function raises.
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
            # This unblocks an abandoned function, which may hold shared resources such as slime's loop.
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
        return len(self._given_back)

    async def give_back(self, groups: Sequence[list[Sample]]) -> None:
        async with self._arrived:
            self._given_back.extend(groups)
            self._arrived.notify_all()

    async def take(self, count: int, *, aside: bool) -> list[list[Sample]]:
        """Returns groups for the function. Waits for the first, and briefly for each further one.

        `aside` means that the caller must not be blocked. Then a function that already has groups
        may get an empty list. Raises RolloutMisused, and the error that ended leasing.
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
                    episode = await self._agent.begin(
                        attempt.task,
                        attempt.trajectory,
                        on_dropped=partial(loop.call_soon_threadsafe, self._drop),
                    )
                    group.episodes.append(episode)
                group = [episode.sample for episode in group.episodes]
            found.append(group)
        return found

    @property
    def _given_count(self) -> int:
        return sum(len(group.attempts) for group in self._groups.values() if group.given)

    async def _next_group(
        self, seconds: float | None, *, aside: bool
    ) -> _Group | list[Sample] | None:
        """Returns None if no group arrives within `seconds`."""
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
                        "the function holds %d attempts and has waited %.0f s for another group. The "
                        "server admits none until the trainer has taken finished groups. The function "
                        "should need at most train.groups_per_step groups at a time",
                        *(self._given_count, loop.time() - begun),
                    )

    def _check_room(self) -> None:
        held = self._given_count
        size = max((group.size for group in self._groups.values()), default=1)
        limit = self._settings.concurrency
        if held + size > limit:
            raise RolloutMisused(
                f"the function holds {held} attempts and asks for another group of {size}, but "
                f"--concurrency is {limit}"
            )

    async def _receive(self, leases: Leases) -> None:
        """Receives leases and queues whole groups. Closing attempts makes room for more leases."""
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
        """Returns whether the attempt failed here before while its siblings did not."""
        group = self._groups.get(attempt.group_id)
        # A close may still await its answer when the attempt is leased again.
        is_closing = group is not None and group.given and attempt.sample_index in group.attempts
        return is_closing or self._alone[attempt.group_id, attempt.sample_index] > 0

    def _count_alone(self, attempt: Attempt, change: int) -> None:
        """Keeps no zero entries, because the number of groups is unbounded."""
        place = attempt.group_id, attempt.sample_index
        self._alone[place] += change
        if self._alone[place] == 0:
            del self._alone[place]

    async def _end_leasing(self, error: Exception) -> None:
        async with self._arrived:
            self._ended = self._ended or error
            self._arrived.notify_all()

    async def _close_remains(self, whole: _Group) -> None:
        """Fails what a previous worker left of groups whose other attempts it had closed.

        Groups are leased whole, in order. So a group older than a whole one receives no more attempts.
        """
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
        """The sampling parameters of the first group's task hold for the whole run."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self._ready or self._ended is not None)
            first = _ordered(self._ready[0])[0].task if self._ready else None
        if first is not None:
            await self._agent.use_sampling(first)

    def _call_function(self, args: Any, rollout_id: int, source: DataSource) -> Any:
        self.calling_thread = threading.get_ident()
        if is_async(self._function):
            return run(self._function(args, rollout_id, source, evaluation=False))
        output: Any = self._function(args, rollout_id, source, evaluation=False)
        return run(output) if inspect.iscoroutine(output) else output

    def _drop(self, episode: Episode) -> None:
        """Closes an attempt of a group that the function dropped, which makes room for another."""
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
        """Closes the attempts that the function returned, after those it dropped."""
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
                    f"the function returned a sample of an unknown attempt: index {sample.index}, "
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
                # Groups are delivered whole. An attempt that the function left out counts in the
                # baseline if it was scored, but is not trained.
                episode.leave_out()
            if episode.returned:
                ending.append((attempt, episode))
        await asyncio.gather(*(self._end(attempt, episode) for attempt, episode in ending))

    async def _end(self, attempt: Attempt, episode: Episode) -> None:
        outcome: Outcome | Failed
        try:
            await episode.router.stop()
            if episode.unwanted:
                # Its reward is unknown, and it is not trained.
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
                # The outcome itself cannot be sent, for example because its reward is not finite.
                await self._close(attempt, _failed(error))
                return
            logger.info("attempt %s is lost: %s", attempt.trajectory.trajectory_id, error)
            self._statistics.add(None, count)
            # Unknown whether the server makes it again. If it already has, this settles it.
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
        stopped = Failed(STOPPED, "the worker was stopped")
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
