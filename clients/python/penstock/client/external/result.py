"""How a process ended, as a reward or as a failure.

| it ended | `exit-status` | `result-file` | a function |
|---|---|---|---|
| with status 0 | 1.0 | what the file says; without one RESULT_INVALID | what the function returns |
| with a status from 1 to 125 | 0.0 | PROCESS_FAILED | PROCESS_FAILED |
| with 126 or 127 (the shell could run nothing), or by a signal | PROCESS_FAILED | the same | the same |
| and the kernel killed something for its memory, status 0 excepted | PROCESS_MEMORY | the same | the same |
| beyond its time | PROCESS_TIMEOUT | the same | the same |
| before it began: no sandbox could be made, or no process | PROCESS_NOT_STARTED | the same | the same |
| without having taken a turn | PROCESS_TOOK_NO_TURN | the same | the same |

A `failure` in the result file counts whatever the status is and however it is rewarded. A file that does
not hold a result is RESULT_INVALID after status 0.
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
# Of the end of the output, in the message of a failure, which is bounded as a whole.
_SHOWN_CHARACTERS = 800
_KEYS = {"reward", "metrics", "metadata", "failure"}
_COULD_NOT_RUN = (126, 127)


class ProcessFailed(AttemptFailed):
    """It ended with a status that says so, or by a signal."""


class ProcessTimeout(AttemptFailed):
    """It was still running at its time limit."""


class ProcessMemory(AttemptFailed):
    """It needed more memory than it may have."""


class ProcessNotStarted(AttemptFailed):
    """The command was never run: the machine's failure, or the sandbox's."""


class ProcessTookNoTurn(AttemptFailed):
    """It ended well and asked the policy nothing: there is nothing to train."""


class ResultInvalid(AttemptFailed):
    """The result file is not there, or does not hold a result."""


def with_output(text: str, output: str) -> str:
    """A failure's message with the end of the output."""
    shown = output.strip()
    if not shown:
        return f"{text}; it wrote nothing"
    if len(shown) > _SHOWN_CHARACTERS:
        shown = "..." + shown[-_SHOWN_CHARACTERS:]
    return f"{text}; the end of its output:\n{shown}"


def reward_of_status(record: ProcessRecord) -> Outcome:
    """1.0 for status 0, 0.0 for another. Raises ProcessFailed where it says nothing of the answer."""
    if record.status is None or record.status in _COULD_NOT_RUN:
        raise ProcessFailed(with_output(record.described(), record.output))
    return Outcome(1.0 if record.status == 0 else 0.0)


def check_ended_well(record: ProcessRecord) -> None:
    """Raises ProcessFailed unless it ended with status 0."""
    if record.status != 0:
        raise ProcessFailed(with_output(record.described(), record.output))


def read_result(path: Path) -> Mapping[str, Any] | None:
    """What a result file holds; None where there is none. Raises ResultInvalid."""
    try:
        # The process may have left anything under this name: nothing is followed, or waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResultInvalid(f"the result file cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ResultInvalid("the result file is no regular file")
        if status.st_size > MAX_RESULT_BYTES:
            raise ResultInvalid(
                f"the result file has {status.st_size} bytes, at most {MAX_RESULT_BYTES} are read"
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
        raise ResultInvalid(f"the result file has {', '.join(sorted(unknown))}; known are {known}")
    return found


def failure_in(result: Mapping[str, Any]) -> Failed | None:
    """The failure that a result names. Raises ResultInvalid."""
    match result.get("failure"):
        case None:
            return None
        case str() as reason if reason:
            return Failed(reason)
        case {"reason": str() as reason, **rest} if reason and rest.keys() <= {"message"}:
            return Failed(reason, str(rest.get("message", "")))
        case other:
            raise ResultInvalid(
                f"failure is a reason, or an object of reason and message, not {other!r}"
            )


def outcome_in(result: Mapping[str, Any] | None) -> Outcome | Failed:
    """The outcome that a result holds. Raises ResultInvalid."""
    if result is None:
        raise ResultInvalid("the command ended with status 0 and wrote no result file")
    failed = failure_in(result)
    if failed is not None:
        return failed
    if "reward" not in result:
        raise ResultInvalid("the result file has neither reward nor failure")
    metrics = _table(result, "metrics")
    return Outcome(
        _number(result["reward"], "reward"),
        {name: _number(value, f"metrics.{name}") for name, value in metrics.items()},
        _table(result, "metadata"),
    )


def _table(result: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value: object = result.get(key, {})
    if not isinstance(value, dict):
        raise ResultInvalid(f"{key} in the result file is an object, not {value!r}")
    return cast("dict[str, Any]", value)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ResultInvalid(f"{what} in the result file is a number, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ResultInvalid(f"{what} in the result file is finite, not {value!r}")
    return number
