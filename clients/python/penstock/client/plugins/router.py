"""The inference router that slime functions post to, backed by the trajectories of one attempt.

    post(".../generate", {"input_ids" | "text", "sampling_params"}) -> a turn -> {"text", "meta_info"}

Such a function sends its full context with each request. If the request starts with everything in one of
the attempt's trajectories, it is that trajectory's next turn, and the rest is the observation. Otherwise
it starts a separate trajectory: the attempt's own if that is not open yet, else a branch.

So the policy's tokens are never encoded again. If a function edits its context between two
requests, the edited context becomes a separate trajectory in which the earlier turns are context.

A trajectory is not extended while a turn is in flight, or after a turn was cut off. A turn that was
cut off or cancelled is never trained, however far it gets before the attempt is closed. The server
refuses a branch of an unknown trajectory, so branches wait until it knows the attempt's own.

Requests can come from other event loops and threads. Turns run on the loop that made the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np

from penstock.client.errors import InvalidRequest, NotFound
from penstock.client.plugins.claims import Written
from penstock.client.plugins.sampling import read_sampling_params
from penstock.client.turns import FinishReason

if TYPE_CHECKING:
    from penstock.client.sampling import SamplingOptions
    from penstock.client.trajectory import Trajectory
    from penstock.client.turns import Turn

Prompt: TypeAlias = "str | list[int]"

_FINISH_TYPES = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
}
# Keys of a payload that have no effect here, or request what happens anyway.
_KNOWN_KEYS = {
    *("input_ids", "text", "sampling_params", "return_logprob", "stream", "rid"),
    *("logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
}


class RequestUnsupported(Exception):
    """A request that a Penstock server cannot serve."""


class Tokenizer(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes text. Special tokens spelled out in it become special tokens, as in SGLang."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(eq=False)
class _Line:
    """A trajectory and its content, as far as this process knows it."""

    trajectory: Trajectory
    tokens: list[int] = field(default_factory=list[int])
    text: str | None = None
    """Its content as text; None if its function sends tokens."""
    turn: asyncio.Task[Turn] | None = None
    taken: bool = False
    """Whether a request uses it, so that no other can extend it now."""
    broken: bool = False
    """Whether a turn failed or was stopped. It is not extended again."""
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is settled whether the server knows the trajectory."""

    @property
    def begun(self) -> bool:
        return bool(self.trajectory.turns)


