"""Data types that functions written for slime use: samples, and what they return.

The names, the fields and the effects of the methods are slime's; docs/guides/migrate.md lists where they
end up. Fields are open: such functions set extra attributes on a sample and read them in their reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Self


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


FINISHED = (_Status.COMPLETED, _Status.TRUNCATED)
_BY_FINISH_REASON = {
    "stop": _Status.COMPLETED,
    "length": _Status.TRUNCATED,
    "abort": _Status.ABORTED,
}


@dataclass
class _Counts:
    def to_dict(self) -> dict[str, int]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> Self:
        return cls(**data)


@dataclass
class SpecInfo(_Counts):
    """Speculative decoding counts. The server does not report them, so they stay zero."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @property
    def spec_accept_rate(self) -> float:
        """Fraction of drafted tokens that were accepted."""
        return self.spec_accept_token_num / max(1, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens per verification step."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo(_Counts):
    """Prompt tokens that the engine took from its prefix cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.total_prompt_tokens)


@dataclass
class Sample:
    Status = _Status
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list[int])
    """Prompt and response tokens."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    """Number of response tokens at the end of `tokens`. The fields below refer to these."""
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    """1 for a trained token; None trains every token."""
    weight_versions: list[str] = field(default_factory=list[str])
    rollout_log_probs: list[float] | None = None
    """Read-only. Training uses the log-probabilities that the server recorded while sampling."""
    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    remove_sample: bool = False
    """If set, the reward counts in the baseline, but no token is trained."""
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    """The trajectory id of the attempt."""
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens that the policy wrote, or, if not `trainable`, the environment's answer.

        Raises ValueError if policy tokens come without log-probabilities. Lists grow in place,
        because functions keep references to them.
        """
        new = [int(token) for token in tokens or ()]
        if new and trainable and log_probs is None:
            raise ValueError("policy tokens need log-probabilities")
        if log_probs is not None and len(log_probs) != len(new):
            raise ValueError(f"{len(new)} tokens with {len(log_probs)} log-probabilities")
        written = [float(p) for p in log_probs or ()] if trainable else [0.0] * len(new)
        if new:
            before = self.response_length
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            if self.rollout_log_probs is None:
                self.rollout_log_probs = [0.0] * before
            self.tokens += new
            self.loss_mask += [int(trainable)] * len(new)
            self.rollout_log_probs += written
            self.response_length += len(new)
        if text is not None:
            self.response += text
        if meta_info is not None:
            self.update_from_meta_info(args, meta_info, update_terminal_info)

    def strip_last_output_tokens(self, count: int, tokenizer: Any) -> None:
        """Removes the last tokens of the response, so that they are not trained."""
        if count <= 0:
            return
        self.tokens = self.tokens[:-count]
        self.response_length -= count
        for name in ("loss_mask", "rollout_log_probs"):
            if (values := getattr(self, name)) is not None:
                setattr(self, name, values[:-count])
        response = self.tokens[len(self.tokens) - self.response_length :]
        self.response = tokenizer.decode(response)

    def update_from_meta_info(
        self, args: Any, meta_info: Mapping[str, Any], update_terminal_info: bool = True
    ) -> None:
        self.prefix_cache_info.add(meta_info)
        self.spec_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        finish: str = meta_info["finish_reason"]["type"]
        if update_terminal_info:
            self.status = _BY_FINISH_REASON.get(finish, self.status)

    def to_dict(self) -> dict[str, Any]:
        """Returns its fields, including extra attributes set on it."""
        counts = {
            "spec_info": vars(self.spec_info),
            "prefix_cache_info": vars(self.prefix_cache_info),
        }
        return {**vars(self), "status": self.status.value, **counts}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        values = dict(data)
        values["status"] = _Status(values.get("status", "pending"))
        values["spec_info"] = SpecInfo(**values.get("spec_info", {}))
        values["prefix_cache_info"] = PrefixCacheInfo(**values.get("prefix_cache_info", {}))
        own = {entry.name for entry in fields(Sample)}
        sample = Sample(**{name: value for name, value in values.items() if name in own})
        for name, value in values.items():
            if name not in own:
                setattr(sample, name, value)
        return sample


@dataclass
class DynamicFilterOutput:
    keep: Any
    """Truth value; can be a tensor."""
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Ignored, because another group always follows. `groups.max_dropped_per_step` bounds how many
    are dropped."""


@dataclass
class RolloutFnTrainOutput:
    samples: list[Any]
    """A list of groups, each a list of samples, or a flat list of samples."""
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    """Per data set: "samples" and their "rewards"."""
    metrics: dict[str, Any] | None = None


def flatten(samples: Any) -> list[Sample]:
    """Returns the samples in a sample, a list or nested groups, in order. Raises TypeError."""
    if isinstance(samples, Sample):
        return [samples]
    if isinstance(samples, list | tuple):
        found: list[Sample] = []
        for each in samples:  # pyright: ignore[reportUnknownVariableType] - of the function's own.
            found += flatten(each)
        return found
    raise TypeError(f"expected a Sample or a list of Samples, got {type(samples).__name__}")


def read_filter_output(output: Any) -> DynamicFilterOutput:
    """Reads a truth value, or an object with `keep` and `reason`.

    Raises TypeError for a bare tuple or list, because it is truthy whatever it contains.
    """
    if isinstance(output, DynamicFilterOutput):
        return output
    if hasattr(output, "keep"):
        insufficient = bool(getattr(output, "keep_when_insufficient", False))
        return DynamicFilterOutput(output.keep, getattr(output, "reason", None), insufficient)
    if isinstance(output, tuple | list):
        raise TypeError(
            f"the filter returned {output!r}, which is truthy: return DynamicFilterOutput(keep, reason)"
        )
    return DynamicFilterOutput(output)
