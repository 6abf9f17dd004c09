"""What a function written for slime holds in its hands: samples, and what it returns.

The names, the fields and what each method does to them are slime's; docs/moving.md says where they end up.
Fields are open: such functions hang attributes of their own on a sample and read them in their reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


class _Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_FINISHED = {"stop": _Status.COMPLETED, "length": _Status.TRUNCATED, "abort": _Status.ABORTED}


@dataclass
class SpecInfo:
    """Speculative decoding; the server does not tell, so it stays at zero."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Counts one answer of the engine."""
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @property
    def spec_accept_rate(self) -> float:
        """Drafted tokens that were accepted, as a part of all."""
        return self.spec_accept_token_num / max(1, self.spec_draft_token_num)

    @property
    def spec_accept_length(self) -> float:
        """Tokens for each verification."""
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def to_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(vars(self))

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> SpecInfo:
        """What `to_dict` gave."""
        return SpecInfo(**data)


@dataclass
class PrefixCacheInfo:
    """What the engine took from its cache."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Counts one answer of the engine."""
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Of the prompts' tokens, the part that was cached."""
        return self.cached_tokens / max(1, self.total_prompt_tokens)

    def to_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(vars(self))

    @staticmethod
    def from_dict(data: Mapping[str, int]) -> PrefixCacheInfo:
        """What `to_dict` gave."""
        return PrefixCacheInfo(**data)


@dataclass
class Sample:
    """One episode as its function sees it."""

    Status = _Status
    SpecInfo = SpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list[int])
    """Prompt and response."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    """Of `tokens`, the last so many are the response; the fields below are about those."""
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    """One where a token is trained; None is one everywhere."""
    weight_versions: list[str] = field(default_factory=list[str])
    rollout_log_probs: list[float] | None = None
    """To read. What is trained with is what the server recorded when it sampled."""
    rollout_routed_experts: Any = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    remove_sample: bool = False
    """Its reward counts in the baseline, and none of its tokens is trained."""
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    """The id of the attempt."""
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        """Tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or the entry `args.reward_key` of it."""
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
        """Appends what the policy wrote, or, not `trainable`, what the environment answered.

        Raises ValueError where the policy's tokens come without their log-probabilities. Lists grow in
        place: functions keep references to them.
        """
        new = [int(token) for token in tokens or ()]
        if new and trainable and log_probs is None:
            raise ValueError("tokens of the policy need their log-probabilities")
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
        """Takes the last tokens of the response back; they are not trained then."""
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
        """Notes what an answer of the engine says: the version, the cache, why it ended."""
        self.prefix_cache_info.add(meta_info)
        self.spec_info.add(meta_info)
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        finish: str = meta_info["finish_reason"]["type"]
        if update_terminal_info and finish in _FINISHED:
            self.status = _FINISHED[finish]

    def to_dict(self) -> dict[str, Any]:
        """Its fields, and the attributes that were hung on it."""
        counts = {
            "spec_info": vars(self.spec_info),
            "prefix_cache_info": vars(self.prefix_cache_info),
        }
        return {**vars(self), "status": self.status.value, **counts}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Sample:
        """A sample of what `to_dict` gave."""
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
    """Whether a group is of use."""

    keep: Any
    """A truth value, also a tensor's."""
    reason: str | None = None
    keep_when_insufficient: bool = False
    """Ignored: here there is always another group, and `groups.max_dropped_per_step` bounds how many are
    dropped."""


@dataclass
class RolloutFnTrainOutput:
    """What a whole-rollout function returns."""

    samples: list[Any]
    """Groups, each a list of samples; or samples."""
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a whole-rollout function returns for an evaluation."""

    data: dict[str, dict[str, Any]]
    """By data set: "samples", and "rewards" of theirs."""
    metrics: dict[str, Any] | None = None


def flatten(samples: Any) -> list[Sample]:
    """The samples of one, of several, or of groups, in their order. Raises TypeError."""
    if isinstance(samples, Sample):
        return [samples]
    if isinstance(samples, list | tuple):
        found: list[Sample] = []
        for each in samples:  # pyright: ignore[reportUnknownVariableType] - of the function's own.
            found += flatten(each)
        return found
    raise TypeError(f"a Sample, or a list of them, is wanted, not {type(samples).__name__}")


def read_filter_output(output: Any) -> DynamicFilterOutput:
    """What a dynamic filter returned: whether to keep the group, or an object that says so, and why.

    Raises TypeError for a bare tuple or list, which is true whatever is in it.
    """
    if isinstance(output, DynamicFilterOutput):
        return output
    if hasattr(output, "keep"):
        insufficient = bool(getattr(output, "keep_when_insufficient", False))
        return DynamicFilterOutput(output.keep, getattr(output, "reason", None), insufficient)
    if isinstance(output, tuple | list):
        raise TypeError(
            f"the filter returned {output!r}, which is true: return DynamicFilterOutput(keep, reason)"
        )
    return DynamicFilterOutput(output)
