"""Converts the end of a process to a reward or a failure.

| how it ended | `exit-status` | `result-file` | a function |
|---|---|---|---|
| status 0 | 1.0 | the file's content; RESULT_INVALID without one | what the function returns |
| status from 1 to 125 | 0.0 | PROCESS_FAILED | PROCESS_FAILED |
| status 126 or 127 (the shell could run nothing), or a signal | PROCESS_FAILED | same | same |
| status other than 0, and the kernel killed a process over memory | PROCESS_MEMORY | same | same |
| time limit | PROCESS_TIMEOUT | same | same |
| before the command started: no sandbox or no process | PROCESS_NOT_STARTED | same | same |
| without taking a turn | PROCESS_TOOK_NO_TURN | same | same |

A `failure` in the result file counts whatever the exit status and the reward setting. After status
0, a file that does not hold a result is RESULT_INVALID.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.client.outcome import Failed, Outcome, ProcessRecord
from penstock.client.scoring import AttemptFailed

MAX_RESULT_BYTES = 1 << 20
# Characters of the output's end in a failure message, whose total length is bounded.
_SHOWN_CHARACTERS = 800
_KEYS = {"reward", "metrics", "metadata", "failure"}
_COULD_NOT_RUN = (126, 127)


class ProcessFailed(AttemptFailed):
    """The command ended with a status that means failure, or by a signal."""


class ProcessTimeout(AttemptFailed):
    """The process was still running at its time limit."""


class ProcessMemory(AttemptFailed):
    """The processes exceeded their memory limit."""


class ProcessNotStarted(AttemptFailed):
    """The command never ran. The machine or the sandbox failed."""


class ProcessTookNoTurn(AttemptFailed):
    """The process ended successfully but took no turn, so there is nothing to train."""


class ResultInvalid(AttemptFailed):
    """The result file is missing or does not hold a result."""


def with_output(text: str, output: str) -> str:
    shown = output.strip()
    if not shown:
        return f"{text}; it wrote nothing"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = "..." + shown[-_SHOWN_CHARACTERS:]
    return f"{text}; its output ends with:\n{shown}"


def reward_of_status(record: ProcessRecord) -> Outcome:
    """Raises ProcessFailed if the status says nothing about the answer."""
    if record.status is None or record.status in _COULD_NOT_RUN:
        raise ProcessFailed(with_output(record.described(), record.output))
    return Outcome(1.0 if record.status == 0 else 0.0)


def check_ended_well(record: ProcessRecord) -> None:
    """Raises ProcessFailed unless it ended with status 0."""
    if record.status != 0:
        raise ProcessFailed(with_output(record.described(), record.output))


def read_result(path: Path) -> Mapping[str, Any] | None:
    """Reads a result file. Returns None if it does not exist. Raises ResultInvalid."""
    try:
        # The process may have left anything under this name, so follow no link and never block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultInvalid(f"the result file cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ResultInvalid("the result file is not a regular file")
        if status.st_size > MAX_RESULT_BYTES:
            raise ResultInvalid(
                f"the result file has {status.st_size} bytes, the limit is {MAX_RESULT_BYTES}"
            )
        data = file.read()
    try:
        result: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ResultInvalid(f"the result file is not JSON: {error}") from None
    if not isinstance(result, dict):
        raise ResultInvalid(f"the result file holds a {type(result).__name__}, not an object")
    found = cast("dict[str, Any]", result)
    if unknown := found.keys() - _KEYS:
        known = ", ".join(sorted(_KEYS))
        raise ResultInvalid(
            f"the result file has unknown keys {', '.join(sorted(unknown))}; known keys: {known}"
        )
    return found


def failure_in(result: Mapping[str, Any]) -> Failed | None:
    """Returns the failure that a result reports, if any. Raises ResultInvalid."""
    match result.get("failure"):
        case None:
            return None
        case str() as reason if reason:
            return Failed(reason)
        case {"reason": str() as reason, **rest} if reason and rest.keys() <= {"message"}:
            return Failed(reason, str(rest.get("message", "")))
        case other:
            raise ResultInvalid(
                f"failure must be a reason, or an object with reason and message, got {other!r}"
            )


def outcome_in(result: Mapping[str, Any] | None) -> Outcome:
    """Reads a result that reports no failure. Raises ResultInvalid."""
    if result is None:
        raise ResultInvalid("the command ended with status 0 but wrote no result file")
    if "reward" not in result:
        raise ResultInvalid("the result file holds neither reward nor failure")
    metrics = _table(result, "metrics")
    return Outcome(
        _number(result["reward"], "reward"),
        {name: _number(value, f"metrics.{name}") for name, value in metrics.items()},
        _table(result, "metadata"),
    )


def _table(result: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value: object = result.get(key, {})
    if not isinstance(value, dict):
        raise ResultInvalid(f"{key} in the result file must be an object, got {value!r}")
    return cast("dict[str, Any]", value)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ResultInvalid(f"{what} in the result file must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ResultInvalid(f"{what} in the result file must be finite, got {value!r}")
    return number
