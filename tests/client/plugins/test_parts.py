"""The adapter's parts separately: claims, samples, modules, filters, the command line."""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.__main__ import main
from penstock.client import InvalidRequest, Message, SamplingParams, Task, ToolCall
from penstock.client.plugins import group_filter, modules
from penstock.client.plugins.arguments import make_arguments, read_arguments
from penstock.client.plugins.claims import (
    Claim,
    LossMaskInvalid,
    SamplesShareTokens,
    TokensDiffer,
    TokensNotSampled,
    Written,
    claim_of,
    settle,
)
from penstock.client.plugins.group_filter import Delivered
from penstock.client.plugins.rewards import RewardMissing, score_of
from penstock.client.plugins.router import AttemptRouter, RequestUnsupported
from penstock.client.plugins.samples import Sample, flatten
from penstock.client.plugins.sampling import (
    SamplingUnsupported,
    read_sampling_params,
    write_sampling_params,
)
from penstock.client.plugins.slime_functions import (
    OutsideAttempt,
    generate_and_rm_group,
    get_model_url,
    post,
)
from penstock.client.plugins.told_metadata import MOST_BYTES, told_metadata
from penstock.client.scoring import BadFunction
from penstock.client.tasks import write_task
from penstock.client.turns import FinishReason, SegmentView, Turn
from penstock.client.values import from_struct
from penstock.trainer.batching.batching import read_group
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.gather.group_policies import load_filter, reason_to_drop
from penstock.v1 import trajectory_pb2
from penstock.wire.agent_marks import METADATA as METADATA_MARK
from penstock.wire.agent_marks import UNWANTED, metadata_is_whole
from tests.support.tiny_model import make_byte_tokenizer
from tests.support.trainer_walk import Outcome, delivery


def written(*tokens: int) -> Written:
    """Negative tokens come from the policy."""
    return Written(np.abs(tokens).astype(np.int32), np.array(tokens) < 0)


def claim(*tokens: int, reward: float | None = 1.0) -> Claim:
    """Negative tokens are to be trained."""
    return Claim(np.abs(tokens).astype(np.int32), np.array(tokens) < 0, reward)


def untrained(claims: list[Claim], *trajectories: Written) -> list[list[int]]:
    return [np.flatnonzero(t.untrained).tolist() for t in settle(claims, trajectories)]


# Claims


@pytest.mark.parametrize(
    ("claims", "trajectories", "left"),
    [
        ([claim(1, -2, -3)], [written(1, -2, -3)], [[]]),
        # Tool tokens after the end; a trajectory that continues; a mask within a turn.
        ([claim(1, -2, -3, 9, 9)], [written(1, -2, -3)], [[]]),
        ([claim(1, -2)], [written(1, -2, -3, 4, -5)], [[2, 4]]),
        ([claim(1, 2, -3, 4, -5)], [written(1, -2, -3, 4, -5)], [[1]]),
        # The claim matches no trajectory, so nothing is trained.
        ([claim(7, 8)], [written(1, -2)], [[1]]),
        # One claim for each turn.
        ([claim(1, -2), claim(1, 2, 3, -4)], [written(1, -2, 3, -4)], [[]]),
        # Two trajectories with a common prefix, in either order; and one that no claim wants.
        ([claim(1, -2), claim(1, -2, 3, -4)], [written(1, -2), written(1, -2, 3, -4)], [[], []]),
        ([claim(1, -2, 3, -4), claim(1, -2)], [written(1, -2, 3, -4), written(1, -2)], [[], []]),
        ([claim(1, -5)], [written(1, -2), written(1, -5)], [[1], []]),
        # A claim that fits the whole of another's trajectory too: each still gets its own, in
        # either order.
        ([claim(1, 2, -3), claim(1, -2, -3)], [written(1, -2, -3), written(1, 2, -3)], [[], []]),
        ([claim(1, -2, -3), claim(1, 2, -3)], [written(1, -2, -3), written(1, 2, -3)], [[], []]),
        (
            [claim(1, 2, -3, reward=0.0), claim(1, -2, reward=1.0), claim(1, 2, -3, reward=1.0)],
            [written(1, -2, -3), written(1, -2, -3)],
            [[1], []],
        ),
        # Two identical trajectories: each claim gets one.
        ([claim(1, -2), claim(1, -2)], [written(1, -2), written(1, -2)], [[], []]),
        # A branch keeps its own part. The shared part is trained where it was sampled, or another
        # claim has it.
        ([claim(1, -2, 3, -4)], [written(1, -2, 5, -6), written(1, 2, 3, -4)], [[3], []]),
        (
            [claim(1, 2, 3, -4), claim(1, -2, reward=0.0)],
            [written(1, -2, 5, -6), written(1, 2, 3, -4)],
            [[3], []],
        ),
        # The parent need not be the first trajectory, and there may be several.
        (
            [claim(1, -2, 3, -4)],
            [written(9, -8), written(1, -2, 5, -6), written(1, 2, 3, -4)],
            [[1], [3], []],
        ),
        (
            [claim(1, -2, 3, -4, 5, -6)],
            [written(1, -2), written(1, 2, 3, -4), written(1, 2, 3, 4, 5, -6)],
            [[], [], []],
        ),
        # The whole claim is shared: the first trajectory gets it, whichever branches leave from there.
        ([claim(1, -2)], [written(1, -2, 5, -6), written(1, 2, 3, -4)], [[3], [3]]),
    ],
)
def test_each_claim_finds_its_trajectory(
    claims: list[Claim], trajectories: list[Written], left: list[list[int]]
) -> None:
    assert untrained(claims, *trajectories) == left


