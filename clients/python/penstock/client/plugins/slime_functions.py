"""Engine-related functions that functions written for slime call, under slime's names."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import threading
import urllib.request
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from penstock.client.blocking import run_in_thread
from penstock.client.plugins import samples as types
from penstock.client.plugins.arguments import ROUTER_HOST
from penstock.client.plugins.episode import current_episode, find_episode
from penstock.client.plugins.router import RequestUnsupported
from penstock.client.plugins.samples import DynamicFilterOutput, Sample
from penstock.client.plugins.sampling import write_sampling_params
from penstock.client.plugins.tokenizers import load_tokenizer
from penstock.client.plugins.vllm_route import read_request, write_answer
from penstock.client.sampling import SamplingParams
from penstock.common.functions import find_function


class OutsideAttempt(Exception):
    """Code that belongs to no attempt sent a request to the router."""


# slime.utils.http_utils


async def post(
    url: str,
    payload: Any = None,
    max_retries: int = 60,
    action: str = "post",
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Sends a request. To the router, it becomes a turn of the caller's attempt.

    Nothing is retried here. If a request fails, the attempt fails and the server makes it again.
    """
    parts = urlsplit(url)
    if parts.hostname != ROUTER_HOST:
        data = json.dumps(payload or {}).encode()
        # Each call has its own thread, so that a service that does not answer cannot block others.
        return await run_in_thread(_fetch, url, action.upper(), data, dict(headers or {}))
    if parts.path not in ("/generate", "/inference/v1/generate"):
        raise RequestUnsupported(f"{parts.path}: the router serves only /generate")
    episode = current_episode.get()
    if episode is None:
        raise OutsideAttempt("/generate was called by code that belongs to no attempt")
    if parts.path == "/generate":
        return await episode.router.generate(payload)
    return write_answer(await episode.router.generate(read_request(payload)))


async def get(url: str) -> Any:
    if urlsplit(url).hostname == ROUTER_HOST:
        raise RequestUnsupported(f"GET {urlsplit(url).path}: the router serves no GET requests")
    return await run_in_thread(_fetch, url, "GET", None, {})


