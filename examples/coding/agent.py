"""A coding agent: writes a function, runs the tests, and tries again with the tests' feedback.

It uses the `openai` package and knows nothing about training: OPENAI_BASE_URL points to the model.
`penstock rollout --command` runs one agent process per attempt, each in its own folder, and in a sandbox if
the machine has one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from judge import Verdict, judge
from openai import BadRequestError, OpenAI
from reaper import adopt_descendants, end_descendants

TURNS = int(os.environ.get("CODING_TURNS", "3"))
RETRY = "Write the whole function again, corrected, between ```python and ```."

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def main() -> None:
    """Runs one attempt: reads the task from its file, and writes the reward to the result file."""
    adopt_descendants()
    file = Path(os.environ["PENSTOCK_TASK_FILE"])
    task = json.loads(file.read_text())
    # The file contains the tests, and the policy's code could read it.
    file.unlink()
    result = solve(OpenAI(), os.environ["PENSTOCK_MODEL"], task, Path.cwd())
    Path(os.environ["PENSTOCK_RESULT_FILE"]).write_text(json.dumps(result))


def solve(client: OpenAI, model: str, task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Takes turns until the tests pass; returns the reward of the last solution, and its parts."""
    problem, messages = task["metadata"], list(task["messages"])
    verdict, turns, errors = Verdict(), 0, 0
    while turns < TURNS:
        try:
            answer = client.chat.completions.create(model=model, messages=messages).choices[0]
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            # The feedback no longer fits into the context; the last verdict counts.
            break
        content = answer.message.content or ""
        if not content and answer.finish_reason == "length":
            # The context has no room for an answer.
            break
        turns += 1
        verdict = judge(problem, extract_code(content), folder)
        # Otherwise leftover processes could overwrite the result file later.
        end_descendants()
        errors += bool(verdict.error)
        if verdict.solved:
            break
        feedback = f"{verdict.feedback(problem['entry_point'])}\n{RETRY}"
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": feedback},
        ]
    return {
        "reward": verdict.reward,
        "metrics": {
            "turns": turns,
            "tool_errors": errors,
            "parses": float(verdict.parses),
            "defines": float(verdict.defines),
            "checks_passed": verdict.share,
            "solved": float(verdict.solved),
        },
        "metadata": {"problem": problem["task_id"]},
    }


def extract_code(text: str) -> str:
    """The first fenced block, even if it was never closed; else everything from the first line of code."""
    fenced = _FENCED.search(text)
    if fenced:
        return fenced[1]
    code = re.search(r"^(?:def|from|import|class) ", text, re.MULTILINE)
    return text[code.start() :] if code else ""


if __name__ == "__main__":
    main()