@pytest.mark.parametrize(
    ("claims", "trajectories", "error"),
    [
        ([claim(1, -3)], [written(1, -2)], TokensDiffer),
        ([claim(2, -2)], [written(1, -2)], TokensDiffer),
        ([claim(1, -2)], [], TokensDiffer),
        ([claim(1, -2, -9)], [written(1, -2)], TokensNotSampled),
        ([claim(-1, -2)], [written(1, -2)], TokensNotSampled),
        ([claim(1, -2), claim(1, -2)], [written(1, -2)], SamplesShareTokens),
        (
            [claim(1, -2, 3, -4), claim(1, -2)],
            [written(1, -2, 5, -6), written(1, 2, 3, -4)],
            SamplesShareTokens,
        ),
        (
            [claim(1, -2, 3, -4), claim(1, 2, 5, -6, reward=0.0)],
            [written(1, -2, 5, -6), written(1, 2, 3, -4)],
            SamplesShareTokens,
        ),
        ([claim(1, -2, -3, -4)], [written(1, -2, 5), written(1, 2, 3, -4)], TokensNotSampled),
        (
            [claim(1, -2, reward=0.0), claim(1, 2, 3, -4, reward=1.0)],
            [written(1, -2, 3, -4)],
            SamplesShareTokens,
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    claims: list[Claim], trajectories: list[Written], error: type[Exception]
) -> None:
    with pytest.raises(error):
        settle(claims, trajectories)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_trained_is_what_was_claimed(data: st.DataObject) -> None:
    trajectories: list[Written] = []
    claims: list[Claim] = []
    for name in range(data.draw(st.integers(1, 4))):
        policy = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
        # Each trajectory begins with a distinct token.
        tokens = np.array([100 + name, *data.draw(st.lists(st.integers(0, 2), min_size=12))][:13])
        own = Written(tokens[: len(policy) + 1].astype(np.int32), np.array([False, *policy]))
        trajectories.append(own)
        wanted = own.from_policy & np.array(
            [False, *data.draw(st.lists(st.booleans(), min_size=12, max_size=12))][
                : len(policy) + 1
            ]
        )
        claims.append(Claim(own.token_ids, wanted, 0.0))
    settled = settle(claims, trajectories)
    for own, wanted, part in zip(trajectories, claims, settled, strict=True):
        assert (own.from_policy & ~part.untrained).tolist() == wanted.trained.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_length": 4},
        {"response_length": -1},
        {"response_length": 2, "loss_mask": [1]},
        {"response_length": 2, "loss_mask": [1, 2]},
    ],
)
def test_a_mask_has_to_fit_the_response(fields: dict[str, Any]) -> None:
    with pytest.raises(LossMaskInvalid):
        claim_of(Sample(tokens=[1, 2, 3], **fields), 1.0)


# Samples, sampling, arguments


