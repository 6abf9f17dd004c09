"""The data of a run: it can be read, and its first prompt is a task for the reward."""

from __future__ import annotations

from penstock.client.tasks import Task, read_task
from penstock.preflight.report import Report, within
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Finite
from penstock.trainer.data.tasks import build_task
from penstock.v1 import task_service_pb2
from penstock.wire import codec

DATA_SECONDS = 2.0
SLOW = ("huggingface", "reasoning_gym")
"""Sources whose libraries alone take longer to import."""


def first_task(config: TrainerConfig, report: Report) -> Task | None:
    """The task of the data's first prompt, as a worker gets it. None if it cannot be read now."""
    for name in SLOW:
        if any(getattr(part, name) is not None for part in (config.data, *config.data.mixture)):
            report.remark("data", f"{name} is read when the trainer starts, and not now")
            return None
    try:
        source = within(DATA_SECONDS, lambda: open_source(config.data, config.run.seed))
        problem = within(DATA_SECONDS, lambda: source.problem(0))
    except ConfigInvalid as error:
        report.problem("", error)
        return None
    except TimeoutError:
        report.remark(
            "data",
            f"not read within {DATA_SECONDS:g} s, so the reward was not called; the trainer waits",
        )
        return None
    task = build_task(problem, run_id=config.run.id, index=0, config=config.data)
    count = f", {source.size} prompts" if isinstance(source, Finite) else ""
    report.checked.append(f"data: {source.name}{count}")
    twin = codec.twin(task_service_pb2.Task)
    return read_task(twin.FromString(task.SerializeToString()))
