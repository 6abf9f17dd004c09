"""A trajectory: turns with text, messages or tokens; abort, resume and close."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from penstock.client.calls import Calls, TurnRequest
from penstock.client.conversation import Observation, PromptKind, Tool, write_prompt
from penstock.client.errors import NotAllowedNow, NotFound, PenstockError
from penstock.client.outcome import Closed, Failed, Outcome, write_outcome
from penstock.client.sampling import SamplingOptions, SamplingParams
from penstock.client.turn_stream import TurnStream, abort_turn, get_trajectory, get_turns
from penstock.client.turns import SegmentView, TrajectoryRecord, Turn, TurnProgress
from penstock.v1 import task_service_pb2 as tasks
from penstock.wire.messages import ContinueRequest, GenerateRequest, StreamOptions
from penstock.wire.reasons import Reason

if TYPE_CHECKING:
    from penstock.client.outcome import ProcessRecord
    from penstock.client.tasks import Task

# Aborts of one trajectory's turns after which closing fails, because some process keeps taking turns.
_CLOSING_ABORTS = 8


@dataclass(frozen=True, slots=True)
class Place:
    group_id: str = ""
    group_size: int = 0
    sample_index: int = 0
    """Position in the group, from zero."""
    parent_trajectory_id: str = ""
    """The trajectory that it is a branch of, if any."""
    leased: bool = False
    """Whether the server knows its task and its group by a lease."""


class Trajectory:
    """One episode, made by `Client.trajectory` or by a lease. The first turn opens it.

    The first `turn` starts with the task's prompt or its own observation; later turns extend the
    trajectory. In a conversation, a plain str is a user's message. Otherwise it is text, encoded
    without a chat template.
    """

    def __init__(
        self,
        calls: Calls,
        trajectory_id: str,
        *,
        task: Task | None = None,
        place: Place = Place(),
        priority: int = 0,
        required_weight_version: int = 0,
        resume_aborted: bool = False,
        on_closed: Callable[[str], None] | None = None,
    ) -> None:
        """`on_closed` is called with the trajectory id once the server has confirmed the close."""
        self.trajectory_id = trajectory_id
        self.task = task
        self.group_id = place.group_id
        self.sample_index = place.sample_index
        self.parent_trajectory_id = place.parent_trajectory_id
        self.resume_aborted = resume_aborted
        """Whether an aborted turn is resumed before the caller receives it. Closing sets it to False."""
        self.turns: list[Turn] = []
        """Turns so far. An aborted turn is the last one until it is resumed."""
        self.outcome: Outcome | Failed | None = None
        """Set when closing starts."""
        self.closed = False
        """Set when the server has confirmed the close."""
        self.attached: object = None
        """State that the agent keeps with the trajectory."""
        self.driven_elsewhere = False
        """Whether another process takes the turns, such as an external command. Then `turns` holds
        what `load` read, and closing aborts any turn in flight."""
        self.process: ProcessRecord | None = None
        """Record of the external process, once it has ended."""
        self._calls = calls
        self._place = place
        self._priority = priority
        self._required_weight_version = required_weight_version
        self._sampling = task.sampling if task else SamplingParams()
        self._kind = task.prompt_kind if task else None
        self._progress: TurnProgress | None = None
        self._branches: list[Trajectory] = []
        self._on_closed = on_closed

    @property
    def last_turn(self) -> Turn:
        """The last turn. Raises IndexError before the first."""
        return self.turns[-1]

    @property
    def text(self) -> str:
        """The policy's text in its last turn; empty before the first."""
        return self.turns[-1].text if self.turns else ""

    @property
    def branches(self) -> Sequence[Trajectory]:
        """Branches of this trajectory that this object made."""
        return tuple(self._branches)

    async def turn(
        self,
        observation: Observation | None = None,
        *,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        detach: bool = False,
        on_start: Callable[[], None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Turn:
        """Takes one turn: `await trajectory.turn("What is 2 + 3?", max_tokens=16)`.

        `timeout` bounds the whole turn, in seconds. With `detach`, the server continues the turn if
        the connection is lost. `on_start` is called once the server is known to have started it.
        Sampling keywords apply to this turn and later ones. Raises PenstockError. After
        DeadlineExceeded the turn can be resumed.
        """
        stream = self.stream(
            observation,
            tools=tools,
            timeout=timeout,
            detach=detach,
            final_only=True,
            on_start=on_start,
            **sampling,
        )
        return await self._run(stream)

    async def stream(
        self,
        observation: Observation | None = None,
        *,
        tools: Sequence[Tool] = (),
        timeout: float | None = None,
        detach: bool = False,
        final_only: bool = False,
        flush_seconds: float | None = None,
        on_start: Callable[[], None] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[SegmentView]:
        """Takes one turn and yields its tokens as they arrive. Afterwards `last_turn` is the turn.

        Until then the tokens are provisional. A restarted server may hold fewer tokens than it
        streamed. Then the next segment's `position` lies before the end of the last one, and it
        replaces what followed there. `flush_seconds` bounds how long tokens wait on the server.
        Leaving the loop early aborts the turn once the iterator is closed.
        """
        if self._progress is not None:
            raise RuntimeError(
                f"a turn of {self.trajectory_id} is not finished: resume or abort it"
            )
        options = StreamOptions(final_only=final_only, detach=detach)
        if flush_seconds is not None:
            options.flush_interval.FromNanoseconds(int(flush_seconds * 1e9))
        request = self._write_turn(observation, tools, options, sampling)
        progress = self._progress = TurnProgress(len(self.turns), request, on_start=on_start)
        async with contextlib.aclosing(self._take(progress, True, options, timeout)) as tokens:
            async for segment in tokens:
                yield segment

    async def resume(self, timeout: float | None = None) -> Turn:
        """Continues an aborted or interrupted turn at the exact token. Returns the whole turn.

        Raises RuntimeError if there is nothing to resume.
        """
        options = StreamOptions(final_only=True)
        progress, known = self._progress, False
        if progress is None:
            if not self.turns or not self.turns[-1].aborted:
                raise RuntimeError(f"trajectory {self.trajectory_id} has no aborted turn to resume")
            resume = ContinueRequest(trajectory_id=self.trajectory_id, stream_options=options)
            progress, known = TurnProgress.of(self.turns.pop(), resume), True
            self._progress = progress
        return await self._run(self._take(progress, known, options, timeout))

    async def abort(self, reason: str = "") -> int:
        """Stops the turn in flight. Returns the number of its tokens that are kept; zero without a
        turn."""
        return await abort_turn(self._calls, self.trajectory_id, reason)

    async def complete(
        self,
        reward: float | Outcome,
        *,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Closed:
        """Closes it with a reward. The outcome is durable once the call returns.

        Raises ValueError for an outcome that cannot be sent, for example a reward that is not finite.
        """
        if not isinstance(reward, Outcome):
            reward = Outcome(float(reward), metrics or {}, metadata or {})
        return await self.close(reward)

    async def fail(self, reason: str, message: str = "") -> Closed:
        """Closes it as failed. The server makes the attempt again, up to a bound."""
        return await self.close(Failed(reason, message))

    async def close(self, outcome: Outcome | Failed) -> Closed:
        """Closes it and its branches, after aborting their turns in flight."""
        request = tasks.CompleteTrajectoryRequest(
            trajectory_id=self.trajectory_id, outcome=write_outcome(outcome)
        )
        self.outcome = outcome
        await self._abort_unfinished()
        response = await self._complete(request)
        self.closed = True
        if self._on_closed is not None:
            self._on_closed(self.trajectory_id)
        return Closed(response.group_completed, response.retried)

    async def get(self) -> TrajectoryRecord:
        """Returns the trajectory as the server holds it, context included."""
        return await get_trajectory(self._calls, self.trajectory_id, patient=True)

    async def load(self) -> None:
        """Reads the turns that another process took. Only the last turn includes its text."""
        self.turns = await get_turns(self._calls, self.trajectory_id)

    def branch(self, trajectory_id: str) -> Trajectory:
        """Makes a branch: another trajectory of the same attempt, closed with this one.

        Examples are a sub-agent's conversation, or a rewritten one. Its first turn receives its full
        context. The prefix it shares with this trajectory, including the policy's own turns, is not
        encoded again. That prefix is stored, delivered and trained with this trajectory only.
        """
        branch = Trajectory(
            self._calls,
            trajectory_id,
            place=Place(
                group_id=self.group_id,
                sample_index=self.sample_index,
                parent_trajectory_id=self.trajectory_id,
            ),
            resume_aborted=self.resume_aborted,
        )
        self._branches.append(branch)
        return branch

    async def _complete(
        self, request: tasks.CompleteTrajectoryRequest
    ) -> tasks.CompleteTrajectoryResponse:
        """Closes the trajectory, aborting each turn that the server reports as in flight.

        Only the server knows branches that another process made. A request for a turn can also arrive
        after the abort that was meant for it. Always waits for a lost server, because the work is done.
        """
        response = tasks.CompleteTrajectoryResponse
        aborted = Counter[str]()
        while True:
            try:
                return await self._calls.ask(request, response, patient=True)
            except NotAllowedNow as error:
                busy = error.metadata.get("trajectory_id") or self.trajectory_id
                if error.reason != Reason.TURN_IN_FLIGHT or aborted[busy] == _CLOSING_ABORTS:
                    raise
                aborted[busy] += 1
                await self._abort_closing(busy)

    async def _abort_unfinished(self) -> None:
        """Aborts unfinished turns, because the server closes no trajectory with a turn in flight."""
        self.resume_aborted = False
        for branch in self._branches:
            await branch._abort_unfinished()
        if self._progress is not None or self.driven_elsewhere:
            await self._abort_closing(self.trajectory_id)

    async def _abort_closing(self, trajectory_id: str) -> None:
        with contextlib.suppress(NotFound):
            await abort_turn(self._calls, trajectory_id, "closing", patient=True)

    async def _run(self, stream: AsyncGenerator[SegmentView]) -> Turn:
        async with contextlib.aclosing(stream) as segments:
            async for _ in segments:
                pass
        return self.turns[-1]

    async def _take(
        self,
        progress: TurnProgress,
        known: bool,
        options: StreamOptions,
        timeout: float | None,
    ) -> AsyncGenerator[SegmentView]:
        """Runs a turn and records its result, however it ends."""
        resume = ContinueRequest(trajectory_id=self.trajectory_id, stream_options=options)
        stream = TurnStream(
            calls=self._calls,
            trajectory_id=self.trajectory_id,
            progress=progress,
            resume=resume,
            kind=self._kind,
            resume_aborted=lambda: self.resume_aborted,
            leased=self._place.leased,
            policy_count_before=sum(len(turn.token_ids) for turn in self.turns),
        )
        try:
            async with contextlib.aclosing(stream.segments(known, timeout)) as segments:
                async for segment in segments:
                    yield segment
        except PenstockError as error:
            if progress.refused(error):
                self._progress = None
            raise
        finally:
            if progress.finished is not None:
                self.turns.append(progress.finished)
                self._progress = None

    def _write_turn(
        self,
        observation: Observation | None,
        tools: Sequence[Tool],
        options: StreamOptions,
        sampling: SamplingOptions,
    ) -> TurnRequest:
        first = not self.turns
        if observation is None and first and self.task is not None and not self._place.leased:
            # Only with a lease does the server have the task's prompt.
            observation, tools = self.task.prompt, tools or self.task.tools
        if observation is None and not first:
            raise TypeError(
                "a later turn needs an observation; call resume() to continue an aborted turn"
            )
        chat = self._kind is PromptKind.MESSAGES and not first
        prompt = write_prompt(observation, tools, chat=chat)
        if first:
            self._kind = next(map(PromptKind, prompt), self._kind)
        self._sampling = self._sampling.with_options(sampling)
        if not first:
            return ContinueRequest(
                trajectory_id=self.trajectory_id,
                **prompt,
                sampling_params=self._sampling.to_wire() if sampling else None,
                stream_options=options,
            )
        request = GenerateRequest(
            trajectory_id=self.trajectory_id,
            **prompt,
            sampling_params=self._sampling.to_wire(),
            stream_options=options,
            priority=self._priority,
            required_weight_version=self._required_weight_version,
            parent_trajectory_id=self.parent_trajectory_id,
        )
        if self.task is None and not self.parent_trajectory_id:
            # For leases and branches, the server knows the group.
            request.group_id, request.group_size = self.group_id, self._place.group_size
            request.sample_index = self.sample_index
        return request