def test_a_sample_survives_its_dictionary() -> None:
    sample = Sample(prompt="p", tokens=[1, 2], response_length=1, status=Sample.Status.TRUNCATED)
    sample.mine = 3  # type: ignore[attr-defined]
    again = Sample.from_dict(sample.to_dict())
    assert again == sample
    assert again.mine == 3  # type: ignore[attr-defined]


def test_appending_keeps_the_lists_that_a_function_holds() -> None:
    sample = Sample(tokens=[1], loss_mask=[])
    mask = sample.loss_mask
    sample.append_response_tokens(tokens=[2], log_probs=[-1.0])
    sample.append_response_tokens(tokens=[3, 4], trainable=False, text="x")
    assert mask == [1, 0, 0]
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 3, 4], 3, "x")
    assert sample.rollout_log_probs == [-1.0, 0.0, 0.0]
    assert sample.effective_response_length == 1
    with pytest.raises(ValueError, match="log-probabilities"):
        sample.append_response_tokens(tokens=[5])


def test_only_samples_are_samples() -> None:
    assert len(flatten([[Sample()], Sample()])) == 2
    with pytest.raises(TypeError):
        flatten("text")


def test_sampling_goes_to_the_function_and_back() -> None:
    args = make_arguments({}, model="m", max_context_length=64)
    given_ = SamplingParams(temperature=0.5, top_k=3, max_tokens=7, stop=("x",), seed=4)
    options = read_sampling_params(write_sampling_params(given_, args))
    assert options == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 3,
        "max_tokens": 7,
        "stop": ("x",),
        "stop_token_ids": (),
        "ignore_eos": False,
        "seed": 4,
    }
    open_ = write_sampling_params(SamplingParams(), args)
    assert (open_["max_new_tokens"], open_["top_k"], open_["temperature"]) == (64, -1, 1.0)
    assert read_sampling_params({"max_new_tokens": 0}) is None
    assert read_sampling_params({"min_p": 0.0, "n": 1, "stop": "y"}) is not None
    for name, value in {"min_p": 0.1, "n": 2, "json_schema": "{}", "presence_penalty": 1}.items():
        with pytest.raises(SamplingUnsupported, match=name):
            read_sampling_params({name: value})


def test_arguments_are_one_toml_table(tmp_path: Path) -> None:
    path = tmp_path / "args.toml"
    path.write_text("max_turns = 3\nrollout_max_context_len = 9\n[search]\nk = 1\n")
    args = make_arguments(read_arguments(path), model="m", max_context_length=64)
    assert (args.max_turns, args.rollout_max_context_len, args.search) == (3, 9, {"k": 1})
    assert (args.hf_checkpoint, args.partial_rollout) == ("m", False)
    path.write_text("no toml")
    with pytest.raises(BadFunction, match="TOML"):
        read_arguments(path)
    with pytest.raises(BadFunction):
        read_arguments(tmp_path / "absent.toml")


def test_a_table_is_a_reward_and_metrics() -> None:
    outcome = score_of({"acc": 1.0, "length": 7, "note": "x", "bad": float("nan")}, "acc")
    assert (outcome.reward, dict(outcome.metrics)) == (1.0, {"length": 7.0})
    table = {"score": np.float32(1), "acc": np.float32(0.5), "n": np.int64(2), "ok": np.bool_(True)}
    outcome = score_of({**table, "one": torch.tensor(4.0), "several": np.zeros(2), "no": "7"})
    assert (outcome.reward, dict(outcome.metrics)) == (
        1.0,
        {"acc": 0.5, "n": 2.0, "ok": 1.0, "one": 4.0},
    )
    for value in (None, {"acc": 1.0}, {"score": None}):
        with pytest.raises(RewardMissing):
            score_of(value)


# The router


def router_of(turn: Callable[..., Any], tokenizer: Any = None) -> AttemptRouter:
    """A router over one trajectory and its branches. `turn(trajectory, tokens)` makes their turns."""

    def trajectory(name: str) -> Any:
        own: Any = Namespace(trajectory_id=name, turns=[], branch=trajectory)

        def take(tokens: Any, *, on_start: Callable[[], None], **sampling: Any) -> Any:
            own.on_start = on_start
            return turn(own, tokens)

        own.turn = take
        return own

    return AttemptRouter(trajectory("a"), lambda: tokenizer)


