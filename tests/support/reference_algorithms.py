"""A second implementation of every algorithm, from the papers, in plain Python: token by token,
with gradients by hand.

It shares no code with the product. It reads delivered groups itself and has no micro-batches or
shared prefixes. It takes the configuration as the table that a user writes.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.v1 import trajectory_pb2

Table = Mapping[str, Any]


@dataclass
class Token:
    place: int
    """Index among all trained tokens, in the order of delivery."""
    position: int
    """Index in its sequence."""
    behaviour: float


@dataclass
class Answer:
    group: int
    reward: float
    branch: bool
    ids: list[int] = field(default_factory=list[int])
    """The whole sequence, including tokens that the policy did not write."""
    tokens: list[Token] = field(default_factory=list[Token])


@dataclass
class Given:
    """The models' values for each trained token, indexed by its place."""

    logprobs: Sequence[float]
    proximal: Sequence[float]
    reference: Sequence[float]
    entropies: Sequence[float]
    values: Sequence[float]


@dataclass
class Found:
    advantages: list[float]
    loss: float
    slopes: list[float]
    """Derivative with respect to each log-probability."""
    entropy_slopes: list[float]
    targets: list[float]
    """The critic's targets; empty without a critic."""


def read(messages: Sequence[Any], version: int, max_lag: int) -> list[Answer]:
    answers: list[Answer] = []
    place = 0
    for number, message in enumerate(messages):
        for trajectory in message.trajectories:
            if not trajectory.outcome.HasField("reward"):
                continue
            branch = trajectory.parent_trajectory_id != ""
            answer = Answer(number, trajectory.outcome.reward, branch)
            for segment in trajectory.segments:
                ids = np.frombuffer(segment.token_ids, np.int32)
                policy = segment.author == trajectory_pb2.AUTHOR_POLICY
                young = version - segment.weight_version <= max_lag
                logprobs = np.frombuffer(segment.logprobs, np.float32)
                for index in range(len(ids)):
                    if policy and young and answer.ids:
                        answer.tokens.append(Token(place, len(answer.ids), float(logprobs[index])))
                        place += 1
                    answer.ids.append(int(ids[index]))
            answers.append(answer)
    return answers


def compute(
    answers: Sequence[Answer], given: Given, table: Table, update: Sequence[Answer] | None = None
) -> Found:
    """One update of a step. `update` holds its answers, if it does not train all of them."""
    count = sum(len(answer.tokens) for answer in answers)
    advantages = [0.0] * count
    targets = _fill_advantages(answers, given, table, advantages)
    kl, entropy = table.get("kl", {"kind": "none"}), table.get("entropy_coefficient", 0.0)
    counted = [answer for answer in (answers if update is None else update) if answer.tokens]
    tokens = sum(len(answer.tokens) for answer in counted)
    found = Found(advantages, 0.0, [0.0] * count, [0.0] * count, targets)
    for answer in counted:
        values, slopes = _losses(answer, given, advantages, table)
        weights = _weights(answer, given, table.get("correction", {"level": "off"}))
        share = _share(answer, tokens, len(counted), table.get("aggregation", {}))
        for token, value, slope, weight in zip(answer.tokens, values, slopes, weights, strict=True):
            at = token.place
            value, slope = value * weight, slope * weight
            if kl["kind"] == "loss":
                more, steeper = _kl(
                    given.logprobs[at] - given.reference[at], kl.get("estimator", "k3")
                )
                value += kl["coefficient"] * more
                slope += kl["coefficient"] * steeper
            value -= entropy * given.entropies[at]
            found.loss += share * value
            found.slopes[at] = share * slope
            found.entropy_slopes[at] = -share * entropy
    return found


def _fill_advantages(
    answers: Sequence[Answer], given: Given, table: Table, advantages: list[float]
) -> list[float]:
    """Fill `advantages` in place; return the critic's targets."""
    kind = table.get("advantage", {}).get("kind", "grpo")
    kl = table.get("kl", {"kind": "none"})
    fines: dict[int, float] = {}
    for answer in answers:
        for token in answer.tokens:
            fines[token.place] = 0.0
            if kl["kind"] == "reward":
                value, _ = _kl(
                    token.behaviour - given.reference[token.place], kl.get("estimator", "k1")
                )
                fines[token.place] = kl["coefficient"] * value
    net = [a.reward - sum(fines[t.place] for t in a.tokens) for a in answers]
    for index, answer in enumerate(answers):
        for number, token in enumerate(answer.tokens):
            if kind == "reinforce_plus_plus":
                value = answer.reward - sum(fines[t.place] for t in answer.tokens[number:])
            else:
                value = _against_group(kind, index, answers, net)
            advantages[token.place] = value
    if kind == "reinforce_plus_plus":
        _whiten(advantages)
    if kind == "reinforce_plus_plus_baseline":
        # Only groups that have a baseline.
        attempts = Counter(answer.group for answer in answers if not answer.branch)
        places = [t.place for a in answers if attempts[a.group] > 1 for t in a.tokens]
        whitened = [advantages[place] for place in places]
        _whiten(whitened)
        for place, value in zip(places, whitened, strict=True):
            advantages[place] = value
    return _estimate(answers, given, fines, table, advantages) if kind == "gae" else []


