"""Functions written the way users write them for slime: their imports, accesses and return values
are typical.

Imported only by name, after `penstock.client.plugins.modules.install`.
"""

from __future__ import annotations

import asyncio
import random
from argparse import Namespace
from copy import deepcopy

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
)
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

SHOUT = 33  # The byte "!".


async def vime(args, sample, sampling_params):
    """As in vime: tokens in and out, with vLLM's names."""
    from vime.rollout.vllm_rollout import GenerateState, _build_inference_sampling_params
    from vime.utils.http_utils import post

    url = f"http://{args.vllm_router_ip}:{args.vllm_router_port}/inference/v1/generate"
    sample.tokens = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    for observation in ([SHOUT], []):
        payload = {
            "model": args.hf_checkpoint,
            "token_ids": sample.tokens,
            "sampling_params": _build_inference_sampling_params(sampling_params),
        }
        choice = (await post(url, payload))["choices"][0]
        sample.append_response_tokens(
            args,
            tokens=choice["token_ids"],
            log_probs=[item["logprob"] for item in choice["logprobs"]["content"]],
            meta_info={"finish_reason": {"type": choice["finish_reason"]}},
        )
        sample.append_response_tokens(args, tokens=observation, trainable=False)
    return sample


def url_of(args):
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """One turn with tokens."""
    state = GenerateState(args)
    assert sample.status == Sample.Status.PENDING
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {
        "input_ids": prompt_ids,
        "sampling_params": sampling_params,
        "return_logprob": True,
    }
    output = await post(url_of(args), payload)
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.tokens = prompt_ids + [item[1] for item in pairs]
    sample.rollout_log_probs = [item[0] for item in pairs]
    sample.response_length = len(pairs)
    sample.response = output["text"]
    sample.update_from_meta_info(args, output["meta_info"])
    return sample