async def test_a_branch_waits_until_one_of_those_after_a_refused_request_is_open() -> None:
    refuses, begun, opens = asyncio.Event(), asyncio.Event(), asyncio.Event()
    known: list[str] = []

    async def turn(trajectory: Any, tokens: Any) -> Turn:
        if len(tokens) > 1:
            # By now the other requests are waiting.
            refuses.set()
            raise InvalidRequest("too long")
        begun.set()
        if trajectory.trajectory_id == "a":
            await opens.wait()
        elif not known:
            raise InvalidRequest("a branch of what is not known")
        known.append(trajectory.trajectory_id)
        trajectory.on_start()
        trajectory.turns.append(Turn(0, (), FinishReason.LENGTH))
        return trajectory.turns[-1]

    router = router_of(turn, make_byte_tokenizer())
    asked = [asyncio.create_task(router.generate({"input_ids": ids})) for ids in ([1, 2], [3], [4])]
    await refuses.wait()
    await asyncio.wait_for(begun.wait(), 10)
    opens.set()
    refused, *found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
    assert isinstance(refused, InvalidRequest)
    assert [type(one) for one in found] == [dict, dict]
    assert known == ["a", "a/1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "ab</code"),
        ({"no_stop_trim": True}, "ab</code>\n<|im_end|>"),
        ({"no_stop_trim": True, "skip_special_tokens": True}, "ab</code>\n"),
        # The first stop string in the list that occurs, not the first to occur in the text.
        ({"stop": ["none", "code>", "</code>"]}, "ab</"),
        ({"stop": "</code>"}, "ab"),
        ({"stop": "<|im_end|>"}, "ab</code>\n"),
    ],
)
async def test_the_text_ends_where_sglangs_does(given: dict[str, Any], text: str) -> None:
    tokenizer = make_byte_tokenizer()
    special = given.get("stop") == "<|im_end|>" or given.get("no_stop_trim")
    ids = tokenizer.encode("ab</code>" + ("\n<|im_end|>" if special else ""))

    async def turn(trajectory: Any, tokens: Any) -> Turn:
        segment = SegmentView(np.array(ids, np.int32), np.zeros(len(ids), np.float32), 0, 0, 1.0)
        trajectory.turns.append(Turn(0, (segment,), FinishReason.STOP))
        return trajectory.turns[-1]

    params = {"skip_special_tokens": False, **given}
    answer = await router_of(turn, tokenizer).generate(
        {"input_ids": [1], "sampling_params": params}
    )
    assert answer["text"] == text
    assert answer["output_ids"] == ids


@pytest.mark.parametrize(
    ("text", "message", "found"),
    [
        ("yes", None, "yes"),
        ("yes", Message("assistant", "yes"), "yes"),
        ("", Message("assistant", ""), ""),
        ("", None, None),
        ("yes", Message("assistant", "yes", reasoning="why"), None),
        ("yes", Message("assistant", "yes", (ToolCall("1", "f", "{}"),)), None),
    ],
)
async def test_without_a_tokenizer_a_turns_text_is_the_servers_where_that_is_all_of_it(
    text: str, message: Message | None, found: str | None
) -> None:
    router = router_of(lambda *_: None)
    turn = Turn(0, (), FinishReason.STOP, text, message)
    if found is not None:
        assert router.text_of(turn, False) == found
        return
    with pytest.raises(RequestUnsupported, match="install transformers"):
        router.text_of(turn, False)


# Requests to other addresses


async def test_a_request_elsewhere_is_an_ordinary_one() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = b'{"score": 1, "got": ' + await reader.readexactly(length) + b"}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as judge:
        port = judge.sockets[0].getsockname()[1]
        args = make_arguments(
            {"sglang_model_routers": {"judge": ["127.0.0.1", port]}},
            model="m",
            max_context_length=8,
        )
        found = await post(get_model_url(args, "judge", "/score"), {"text": "a"})
    assert found == {"score": 1, "got": {"text": "a"}}
    router = get_model_url(args, "", "")
    with pytest.raises(RequestUnsupported, match="/v1/chat/completions"):
        await post(f"{router}/v1/chat/completions", {})
    with pytest.raises(OutsideAttempt):
        await post(f"{router}/generate", {"text": "a"})