def _estimate(
    answers: Sequence[Answer],
    given: Given,
    fines: Mapping[int, float],
    table: Table,
    advantages: list[float],
) -> list[float]:
    """GAE written as its definition: the discounted sum of TD errors from each token on."""
    setting = table["advantage"]
    discount, trace = setting.get("discount", 1.0), setting.get("trace", 0.95)
    targets = [0.0] * len(advantages)
    for answer in answers:
        if not answer.tokens:
            continue
        values = [given.values[t.place] for t in answer.tokens]
        rewards = [-fines[t.place] for t in answer.tokens]
        rewards[-1] += answer.reward
        surprises = [
            reward + discount * after - value
            for reward, value, after in zip(rewards, values, [*values[1:], 0.0], strict=True)
        ]
        for number, token in enumerate(answer.tokens):
            advantages[token.place] = sum(
                (discount * trace) ** distance * surprise
                for distance, surprise in enumerate(surprises[number:])
            )
            targets[token.place] = advantages[token.place] + values[number]
    if setting.get("whiten", True):
        _whiten(advantages)
    return targets


def _against_group(kind: str, index: int, answers: Sequence[Answer], net: Sequence[float]) -> float:
    own = answers[index]
    siblings = [i for i, answer in enumerate(answers) if answer.group == own.group]
    attempts = [i for i in siblings if not answers[i].branch]
    if len(attempts) < 2:
        return 0.0
    if kind == "rloo":
        return net[index] - statistics.fmean(net[i] for i in attempts if i != index)
    mean = statistics.fmean(net[i] for i in attempts)
    if kind != "grpo":
        return net[index] - mean
    everyone = math.sqrt(sum((net[i] - mean) ** 2 for i in siblings) / (len(siblings) - 1))
    deviation = max(statistics.stdev(net[i] for i in attempts), everyone)
    return (net[index] - mean) / (deviation + 1e-6)


def _whiten(advantages: list[float]) -> None:
    if len(advantages) < 2:
        advantages[:] = [0.0] * len(advantages)
        return
    mean, deviation = (
        statistics.fmean(advantages),
        math.sqrt(statistics.variance(advantages) + 1e-8),
    )
    advantages[:] = [(value - mean) / deviation for value in advantages]


def _losses(
    answer: Answer, given: Given, advantages: Sequence[float], table: Table
) -> tuple[list[float], list[float]]:
    """The loss of each token, and its derivative with respect to that token's log-probability."""
    loss = table.get("loss", {"kind": "ppo_clip"})
    old = [
        given.proximal[t.place] if _decoupled(table.get("correction", {})) else t.behaviour
        for t in answer.tokens
    ]
    logs = [given.logprobs[t.place] - before for t, before in zip(answer.tokens, old, strict=True)]
    if loss["kind"] == "gspo":
        logs = [sum(logs) / len(logs)] * len(logs)
    values: list[float] = []
    slopes: list[float] = []
    for token, log in zip(answer.tokens, logs, strict=True):
        a, ratio, logprob = advantages[token.place], math.exp(log), given.logprobs[token.place]
        match loss["kind"]:
            case "ppo_clip" | "gspo":
                tight = loss["kind"] == "gspo"
                low = 1 - loss.get("clip_low", 3e-4 if tight else 0.2)
                high = 1 + loss.get("clip_high", 4e-4 if tight else 0.28)
                dual = loss.get("dual_clip", math.inf)
                if a >= 0:
                    value, slope = (-high * a, 0.0) if ratio > high else (-ratio * a, -ratio * a)
                elif ratio < low:
                    value, slope = -low * a, 0.0
                elif ratio > dual:
                    value, slope = -dual * a, 0.0
                else:
                    value, slope = -ratio * a, -ratio * a
            case "cispo":
                low, high = 1 - loss.get("clip_low", 1.0), 1 + loss.get("clip_high", 4.0)
                weight = low if ratio < low else high if ratio > high else ratio
                value, slope = -weight * a * logprob, -weight * a
            case _:
                value, slope = -a * logprob, -a
        values.append(value)
        slopes.append(slope)
    return values, slopes


def _decoupled(correction: Table) -> bool:
    if correction.get("level", "off") == "off":
        return correction.get("ratio_to") == "proximal"
    return correction["mode"] == "clip" or (
        correction["quantity"] == "ratio" and correction.get("weighted", True)
    )


def _weights(answer: Answer, given: Given, correction: Table) -> list[float]:
    logs = [given.proximal[token.place] - token.behaviour for token in answer.tokens]
    if correction["level"] == "off":
        return [1.0] * len(logs)
    whole, threshold = correction["level"] == "sequence", correction["threshold"]
    if correction["mode"] == "clip":
        if whole:
            return [min(math.prod(math.exp(log) for log in logs), threshold)] * len(logs)
        return [min(math.exp(log), threshold) for log in logs]
    if correction["quantity"] == "ratio":
        low, high = threshold
        mean = math.exp(statistics.fmean(logs))
        return [
            (math.exp(log) if correction.get("weighted", True) else 1.0)
            if low <= (mean if whole else math.exp(log)) <= high
            else 0.0
            for log in logs
        ]
    # KL of the behaviour policy to the proximal policy, at tokens of the behaviour policy.
    estimates = [_kl(-log, correction.get("estimator", "k3"))[0] for log in logs]
    mean = statistics.fmean(estimates)
    return [1.0 if (mean if whole else each) <= threshold else 0.0 for each in estimates]


def _kl(x: float, estimator: str) -> tuple[float, float]:
    """An estimate from x = log p - log q, and its slope. k1 uses k2's slope."""
    match estimator:
        case "k1":
            return x, x
        case "k2":
            return x * x / 2, x
        case _:
            return math.exp(-x) - 1 + x, 1 - math.exp(-x)


def _share(answer: Answer, tokens: int, answers: int, aggregation: Table) -> float:
    match aggregation.get("kind", "token_mean"):
        case "token_mean":
            return 1 / tokens
        case "sequence_mean":
            return 1 / (answers * len(answer.tokens))
        case _:
            return 1 / (answers * aggregation["length"])
