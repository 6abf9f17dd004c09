"""Whole-rollout functions written the way users write them for slime: how they take, drop and
return groups.

Imported only by name, after `penstock.client.plugins.modules.install`.
"""

from __future__ import annotations

import asyncio
import queue
import threading

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm_group
from slime.utils.async_utils import get_async_loop, run


def keep_late(args, samples, **kwargs):
    keep = samples[0].group_index >= args.first_kept
    return DynamicFilterOutput(keep=keep, reason=None if keep else "zero_std")


def length_reward(args, sample, **kwargs):
    return float(sample.response_length)


async def slow_second(args, sample, sampling_params):
    """The second prompt takes longer than the finished first group is allowed to wait."""
    if sample.group_index == 1:
        await asyncio.sleep(1.5)
    return await generate(args, sample, sampling_params)


async def one_by_one_async(args, data_source):
    state, metrics, data = GenerateState(args), MetricGatherer(), []
    while len(data) < args.rollout_batch_size:
        (group,) = data_source.get_samples(1)
        done = await generate_and_rm_group(args, group, state.sampling_params.copy())
        output = call_dynamic_filter(keep_late, args, done)
        if not output.keep:
            metrics.on_dynamic_filter_drop(reason=output.reason)
            continue
        data.append(done)
    return RolloutFnTrainOutput(samples=data, metrics=metrics.collect())


def one_by_one(args, rollout_id, data_source, evaluation=False):
    """Take the next group after the previous one was dropped or finished."""
    return run(one_by_one_async(args, data_source))


async def over_sampling_async(args, data_source):
    state, data = GenerateState(args), []
    while len(data) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            samples = data_source.get_samples(args.over_sampling_batch_size)
            state.submit_generate_tasks(samples)
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            output = call_dynamic_filter(keep_late, args, group)
            if should_drop_dynamic_filter_output(
                output, remaining_batch_size=state.remaining_batch_size
            ):
                state.remaining_batch_size -= 1
                continue
            data.append(group)
    state.reset()
    return data


def over_sampling(args, rollout_id, data_source, evaluation=False):
    """Request another batch whenever groups are missing, while other
    groups are still in progress."""
    return run(over_sampling_async(args, data_source))


class Background:
    """Keeps taking and generating groups between the calls."""

    one = None

    def __init__(self, args, data_source):
        self.args, self.data_source = args, data_source
        self.made = queue.Queue()
        self.errors = []
        self.running = True
        self.ended = threading.Event()

    async def work(self):
        try:
            await self._work()
        finally:
            self.ended.set()

    async def _work(self):
        state, active = GenerateState(self.args), set()
        while self.running:
            try:
                active -= {task for task in active if task.done()}
                while len(active) < self.args.rollout_batch_size:
                    groups = self.data_source.get_samples(1)
                    if not groups and self.args.takes_nothing:
                        break
                    for group in groups:
                        params = state.sampling_params.copy()
                        work = generate_and_rm_group(self.args, group, params)
                        task = asyncio.create_task(work)
                        task.add_done_callback(lambda task: self.made.put(task.result()))
                        active.add(task)
            except Exception as error:
                self.errors.append(error)
            await asyncio.sleep(0.2)


async def collect(args, background):
    data = []
    while len(data) < args.rollout_batch_size:
        try:
            data.append(background.made.get_nowait())
        except queue.Empty:
            await asyncio.sleep(0.01)
    return data


def fully_async(args, rollout_id, data_source, evaluation=False):
    """Like slime's example of that name: its own loop, or slime's, always has groups in flight."""
    if Background.one is None:
        Background.one = background = Background(args, data_source)
        if args.shares_loop:
            asyncio.run_coroutine_threadsafe(background.work(), get_async_loop().loop)
        else:
            threading.Thread(target=lambda: asyncio.run(background.work()), daemon=True).start()
    return run(collect(args, Background.one))