def test_a_judge_that_does_not_answer_keeps_nobody_from_another() -> None:
    done = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await done.wait()
        writer.close()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n7")
        await writer.drain()
        writer.close()

    async def ask_both() -> Any:
        async with (
            await asyncio.start_server(silent, "127.0.0.1", 0) as first,
            await asyncio.start_server(answer, "127.0.0.1", 0) as second,
        ):
            hung, well = (
                f"http://127.0.0.1:{s.sockets[0].getsockname()[1]}" for s in (first, second)
            )
            # More than a thread pool would serve at once.
            asked = [asyncio.create_task(post(hung, {})) for _ in range(40)]
            found = await asyncio.wait_for(post(well, {}), 20)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            done.set()
            return found

    assert asyncio.run(asyncio.wait_for(ask_both(), 30)) == 7


# Modules


def test_what_is_installed_of_slime_is_found_below_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("vime", "vime/utils", "vime/rollout", "vime/rollout/rm_hub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "vime/rollout/rm_hub/grader.py").write_text("def grade(x): return x + 1\n")
    (tmp_path / "vime/utils/http_utils.py").write_text("raise RuntimeError('the real one')\n")
    (tmp_path / "vime/utils/mask.py").write_text("MINE = 7\n")
    for name in [n for n in sys.modules if n.partition(".")[0] == "vime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    modules.install()
    modules.install()
    assert importlib.import_module("vime.rollout.rm_hub.grader").grade(1) == 2
    assert importlib.import_module("vime.utils.mask").MINE == 7
    assert importlib.import_module("vime.utils.http_utils").post is post
    assert importlib.import_module("vime.utils.types").Sample is Sample
    for name in [n for n in sys.modules if n.partition(".")[0] == "vime"]:
        monkeypatch.delitem(sys.modules, name)


def test_what_an_installed_module_has_beside_ours_is_its_own_and_calls_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("vime", "vime/utils", "vime/rollout", "vime/rollout/rm_hub"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    written = {
        "utils/http_utils.py": "async def post(): pass\ndef is_port_available(port): return post\n",
        "utils/types.py": "from __future__ import annotations\n"
        "from dataclasses import dataclass\nclass Sample: pass\n"
        "@dataclass\nclass ParamInfo:\n    size: int\ndef blank(): return Sample()\n",
        "rollout/vllm_rollout.py": "from vime.utils.http_utils import is_port_available, post\n"
        "from ..utils.types import ParamInfo, Sample\n"
        "def abort(): return post, Sample, ParamInfo(3).size\n",
        "rollout/rm_hub/__init__.py": "raise ImportError('what it needs is not installed')\n",
        "rollout/rm_hub/grader.py": "def grade(x): return x + 1\n",
    }
    for name, text in written.items():
        (tmp_path / "vime" / name).write_text(text)
    for name in [n for n in sys.modules if n.partition(".")[0] == "vime"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    modules.install()
    found: dict[str, Any] = {}
    exec(
        "from vime.rollout.vllm_rollout import abort, generate\n"
        "from vime.utils.http_utils import is_port_available, get_rollout_num_engines\n"
        "from vime.utils.types import ParamInfo, blank\n"
        "from vime.rollout.rm_hub import grader, async_rm\n",
        found,
    )
    assert found["abort"]() == (post, Sample, 3)
    assert found["is_port_available"](1) is post
    assert isinstance(found["blank"](), Sample)
    assert found["generate"] is modules.own.generate
    assert found["grader"].grade(1) == 2
    with pytest.raises(ImportError, match="what it needs"):
        exec("from vime.rollout.rm_hub import remote_rm", found)
    with pytest.raises(ImportError, match="nobody_has_it"):
        exec("from vime.utils.types import nobody_has_it", found)
    for name in [n for n in sys.modules if n.partition(".")[0] == "vime"]:
        monkeypatch.delitem(sys.modules, name)


def test_what_is_there_without_the_package() -> None:
    modules.install()
    found: dict[str, Any] = {}
    exec(
        "from slime.utils.http_utils import get_rollout_num_engines\n"
        "from slime.utils.types import RolloutBatch\n"
        "from slime.utils.async_utils import get_async_loop, run\n",
        found,
    )
    args = make_arguments({"rollout_num_gpus": 8}, model="m", max_context_length=8)
    assert found["get_rollout_num_engines"](args) == 8
    args.rollout_num_engines = 3
    assert found["get_rollout_num_engines"](args) == 3
    with pytest.raises(ImportError, match="generate_rollout"):
        exec("from slime.rollout.sglang_rollout import generate_rollout", found)


def test_what_nobody_has_is_missing_as_ever() -> None:
    modules.install()
    with pytest.raises(ModuleNotFoundError, match="math_dapo_utils"):
        importlib.import_module("slime.rollout.rm_hub.math_dapo_utils")


# The trainer's filters


def deliver(*rewards: float, unwanted: str = "") -> Any:
    sent = delivery(0).group
    for trajectory, reward in zip(sent.trajectories, rewards, strict=True):
        trajectory.outcome.CopyFrom(Outcome(reward=reward))
        if unwanted:
            trajectory.outcome.metadata.update({UNWANTED: unwanted})
    return sent


def reason_of(sent: Any, task: Any = None, **groups: Any) -> str | None:
    """Why a trainer with these settings, and `sent`'s task, drops the group. None if it keeps it."""
    config = TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {
                "reasoning_gym": {"name": "chain_sum"},
                "group_size": 2,
                "sampling": {"max_tokens": 7},
            },
            "groups": groups,
        }
    )
    read = read_group(sent, trainer_version=0, max_lag=0)
    own = load_filter(config)
    reason = reason_to_drop(read, config.groups)
    return own(read, Delivered(sent, task)) if reason is None and own is not None else reason


def filtered(sent: Any, function: str, task: Any = None, **options: Any) -> str | None:
    """The reason that a filter of `tests/support/slime_plugins.py` gives for dropping a group."""
    named = {
        "function": f"tests.support.slime_plugins:{function}",
        "style": "slime",
        "options": options,
    }
    return reason_of(sent, task, filter=named)


def test_a_filter_of_slimes_gives_reasons() -> None:
    options = {"least": 0.5, "reward_key": "score"}
    assert filtered(deliver(1.0, 0.0), "high_enough", **options) is None
    assert filtered(deliver(0.25, 0.0), "high_enough", **options) == "FILTER:mean_0.2"


def test_slimes_own_filter_is_there_without_slime() -> None:
    name = "slime.rollout.filter_hub.dynamic_sampling_filters:check_reward_nonzero_std"
    named = {"function": name, "style": "slime"}
    assert reason_of(deliver(1.0, 0.0), filter=named) is None
    assert reason_of(deliver(1.0, 1.0), filter=named) == "FILTER:zero_std_1.0"


def test_a_filter_sees_why_answers_ended_and_what_their_rewards_were_made_of() -> None:
    sent = deliver(1.0, 0.0)
    sent.trajectories[0].finish_reason = trajectory_pb2.FINISH_REASON_LENGTH
    sent.trajectories[1].finish_reason = trajectory_pb2.FINISH_REASON_STOP
    for trajectory in sent.trajectories:
        trajectory.outcome.metrics["acc"] = 0.25
    found = filtered(sent, "statuses_and_tables", reward_key="score")
    assert found == "FILTER:truncated completed 0.25 0.25 1.0 0.0"
    # Without `reward_key` the reward is a number, which the function cannot index.
    with pytest.raises(ConfigInvalid, match="not subscriptable"):
        filtered(sent, "statuses_and_tables")


def test_a_filter_sees_the_task_as_a_worker_does() -> None:
    row = {"label": "4", "source": "sums"}
    asked = (Message("user", "2 + 2?"),)
    task = write_task(Task("r/3", asked, row, group_size=2, index=3))
    assert filtered(deliver(1.0, 0.0), "rows", task) == "FILTER:2 + 2? 4 sums 3 6 7"
    task = write_task(
        Task("r/3", (Message("user", "2 + 2?"),), {"answer": "4"}, group_size=2, index=3)
    )
    with pytest.raises(ConfigInvalid, match=r"no 'label', only answer: set label_key"):
        filtered(deliver(1.0, 0.0), "rows", task)
    with pytest.raises(ConfigInvalid, match=r"sample.metadata has no 'source'"):
        filtered(deliver(1.0, 0.0), "rows", task, label_key="answer")
    with pytest.raises(ConfigInvalid, match="belongs to no task of this run"):
        filtered(deliver(1.0, 0.0), "rows")


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False,
    allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
METADATA = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@settings(max_examples=200, deadline=None)
@given(METADATA, METADATA)
def test_what_a_function_wrote_into_metadata_is_told(
    before: dict[str, Any], written: dict[str, Any]
) -> None:
    sent = Outcome(reward=1.0)
    sent.metadata.update(told_metadata(before, {**before, **written}))
    assert metadata_is_whole(sent.metadata)
    arrived = from_struct(sent.metadata)
    del arrived[METADATA_MARK]
    assert {**before, **arrived} == {**before, **written}
    # Unchanged values are not sent.
    assert all(key in written for key in arrived)


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ({"row": 1, "handle": object(), "n": 2}, {"n": 2}),
        ({"row": 1, "big": 2**60 + 1}, {}),
        ({"row": 1, "text": "a" * MOST_BYTES, "n": 2}, {"n": 2}),
        ({"row": 1, "deep": nested(20), "n": 2}, {"n": 2}),
        ({"row": 1, "deep": nested(50_000), "n": 2}, {"n": 2}),
        ({"row": 1, "nan": float("nan")}, {}),
        ({"row": 1, 7: "seven"}, {}),
        ({"row": 1, "penstock.untrained": [[0, 9]]}, {}),
        ({"n": 2}, {"n": 2}),
        (None, {}),
    ],
    ids=[
        "no JSON",
        "inexact",
        "too large",
        "deep",
        "too deep for JSON",
        "no number",
        "no text",
        "ours",
        "removed",
        "none",
    ],
)
def test_what_cannot_be_told_is_not_and_there_is_no_mark(after: Any, told: Any) -> None:
    assert told_metadata({"row": 1}, after) == told