async def tools(args, sample: Sample, sampling_params) -> Sample:
    """Turns with a tool between them. The tokens grow, the tool's tokens are
    masked, and the budget shrinks."""
    assert not args.partial_rollout
    sample.loss_mask = []
    sample.rollout_log_probs = None
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response_ids: list[int] = []
    masks = sample.loss_mask
    for turn in range(args.max_turns):
        left = args.rollout_max_context_len - len(prompt_ids) - len(response_ids)
        if left <= 0:
            sample.status = Sample.Status.TRUNCATED
            break
        params = dict(sampling_params)
        params["max_new_tokens"] = min(params["max_new_tokens"], left)
        payload = {
            "input_ids": prompt_ids + response_ids,
            "sampling_params": params,
            "return_logprob": True,
        }
        output = await post(url_of(args), payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        pairs = output["meta_info"]["output_token_logprobs"]
        new = [item[1] for item in pairs]
        response_ids += new
        sample.append_response_tokens(
            args,
            tokens=new,
            log_probs=[item[0] for item in pairs],
            trainable=True,
            meta_info=output["meta_info"],
        )
        observation = f"<tool {turn}: {state.tokenizer.decode(new)[:2]}>"
        ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response_ids += ids
        sample.append_response_tokens(args, tokens=ids, trainable=False)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = state.tokenizer.decode(response_ids)
    sample.loss_mask = masks
    sample.tool_turns = turn + 1
    return sample


async def search(args, sample: Sample, sampling_params) -> Sample:
    """Turns with text: each request sends the whole text so far as one string."""
    state = GenerateState(args)
    prompt, response = f"<|im_start|>{sample.prompt}<|im_end|>", ""
    prompt_ids = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids, logprobs, mask = [], [], []
    for _ in range(2):
        payload = {
            "text": prompt + response,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url_of(args), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        ids.extend(item[1] for item in pairs)
        logprobs.extend(float(item[0]) for item in pairs)
        mask.extend([1] * len(pairs))
        response += output["text"]
        found = "\n<information>nothing</information>\n"
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        ids.extend(found_ids)
        logprobs.extend([0.0] * len(found_ids))
        mask.extend([0] * len(found_ids))
        response += found
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.rollout_log_probs = logprobs
    sample.status = Sample.Status.COMPLETED
    return sample


async def solve(args, key):
    sample = deepcopy(args.sample)
    ids = args.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    payload = {
        "input_ids": ids,
        "sampling_params": deepcopy(args.sampling_params),
        "return_logprob": True,
    }
    output = await post(url_of(args), payload)
    new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
    sample.tokens = ids + new
    sample.response_length += len(new)
    sample.response = output["text"]
    sample.status = Sample.Status.COMPLETED
    args.results[key].append(sample)


async def solvers(args: Namespace, sample: Sample, sampling_params, evaluation=False):
    """Several concurrent agents on the same prompt; each makes a separate sample."""
    args.sampling_params = sampling_params
    args.tokenizer = GenerateState(args).tokenizer
    args = deepcopy(args)
    args.sample, args.results = sample, {"solver": []}
    await asyncio.gather(*(solve(args, "solver") for _ in range(args.num_parallel)))
    found = args.results["solver"]
    for index, each in enumerate(found):
        each.rollout_id = sample.index
        each.reward = float(index)
    random.shuffle(found)
    return found


async def turns(args, sample: Sample, sampling_params):
    """One sample per turn; its prompt contains the previous turns."""
    tokens = GenerateState(args).tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    found = []
    for _ in range(3):
        part = deepcopy(sample)
        part.tokens = list(tokens)
        payload = {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url_of(args), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        part.append_response_tokens(
            args,
            tokens=[item[1] for item in pairs],
            log_probs=[item[0] for item in pairs],
            meta_info=output["meta_info"],
        )
        part.reward = 0.5
        found.append(part)
        tokens = [*part.tokens, SHOUT]
    return found


async def cuts(args, sample: Sample, sampling_params) -> Sample:
    """Change the answer as text and encode it again."""
    sample = await generate(args, sample, sampling_params)
    text = "".join(reversed(sample.response))
    ids = GenerateState(args).tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = sample.tokens[: -sample.response_length]
    sample.tokens, sample.response_length = prompt + ids, len(ids)
    return sample


async def strips(args, sample: Sample, sampling_params) -> Sample:
    """Remove the last tokens of the answer."""
    sample = await generate(args, sample, sampling_params)
    sample.strip_last_output_tokens(2, GenerateState(args).tokenizer)
    return sample


async def unmasked(args, sample: Sample, sampling_params) -> Sample:
    """Train the tool's tokens too."""
    sample = await tools(args, sample, sampling_params)
    sample.loss_mask = [1] * sample.response_length
    return sample


async def removed(args, sample: Sample, sampling_params) -> Sample:
    """Exclude the sample from training."""
    sample = await generate(args, sample, sampling_params)
    sample.remove_sample = True
    return sample


async def fresh(args, sample: Sample, sampling_params) -> Sample:
    """Return a new sample, numbered by its row."""
    made = await generate(args, sample, sampling_params)
    row = int(sample.label)
    return Sample(
        index=row,
        prompt=made.prompt,
        tokens=made.tokens,
        response=made.response,
        response_length=made.response_length,
        rollout_log_probs=made.rollout_log_probs,
        status=Sample.Status.COMPLETED,
    )


async def unscored(args: Namespace, sample: Sample, sampling_params):
    """Leave scoring to the reward function."""
    found = await solvers(args, sample, sampling_params)
    for each in found:
        each.reward = None
    return found


async def gives_up(args, sample: Sample, sampling_params) -> Sample:
    """Report an aborted sample."""
    sample = await generate(args, sample, sampling_params)
    sample.status = Sample.Status.ABORTED
    return sample


async def breaks(args, sample: Sample, sampling_params) -> Sample:
    """Fail while another of the function's requests is in flight."""
    waiting = asyncio.ensure_future(solve_slowly(args, sample, sampling_params))
    await generate(args, sample, sampling_params)
    assert not waiting.done()
    raise ConnectionError("the sandbox is away")


async def solve_slowly(args, sample, sampling_params):
    params = {**sampling_params, "max_new_tokens": 400, "ignore_eos": True}
    payload = {"text": sample.prompt, "sampling_params": params}
    return await post(url_of(args), payload)


async def penalized(args, sample: Sample, sampling_params) -> Sample:
    """Ask for a penalty that the server does not support."""
    return await generate(args, sample, {**sampling_params, "repetition_penalty": 1.2})


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    return {"score": len(sample.response) + 0.5, "turns": getattr(sample, "tool_turns", 1)}


async def notes(args, sample: Sample, sampling_params) -> Sample:
    """One turn, with the metadata that the filter `noted` reads."""
    sample = await generate(args, sample, sampling_params)
    sample.metadata["calls"] = {"count": sample.response_length, "names": ["search"]}
    if getattr(args, "keeps_handle", False):
        sample.metadata["handle"] = object()
    return sample


async def told(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    """Record whether the call is an evaluation."""
    sample = await generate(args, sample, sampling_params)
    sample.metadata["evaluation"] = evaluation
    return sample


async def told_always(args, sample: Sample, sampling_params, evaluation) -> Sample:
    return await told(args, sample, sampling_params, evaluation)


async def told_by_name(args, sample: Sample, sampling_params, *, evaluation) -> Sample:
    return await told(args, sample, sampling_params, evaluation)


def told_reward(args, sample, **kwargs):
    told = float(sample.metadata["evaluation"])
    return {"score": 1.0, "acc": 0.25, "evaluation": told}


def table_reward(args, sample, **kwargs):
    return {"score": 1.0, "acc": 0.25}


def length_reward(args, sample, **kwargs):
    return float(sample.response_length)


async def batched_reward(args, samples, **kwargs):
    return [float(index) for index, _ in enumerate(samples)]


def only_even(args, samples, **kwargs):
    odd = [s.index for s in samples if s.index % 2]
    return DynamicFilterOutput(keep=len(odd) < len(samples), reason="ALL_ODD")


def high_enough(args, samples, **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = sum(rewards) / len(rewards) >= args.least
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"mean_{sum(rewards):.1f}")


def dropped(*said):
    return DynamicFilterOutput(keep=False, reason=" ".join(map(str, said)))


def statuses_and_tables(args, samples, **kwargs):
    statuses = [sample.status.value for sample in samples]
    parts = [sample.reward["acc"] for sample in samples]
    return dropped(*statuses, *parts, *(sample.get_reward_value(args) for sample in samples))


def rows(args, samples, **kwargs):
    first = deepcopy(samples[0])
    source = first.metadata["source"] if first.label else None
    length = args.rollout_max_response_len
    return dropped(first.prompt, first.label, source, first.group_index, first.index, length)


def noted(args, samples, **kwargs):
    said = samples[0].metadata
    return dropped(said["calls"]["count"], *said["calls"]["names"], said.get("failed", "none"))


def texts(args, samples, **kwargs):
    return dropped(*(sample.response for sample in samples))


def lengths(args, samples, **kwargs):
    return dropped([s.response_length for s in samples], [s.loss_mask for s in samples])


def shape(args, samples, **kwargs):
    return dropped(
        [[s.reward for s in own] if isinstance(own, list) else own.reward for own in samples]
    )


async def filter_async(args, samples):
    return True


def filter_says_nothing(args, samples):
    pass


def second_group(args, samples, **kwargs):
    return samples[0].group_index == 1


async def whole_async(args, rollout_id, data_source):
    state, metrics = GenerateState(args), MetricGatherer()
    data = []
    while len(data) < args.rollout_batch_size:
        (group,) = data_source.get_samples(1)
        if args.gives_back and rollout_id == 0 and group[0].group_index == 0 and not data:
            data_source.add_samples([group])
            args.gives_back = False
            continue
        done = await generate_and_rm_group(args, group, state.sampling_params.copy())
        output = call_dynamic_filter(second_group if args.filtered else None, args, done)
        if not output.keep:
            metrics.on_dynamic_filter_drop(reason=output.reason)
            continue
        data.append(done)
    return RolloutFnTrainOutput(samples=data, metrics=metrics.collect())


def whole(args, rollout_id, data_source, evaluation=False):
    """Make whole batches of groups."""
    assert not evaluation
    return run(whole_async(args, rollout_id, data_source))


def greedy(args, rollout_id, data_source, evaluation=False):
    """Ask for more groups than the server can have."""
    return data_source.get_samples(1000)


def whole_by_coroutine(args, rollout_id, data_source, evaluation=False):
    """A plain function that returns a coroutine."""
    return whole_async(args, rollout_id, data_source)


def decorated(function):
    """A plain wrapper, as users write them for logging."""

    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


@decorated
async def decorated_reward(args, sample, **kwargs):
    return args.rollout_temperature


@decorated
async def decorated_generate(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)


async def echo(args, sample, sampling_params):
    """Append the call's `n` to the response, so that a test sees which samples
    were generated, and how often."""
    sample.response += str(sampling_params["n"])
    sample.status = (
        Sample.Status.ABORTED if sample.index == args.aborts else Sample.Status.COMPLETED
    )
    return sample


async def by_length(args, sample, **kwargs):
    return len(sample.response)


def filter_with_tuple(args, samples, **kwargs):
    return False, "easy"


class Verdict:
    keep, reason = False, "own"


def filter_with_own_object(args, samples, **kwargs):
    return Verdict()


async def best_async(args, data_source):
    state = GenerateState(args)
    (group,) = data_source.get_samples(1)
    done = await generate_and_rm_group(args, group, state.sampling_params.copy())
    return [[done[-1]]]


def best(args, rollout_id, data_source, evaluation=False):
    """Return one sample of each group."""
    return run(best_async(args, data_source))


async def says_otherwise(args, sample, sampling_params):
    """Report COMPLETED whatever the turn's end, and set a reward function for one sample."""
    sample = await generate(args, sample, sampling_params)
    sample.status = Sample.Status.COMPLETED
    sample.custom_rm_path = f"{__name__}.seven"
    return sample


def seven(args, sample, **kwargs):
    return 7.0


def decoded(args, sample: Sample, **kwargs):
    """Whether the response is exactly the policy's tokens as text."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    return float(sample.response == GenerateState(args).tokenizer.decode(tokens) != "")


async def limits(args, sample: Sample, sampling_params) -> Sample:
    """Check that the limits in `args` equal those in the sampling parameters."""
    assert args.rollout_temperature == sampling_params["temperature"] == 0.5
    assert args.rollout_max_response_len == sampling_params["max_new_tokens"]
    assert GenerateState(args).sampling_params["temperature"] == 0.5
    return await generate(args, sample, sampling_params)


async def shows_length(args, sample: Sample, sampling_params) -> Sample:
    assert args.rollout_temperature == 1.0
    sample.reward = {"score": float(args.rollout_max_response_len)}
    return await generate(args, sample, sampling_params)


async def shows_temperature(args, sample: Sample, sampling_params) -> Sample:
    sample.reward = {"score": sampling_params["temperature"]}
    return await generate(args, sample, sampling_params)


async def ask(args, tokens, sampling_params, **fields):
    payload = {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url_of(args), {**payload, **fields})
    return output["text"], [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]


async def asks_again(args, sample: Sample, sampling_params) -> Sample:
    """Take a second turn, discard it, and take it again with another observation."""
    tokens = list(sample.prompt.encode())
    _, first = await ask(args, tokens, sampling_params)
    await ask(args, [*tokens, *first, SHOUT], sampling_params)
    observation = [SHOUT, SHOUT]
    _, second = await ask(args, [*tokens, *first, *observation], sampling_params)
    sample.tokens = tokens
    sample.append_response_tokens(args, tokens=first, log_probs=[0.0] * len(first))
    sample.append_response_tokens(args, tokens=observation, trainable=False)
    sample.append_response_tokens(args, tokens=second, log_probs=[0.0] * len(second))
    return sample


async def changes_form(args, sample: Sample, sampling_params) -> Sample:
    """One turn with text, then one with tokens."""
    tokens = list(sample.prompt.encode())
    text = {"text": sample.prompt, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(url_of(args), text)
    first = [token for _, token, _ in output["meta_info"]["output_token_logprobs"]]
    _, second = await ask(args, [*tokens, *first, SHOUT], sampling_params)
    sample.tokens = tokens
    sample.append_response_tokens(args, tokens=first, log_probs=[0.0] * len(first))
    sample.append_response_tokens(args, tokens=[SHOUT], trainable=False)
    sample.append_response_tokens(args, tokens=second, log_probs=[0.0] * len(second))
    return sample


async def too_long_first(args, sample: Sample, sampling_params) -> Sample:
    """Send two concurrent requests; the server refuses the first."""
    tokens = list(sample.prompt.encode())
    long = [SHOUT] * (args.rollout_max_context_len + 1)
    refused, (_, found) = await asyncio.gather(
        ask(args, long, sampling_params),
        ask(args, tokens, sampling_params),
        return_exceptions=True,
    )
    assert isinstance(refused, Exception)
    sample.tokens = tokens
    sample.append_response_tokens(args, tokens=found, log_probs=[0.0] * len(found))
    return sample


async def stops(args, sample: Sample, sampling_params) -> Sample:
    """Sample the same answer with a stop string, trimmed from the text and not."""
    tokens = list(sample.prompt.encode())
    text, found = await ask(args, tokens, sampling_params)
    stop = text[3]
    place = text.index(stop)
    given = {**sampling_params, "stop": [stop], "no_stop_trim": False}
    cut, cut_tokens = await ask(args, tokens, given)
    whole, whole_tokens = await ask(args, tokens, {**given, "no_stop_trim": True})
    assert cut == text[:place] and whole == text[: place + 1], (text, cut, whole)
    assert cut_tokens == whole_tokens == found[: len(cut_tokens)]
    sample.tokens = tokens
    sample.append_response_tokens(args, tokens=found, log_probs=[0.0] * len(found))
    return sample


async def ends_otherwise(args, sample: Sample, sampling_params):
    """Return two samples marked as completed, although the second was cut off by its budget."""
    tokens, found = list(sample.prompt.encode()), []
    for params in ({**sampling_params, "stop": [args.stop]}, sampling_params):
        part = deepcopy(sample)
        part.tokens, part.reward, part.status = [*tokens, SHOUT], 1.0, Sample.Status.COMPLETED
        _, new = await ask(args, part.tokens, params)
        part.append_response_tokens(args, tokens=new, log_probs=[0.0] * len(new))
        found.append(part)
    return found
