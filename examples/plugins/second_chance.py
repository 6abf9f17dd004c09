"""An agent, its reward and a filter, written for slime; nothing here depends on Penstock.

If the policy's answer is wrong, it is asked to look again; then it is scored.
docs/guides/migrate.md runs it.
"""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    for turn in range(args.max_turns):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[pair[1] for pair in pairs],
            log_probs=[pair[0] for pair in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if sample.label in sample.response or turn + 1 == args.max_turns:
            break
        text = f"\n<|im_start|>user\n{args.second_chance}<|im_end|>\n<|im_start|>assistant\n"
        tokens = state.tokenizer.encode(text, add_special_tokens=False)
        sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
    sample.metadata["turns"] = turn + 1
    return sample


async def reward_func(args, sample: Sample, **kwargs) -> dict:
    right = float(sample.label in sample.response)
    return {"score": right / sample.metadata["turns"], "right": right}


def spread(args, samples, **kwargs) -> DynamicFilterOutput:
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) - min(rewards) > args.least
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"all_{rewards[0]:.1f}")