def test_arrays_are_told_as_lists() -> None:
    after = {"scores": np.arange(3), "mean": np.float32(0.5)}
    assert told_metadata({}, after) == {
        "scores": [0, 1, 2], "mean": 0.5, METADATA_MARK: "whole",
    }  # fmt: skip


def test_a_filter_sees_what_a_function_wrote_into_metadata() -> None:
    task = write_task(Task("r/3", (Message("user", "2 + 2?"),), {"row": 1}, group_size=2))
    sent = deliver(1.0, 0.0)
    calls = {"calls": {"count": 3, "names": ["search"]}}
    for trajectory in sent.trajectories:
        trajectory.outcome.metadata.update(told_metadata({}, calls))
    # The metadata is whole, so a key that is missing from it never existed.
    assert filtered(sent, "noted", task) == "FILTER:3 search none"
    for trajectory in sent.trajectories:
        trajectory.outcome.metadata.Clear()
        trajectory.outcome.metadata.update(told_metadata({"failed": 1}, calls))
    with pytest.raises(ConfigInvalid, match=r"sample.metadata has no 'failed'.* 64 KiB"):
        filtered(sent, "noted", task)


def test_a_filter_reads_the_answers_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Spelling:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return f"{token_ids} {skip_special_tokens}"

    monkeypatch.setattr(group_filter, "load_tokenizer", {"none": Spelling()}.__getitem__)
    assert filtered(deliver(1.0, 0.0), "texts") == "FILTER:[3] False [4] False"