class AttemptRouter:
    def __init__(self, trajectory: Trajectory, find: Callable[[], Tokenizer | None]) -> None:
        """`trajectory` is the leased one, not open yet. `find` returns the model's tokenizer."""
        self._root = _Line(trajectory)
        self._lines = [self._root]
        self._branch_count = 0
        self._stopped = False
        self._find = find
        self._loop = asyncio.get_running_loop()

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Raises RequestUnsupported, SamplingUnsupported, PenstockError."""
        if asyncio.get_running_loop() is self._loop:
            return await self._generate(payload)
        turn = asyncio.run_coroutine_threadsafe(self._generate(payload), self._loop)
        return await asyncio.wrap_future(turn)

    def text_of(self, turn: Turn, skip_special_tokens: bool) -> str:
        """Decodes the tokens. Without a tokenizer, returns the server's text, without special tokens.

        Raises RequestUnsupported if the server's text is missing or incomplete.
        """
        message = turn.message
        is_all = (
            bool(turn.text) if message is None else not (message.reasoning or message.tool_calls)
        )
        if is_all and self._find() is None:
            return turn.text
        ids: list[int] = turn.token_ids.tolist()
        return self._tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    async def written(self) -> list[tuple[Trajectory, Written]]:
        """Returns every trajectory as the server holds it, the attempt's own first."""
        found: list[tuple[Trajectory, Written]] = []
        for line in self._lines:
            if not (line.begun or line.broken):
                continue
            try:
                record = await line.trajectory.get()
            except NotFound:
                if line.begun:
                    raise
                # Cancelled before it arrived, or refused. If the attempt's own is missing, there
                # are no branches.
                continue
            segments = record.segments
            policy = [np.full(len(s.token_ids), s.from_policy, np.bool_) for s in segments]
            tokens = [segment.token_ids for segment in segments]
            if record.parent_token_count:
                # All branches start from the attempt's own trajectory, which trains the shared tokens.
                shared = found[0][1].token_ids[: record.parent_token_count]
                tokens.insert(0, shared)
                policy.insert(0, np.zeros(len(shared), np.bool_))
            written = Written(np.concatenate(tokens), np.concatenate(policy), line.broken)
            found.append((line.trajectory, written))
        return found

    def cancel(self) -> None:
        """Stops waiting for turns in flight. Closing the attempt ends them."""
        for line in self._lines:
            if line.turn is not None:
                line.turn.cancel()

    async def stop(self) -> None:
        """Ends the turns in flight. Tasks that the function left running can start none."""
        self._stopped = True
        self.cancel()
        if turns := [line.turn for line in self._lines if line.turn is not None]:
            await asyncio.wait(turns)

    async def _generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        unknown = [key for key in payload if key not in _KNOWN_KEYS and payload[key]]
        if unknown:
            raise RequestUnsupported(f"/generate with {', '.join(sorted(unknown))}")
        if payload.get("stream"):
            raise RequestUnsupported("/generate with stream: streaming is not supported")
        given: Mapping[str, Any] = payload.get("sampling_params") or {}
        skip_special = bool(given.get("skip_special_tokens", True))
        wanted = _wanted(payload)
        options = read_sampling_params(given)
        if options is None:
            return self._answer(payload, None, "")
        line, new = await self._place(wanted)
        if self._stopped:
            line.taken = False
            raise RequestUnsupported("/generate for an attempt whose function has returned")
        try:
            line.turn = asyncio.create_task(self._take_turn(line, new, options))
            turn = await line.turn
        finally:
            line.turn, line.taken = None, False
        line.broken = turn.aborted
        tokenizer, ids = self._tokenizer(), cast("list[int]", turn.token_ids.tolist())
        text = shown = tokenizer.decode(ids, skip_special_tokens=skip_special)
        if turn.finish_reason is FinishReason.STOP and not given.get("no_stop_trim"):
            # The stop may be a special token.
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            stop = next((one for one in options.get("stop", ()) if one in whole), None)
            if stop is None:
                shown = tokenizer.decode(ids[:-1], skip_special_tokens=skip_special)
            else:
                shown = text.partition(stop)[0]
        # If the context is full, nothing is appended and nothing sampled.
        if turn.context_token_count > len(line.tokens) or not new:
            line.tokens = [*line.tokens, *new, *ids]
            line.text = wanted + text if isinstance(wanted, str) else None
        return self._answer(payload, turn, shown)

    async def _place(self, wanted: Prompt) -> tuple[_Line, list[int]]:
        """Reserves the trajectory that a request extends. Returns it with its new tokens."""
        root = self._root
        while True:
            if (line := self._extended_by(wanted)) is not None:
                known = line.text if isinstance(wanted, str) and line.text else line.tokens
                new = self._encode(wanted[len(known) :])
                line.taken = True
                return line, new
            if not (root.begun or root.taken or root.broken):
                new = self._encode(wanted)
                root.taken = True
                return root, new
            if not root.opened.is_set():
                # If the opening turn is refused, another request may take the unopened trajectory.
                await root.opened.wait()
                continue
            if root.broken and not root.begun:
                raise RequestUnsupported(
                    "the attempt's first turn failed, so it cannot take another"
                )
            new = self._encode(wanted)
            self._branch_count += 1
            name = f"{root.trajectory.trajectory_id}/{self._branch_count}"
            line = _Line(root.trajectory.branch(name), taken=True)
            self._lines.append(line)
            return line, new

    def _encode(self, prompt: Prompt) -> list[int]:
        """Encodes text as its function does, which must recognise its own tokens."""
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt, add_special_tokens=False)
        return prompt

    def _extended_by(self, wanted: Prompt) -> _Line | None:
        found: _Line | None = None
        longest = 0
        for line in self._lines:
            known = line.text if isinstance(wanted, str) else line.tokens
            if not known or line.taken or line.broken or not line.begun:
                continue
            if len(known) > longest and wanted[: len(known)] == known:
                found, longest = line, len(known)
        return found

    async def _take_turn(self, line: _Line, observation: Prompt, options: SamplingOptions) -> Turn:
        shown = np.asarray(observation, np.int32) if isinstance(observation, list) else observation
        try:
            return await line.trajectory.turn(shown, on_start=line.opened.set, **options)
        except InvalidRequest:
            # The server refused the whole request, so the trajectory is unchanged.
            line.taken = False
            if not line.begun:
                line.opened, refused = asyncio.Event(), line.opened
                refused.set()
            raise
        except BaseException:
            # Set both before the waiting requests wake up, because they check both.
            line.broken, line.taken = True, False
            raise
        finally:
            if line.begun or line.broken:
                line.opened.set()

    def _answer(self, payload: Mapping[str, Any], turn: Turn | None, text: str) -> dict[str, Any]:
        """Answers as SGLang would. Without a turn, it answers a request for zero tokens."""
        ids: list[int] = [] if turn is None else turn.token_ids.tolist()
        meta = meta_info_of(turn)
        meta["id"] = payload.get("rid") or self._root.trajectory.trajectory_id
        if payload.get("return_logprob"):
            logprobs: list[float] = [] if turn is None else turn.logprobs.tolist()
            pairs = zip(logprobs, ids, strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._find()
        if tokenizer is None:
            raise RequestUnsupported(
                "the text of an answer needs the model's tokenizer: install transformers, "
                "or set args.hf_checkpoint to the model's folder or name"
            )
        return tokenizer


def meta_info_of(turn: Turn | None) -> dict[str, Any]:
    """Returns SGLang's `meta_info`. Without a turn, it is for a request of zero tokens."""
    if turn is None:
        counts = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        return {"finish_reason": {"type": "length"}, **counts}
    meta: dict[str, Any] = {
        "finish_reason": {"type": _FINISH_TYPES[turn.finish_reason]},
        "prompt_tokens": turn.context_token_count,
        "completion_tokens": len(turn.token_ids),
        "cached_tokens": turn.cached_token_count,
    }
    if turn.segments:
        # A turn that continued under new weights has several versions. The server keeps them all;
        # this is the last.
        meta["weight_version"] = str(turn.segments[-1].weight_version)
    return meta


def _wanted(payload: Mapping[str, Any]) -> Prompt:
    ids, text = payload.get("input_ids"), payload.get("text")
    if (ids is None) == (text is None):
        raise RequestUnsupported("/generate takes either input_ids or text")
    if isinstance(text, str):
        return text
    if text is not None or not hasattr(ids, "__len__"):
        raise RequestUnsupported("/generate with a batch: a request has one prompt")
    # Elements of a tensor become integers.
    found = [getattr(token, "item", lambda token=token: token)() for token in cast("Any", ids)]
    if any(not isinstance(token, int) for token in found):
        raise RequestUnsupported("/generate with a batch: input_ids must be one list of integers")
    return found
