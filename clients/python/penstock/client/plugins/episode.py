"""One attempt at a function written for slime, from its sample to its outcome."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from penstock.client.outcome import Failed, Outcome
from penstock.client.plugins.claims import Trained, claim_of, settle
from penstock.client.plugins.rewards import score_of
from penstock.client.plugins.router import meta_info_of
from penstock.client.plugins.samples import FINISHED, Sample
from penstock.client.plugins.told_metadata import told_metadata
from penstock.wire.agent_marks import STATUS, UNWANTED, write_untrained

if TYPE_CHECKING:
    from penstock.client.plugins.router import AttemptRouter
    from penstock.client.trajectory import Trajectory

_FAILED = {Sample.Status.ABORTED: "ABORTED", Sample.Status.FAILED: "FAILED"}


@dataclass(eq=False)
class Episode:
    trajectory: Trajectory
    sample: Sample
    """The sample that the function receives."""
    router: AttemptRouter
    reward_key: str | None = None
    """The entry that counts if the reward is a table. The others become metrics."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's sampling settings, under the names that the function receives."""
    returned: list[Sample] = field(default_factory=list[Sample])
    outcome: Outcome | Failed | None = None
    """Set once the attempt is settled."""
    unwanted: str = ""
    """Why the group is unwanted; set if its function dropped it."""
    on_dropped: Callable[[Episode], object] | None = None
    """Called when the function drops the group, in any thread."""

    def __post_init__(self) -> None:
        self._given = copy.deepcopy(self.sample.metadata)
        _EPISODES[self.trajectory.trajectory_id] = self

    def drop(self, reason: str) -> None:
        if not self.unwanted:
            self.unwanted = reason
            if self.on_dropped is not None:
                self.on_dropped(self)

    def leave_out(self) -> None:
        """Marks the attempt as left out of the returned group, so that none of it is trained."""
        self.sample.remove_sample = True
        if self.sample.reward is None:
            self.sample.status = Sample.Status.ABORTED
        self.returned = [self.sample]

    @property
    def failed(self) -> Failed | None:
        """The failure that a sample's status reports, if any."""
        for sample in self.returned:
            if (reason := _FAILED.get(sample.status)) is not None:
                return Failed(
                    reason, f"the function returned a sample that is {sample.status.value}"
                )
        return None

    async def settle(self) -> Outcome | Failed:
        """Closes the branches, each with its sample's reward. Returns the attempt's own outcome.

        The first outcome stands, although a group is scored again if a sibling is made again. Raises
        LossMaskInvalid, TokensDiffer, TokensNotSampled, SamplesShareTokens, RewardMissing, PenstockError.
        """
        if self.outcome is None:
            self.outcome = self.failed or await self._settle()
        return self.outcome

    async def _settle(self) -> Outcome:
        outcomes = [self._outcome_of(sample) for sample in self.returned]
        written = await self.router.written()
        pairs = zip(self.returned, outcomes, strict=True)
        claims = [claim_of(sample, outcome.reward) for sample, outcome in pairs]
        trained = settle(claims, [w for _, w in written])
        reward = sum(outcome.reward for outcome in outcomes) / len(outcomes)
        mean = Outcome(reward, _mean_metrics(outcomes), outcomes[0].metadata)
        own = _marked(outcomes, trained[0], mean) if trained else mean
        for (branch, _), part in zip(written[1:], trained[1:], strict=True):
            await branch.close(_marked(outcomes, part, Outcome(own.reward)))
        if not self.unwanted:
            return own
        return Outcome(own.reward, own.metrics, {**own.metadata, UNWANTED: self.unwanted})

    def _outcome_of(self, sample: Sample) -> Outcome:
        scored = score_of(sample.reward, self.reward_key)
        metadata = told_metadata(self._given, sample.metadata)
        if sample.status in FINISHED:
            metadata = {**metadata, STATUS: sample.status.value}
        return replace(scored, metadata=metadata)

    async def fill(self) -> None:
        """Uses the trajectory's only turn. Raises RequestUnsupported if its text is unknown."""
        sample, turn = self.sample, self.trajectory.last_turn
        ((_, written),) = await self.router.written()
        tokens: list[int] = written.token_ids.tolist()
        prompt_length = len(tokens) - len(turn.token_ids)
        sample.tokens = tokens[:prompt_length]
        sample.append_response_tokens(
            tokens=tokens[prompt_length:],
            log_probs=turn.logprobs.tolist(),
            text=self.router.text_of(turn, bool(self.sampling.get("skip_special_tokens"))),
            meta_info=meta_info_of(turn),
        )

    async def check(self) -> None:
        """Checks what `settle` checks, before the reward is known."""
        written = await self.router.written()
        settle([claim_of(sample, None) for sample in self.returned], [w for _, w in written])


current_episode: ContextVar[Episode | None] = ContextVar("penstock_episode", default=None)
"""The attempt that the running code belongs to. Tasks and threads it starts inherit it."""

_EPISODES: WeakValueDictionary[str, Episode] = WeakValueDictionary()


def find_episode(sample: Sample) -> Episode | None:
    """Returns the attempt of a sample or its copy, else the attempt whose code is running."""
    found = _EPISODES.get(sample.session_id) if sample.session_id else None
    return found or current_episode.get()


def _mean_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    names = [name for name in outcomes[0].metrics if all(name in o.metrics for o in outcomes)]
    return {name: sum(o.metrics[name] for o in outcomes) / len(outcomes) for name in names}


def _marked(outcomes: Sequence[Outcome], part: Trained, otherwise: Outcome) -> Outcome:
    """Returns the outcome of a trajectory's sample, marked with the tokens that are not trained."""
    own = outcomes[part.claims[0]] if part.claims else otherwise
    untrained = write_untrained(part.untrained, grows=part.broke_off)
    return Outcome(own.reward, own.metrics, {**own.metadata, **untrained})