def get_rollout_num_engines(args: Namespace) -> int:
    if (count := getattr(args, "rollout_num_engines", None)) is not None:
        return int(count)
    return max(1, args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


def _fetch(url: str, method: str, data: bytes | None, headers: dict[str, str]) -> Any:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        body: bytes = answer.read()
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


# slime.utils.misc, slime.utils.async_utils, slime.utils.processing_utils


def load_function(path: str) -> Any:
    """Loads `pkg.module.function`, or a name as `penstock rollout` takes it."""
    if ":" in path:
        return find_function(path, None)
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def takes_evaluation(function: Callable[..., Any]) -> bool:
    """Whether a function's signature names `evaluation`, which it then receives by keyword."""
    try:
        return "evaluation" in inspect.signature(function).parameters
    except ValueError:
        # Some functions written in C have no signature.
        return False


class SingletonMeta(type):
    _made: ClassVar[dict[Any, Any]] = {}

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        if cls not in SingletonMeta._made:
            SingletonMeta._made[cls] = super().__call__(*arguments, **named)
        return SingletonMeta._made[cls]

    @staticmethod
    def clear_all_instances() -> None:
        SingletonMeta._made.clear()


class AsyncLoopThread:
    """An event loop in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(
            target=self.loop.run_forever, name="penstock-plugin-loop", daemon=True
        ).start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        thread = threading.get_ident()

        async def work() -> Any:
            task = asyncio.current_task()
            assert task is not None
            _RUNNERS[task] = thread
            return await coroutine

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result()


_RUNNERS: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()


def runner_of(task: asyncio.Task[Any] | None) -> int | None:
    """Identity of the thread that waits in `run` for this task."""
    return None if task is None else _RUNNERS.get(task)


@functools.cache
def get_async_loop() -> AsyncLoopThread:
    return AsyncLoopThread()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return get_async_loop().run(coroutine)


def load_processor(name: str, **options: Any) -> None:
    """Returns None, because a Penstock server takes no images."""


def build_processor_kwargs(multimodal_inputs: Any = None) -> dict[str, Any]:
    """Refuses images; only a processor needs these arguments."""
    raise RequestUnsupported("images")


def encode_image_for_rollout_engine(image: Any) -> str:
    raise RequestUnsupported("images")


# slime.rollout.sglang_rollout


class GenerateState(metaclass=SingletonMeta):
    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.processor = None
        engines = get_rollout_num_engines(args)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * engines)
        self.sampling_params = write_sampling_params(SamplingParams(), args)
        self.group_sampling_seeds = [
            args.rollout_seed + i for i in range(args.n_samples_per_prompt)
        ]
        self.dp_rank = 0
        self.reset()

    @functools.cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.args.hf_checkpoint)

    @contextmanager
    def dp_rank_context(self) -> Generator[int]:
        """Yields rank 0, because the server is the only rank."""
        yield 0

    def reset(self) -> None:
        self.remaining_batch_size = 0
        self.pendings: set[Any] = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: Sequence[list[Sample]]) -> None:
        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.create_task(work))
        self.remaining_batch_size += len(samples)


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    routers: Mapping[str, tuple[str, int]] = args.sglang_model_routers or {}
    host, port = routers.get(model_name, (args.sglang_router_ip, args.sglang_router_port))
    return f"http://{host}:{port}{endpoint}"


async def generate(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Takes one turn, from the sample's tokens or its prompt."""
    state = GenerateState(args)
    sample.tokens = list(
        sample.tokens or state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    )
    params = dict(sampling_params)
    params["max_new_tokens"] -= sample.response_length
    if params["max_new_tokens"] <= 0:
        sample.status = Sample.Status.TRUNCATED
        return sample
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    mark = current_episode.set(find_episode(sample))
    try:
        output = await post(get_model_url(args, ""), payload)
    finally:
        current_episode.reset(mark)
    meta = output["meta_info"]
    sample.append_response_tokens(
        args,
        tokens=[token for _, token, _ in meta["output_token_logprobs"]],
        log_probs=[logprob for logprob, _, _ in meta["output_token_logprobs"]],
        meta_info=meta,
        text=output["text"],
    )
    return sample


async def generate_and_rm(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Generates unless already done, and scores unless rewards compare siblings."""
    given = types.flatten(sample)
    mark = current_episode.set(find_episode(given[0]))
    try:
        # A group that was given back can hold finished samples, because of an unfinished sibling.
        if not all(each.status in types.FINISHED for each in given):
            sample = await _generate_by(args, sample, sampling_params, evaluation)
        found = types.flatten(sample)
        for each in found:
            # A sample that the function made itself need not name its attempt.
            each.session_id = each.session_id or given[0].session_id
        missing = [s for s in found if s.reward is None and s.status is not Sample.Status.ABORTED]
        if missing and not args.group_rm:
            scored = (
                await batched_async_rm(args, missing)
                if isinstance(sample, list)
                else [await async_rm(args, missing[0])]
            )
            for each, reward in zip(missing, scored, strict=True):
                each.reward = reward
    finally:
        current_episode.reset(mark)
    return cast("Any", sample)


async def _generate_by(
    args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool
) -> Any:
    function: Any = generate
    if path := sample.generate_function_path or args.custom_generate_function_path:
        function = load_function(path)
    named = {"evaluation": evaluation} if takes_evaluation(function) else {}
    return await function(args, sample, _of_its_task(args, sampling_params), **named)


def _of_its_task(args: Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Replaces values that the caller left at `GenerateState`'s defaults by those of the attempt's
    task."""
    episode = current_episode.get()
    if episode is None:
        return given
    usual = GenerateState(args).sampling_params
    left = {n: v for n, v in episode.sampling.items() if given.get(n) == usual.get(n)}
    return {**given, **left}


async def generate_and_rm_group(
    args: Namespace, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    work = [generate_and_rm(args, s, sampling_params.copy(), evaluation=evaluation) for s in group]
    done: list[Any] = [*await asyncio.gather(*work)]
    if args.group_rm:
        for sample, reward in zip(done, await batched_async_rm(args, done), strict=True):
            sample.reward = reward
    return done


# slime.rollout.rm_hub


async def _call_reward(args: Namespace, path: str | None, samples: Any, named: Any) -> Any:
    if path is None:
        raise RequestUnsupported("rm_type: give a function with --reward, or custom_rm_path")
    reward = load_function(path)(args, samples, **named)
    return await reward if inspect.isawaitable(reward) else reward


async def async_rm(args: Namespace, sample: Sample, **named: Any) -> Any:
    return await _call_reward(args, sample.custom_rm_path or args.custom_rm_path, sample, named)


async def batched_async_rm(args: Namespace, samples: Sequence[Sample], **named: Any) -> Any:
    """Makes one call, or one per sample if each names its own function."""
    if args.custom_rm_path is None:
        return await asyncio.gather(*(async_rm(args, sample, **named) for sample in samples))
    return await _call_reward(args, args.custom_rm_path, samples, named)


# slime.rollout.filter_hub, slime.rollout.base_types


def call_dynamic_filter(function: Any, args: Any, group: Sequence[Any], **named: Any) -> Any:
    if function is None:
        return DynamicFilterOutput(True)
    output = types.read_filter_output(function(args, group, **named))
    if not output.keep and not output.keep_when_insufficient:
        for sample in types.flatten(list(group)):
            if (episode := find_episode(sample)) is not None:
                episode.drop(output.reason or "FILTERED")
    return output


def should_drop_dynamic_filter_output(output: DynamicFilterOutput, **_: Any) -> bool:
    return not output.keep and not output.keep_when_insufficient


def check_reward_nonzero_std(args: Any, samples: Sequence[Any], **_: Any) -> DynamicFilterOutput:
    rewards = [float(types.flatten(sample)[0].get_reward_value(args)) for sample in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return DynamicFilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


class MetricGatherer:
    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{r}": n for r, n in self._dropped.items()}


def call_rollout_fn(function: Any, *arguments: Any, evaluation: bool, **named: Any) -> Any:
    output = function(*arguments, evaluation=evaluation, **named)
    if isinstance(output, types.RolloutFnTrainOutput | types.RolloutFnEvalOutput):
        return output
    wrap = types.RolloutFnEvalOutput if evaluation else types.RolloutFnTrainOutput
    return wrap(output)