def test_what_the_function_made_several_of_is_nested_in_a_group() -> None:
    sent = deliver(1.0, 0.0)
    for number, untrained in enumerate(([], [[2, 3]])):
        branch = sent.trajectories.add()
        branch.CopyFrom(sent.trajectories[1])
        branch.trajectory_id = f"b{number}"
        branch.parent_trajectory_id = sent.trajectories[1].trajectory_id
        branch.outcome.CopyFrom(Outcome(reward=0.5))
        branch.outcome.metadata.update({"penstock.untrained": untrained})
    # The last branch is a request that belongs to no sample.
    assert filtered(sent, "shape") == "FILTER:[[1.0], [0.0, 0.5]]"
    # A single sample made with several requests is not a list either.
    del sent.trajectories[2]
    assert filtered(sent, "shape") == "FILTER:[1.0, 0.0]"


def test_a_samples_response_is_what_the_policy_wrote_however_old_it_is() -> None:
    sent = deliver(1.0, 0.0)
    read = read_group(sent, trainer_version=9, max_lag=0)
    assert not any(sample.trained.any() for sample in read.samples)
    config = {"function": "tests.support.slime_plugins:lengths", "style": "slime"}
    named = TrainerConfig.model_validate(
        {
            "model": {"path": "none"},
            "data": {"reasoning_gym": {"name": "chain_sum"}},
            "groups": {"filter": config},
        }
    )
    own = load_filter(named)
    assert own is not None
    assert own(read, Delivered(sent, None)) == "FILTER:[1, 1] [[1], [1]]"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("filter_async", "plain function"),
        ("filter_says_nothing", "returned None"),
        ("filter_with_tuple", "which is truthy: return DynamicFilterOutput"),
    ],
)
def test_a_filter_whose_answer_says_nothing_is_refused(function: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        filtered(deliver(1.0, 0.0), function)


def test_an_object_that_says_keep_and_reason_is_an_answer() -> None:
    assert filtered(deliver(1.0, 0.0), "filter_with_own_object") == "FILTER:own"


@pytest.mark.parametrize(
    "name", ["tests.support.slime_plugins:echo", "tests/support/slime_plugins.py:echo"]
)
async def test_what_was_finished_is_not_made_again_with_its_group(name: str) -> None:
    modules.install()
    given = {
        "custom_generate_function_path": name,
        "custom_rm_path": name.replace("echo", "by_length"),
        "aborts": 1,
    }
    args = make_arguments(given, model="m", max_context_length=64)
    group = [Sample(index=index) for index in range(3)]
    first = await generate_and_rm_group(args, group, {"n": 1})
    assert [(s.response, s.reward) for s in first] == [("1", 1), ("1", None), ("1", 1)]
    args.aborts = None
    first[2].reward = None
    again = await generate_and_rm_group(args, first, {"n": 2})
    assert [(s.response, s.reward) for s in again] == [("1", 1), ("12", 2), ("1", 1)]


def test_what_the_engine_counted_has_its_ratios() -> None:
    spec = Sample.SpecInfo(3, 4, 2, 5)
    assert (spec.spec_accept_rate, spec.spec_accept_length) == (0.75, 2.5)
    assert Sample.SpecInfo.from_dict(spec.to_dict()) == spec
    cache = Sample.PrefixCacheInfo(3, 4)
    assert cache.prefix_cache_hit_rate == 0.75
    assert Sample.PrefixCacheInfo.from_dict(cache.to_dict()) == cache
    nothing = Sample()
    assert nothing.spec_info.spec_accept_rate == nothing.spec_info.spec_accept_length == 0.0
    assert nothing.prefix_cache_info.prefix_cache_hit_rate == 0.0


def test_what_agents_call_unwanted_is_dropped_with_their_reason() -> None:
    assert reason_of(deliver(1.0, 0.0, unwanted="EASY")) == "AGENT:EASY"


# The command line


WHOLE = "--style", "slime", "--rollout-function", "tests.support.slime_rollouts:none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--style", "verl"), "requires --reward"),
        (("--style", "trl", "--reward", "json:dumps", "--generate", "json:dumps"), "--generate"),
        (("--style", "verl", "--reward", "json:dumps"), "called with (data_source"),
        (("--style", "slime", "--generate", "json:nothing"), "has no nothing"),
        (("--style", "slime", "--group-reward"), "--group-reward"),
        (("--style", "trl", "--reward", "a:b", "--rollout-function", "a:b"), "--style slime"),
        (("--style", "slime", "--rollout-function", "json:loads"), "called with (args"),
        (("--rollout-function", "json:loads"), "require --style"),
        ((*WHOLE, "--purpose", "eval"), "cannot be combined with --purpose eval"),
        ((*WHOLE, "--attempt-timeout", "5"), "cannot be combined with --attempt-timeout"),
    ],
)
def test_a_style_that_does_not_fit_ends_the_worker_with_2(
    options: tuple[str, ...], message: str
) -> None:
    shown = CliRunner().invoke(main, ["rollout", "--server", "127.0.0.1:1", *options])
    assert shown.exit_code == 2
    assert message in shown.output


def test_plain_arguments_can_be_copied() -> None:
    args = make_arguments({"a": [1]}, model="m", max_context_length=8)
    assert isinstance(args, Namespace)
    args.eval_datasets.append(1)
    assert make_arguments({}, model="m", max_context_length=8).eval_datasets == []
