"""Rows in the shapes of other systems, without a conversion: each has its prompt, and `answer`."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from google.protobuf import json_format

from penstock.trainer.config.data import ColumnsConfig, DataConfig, RowsConfig, SamplingConfig
from penstock.trainer.config.data_options import parse_columns, source_of
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.problem import Problem
from penstock.trainer.data.sources.rows import read_problem
from penstock.trainer.data.tasks import describe_problem

USER = {"role": "user", "content": "6 times 7?"}
ASKED = (("user", "6 times 7?"),)
WORKED = "6 times 7 is <<6*7=42>>42.\n#### 42"


def read(row: object, **columns: str) -> Problem:
    return read_problem(row, RowsConfig(columns=ColumnsConfig(**columns)), "set", "here")


@pytest.mark.parametrize(
    ("row", "metadata"),
    [
        # TRL
        ({"prompt": "6 times 7?", "answer": "42"}, {"answer": "42"}),
        ({"prompt": [USER], "solution": "42"}, {"answer": "42", "solution": "42"}),
        ({"prompt": [USER], "ground_truth": "42"}, {"answer": "42", "ground_truth": "42"}),
        # OpenAI
        ({"messages": [USER, {"role": "assistant", "content": "42"}]}, {"answer": "42"}),
        (
            {"messages": [USER, {"role": "assistant", "content": "It is 42"}], "answer": 42},
            {"answer": 42},
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "6 times 7?"}]}]},
            {},
        ),
        # slime
        (
            {"prompt": "6 times 7?", "label": "42", "metadata": {"level": 1}},
            {"answer": "42", "label": "42", "metadata": {"level": 1}},
        ),
        # GSM8K
        ({"question": "6 times 7?", "answer": WORKED}, {"answer": "42", "solution": WORKED}),
        ({"question": "6 times 7?", "answer": "#### 1,042"}, {"answer": "1042", "solution": "#### 1,042"}),
        ({"question": "6 times 7?", "answer": "a #### b"}, {"answer": "a #### b"}),
        # MATH, whose level and type remain
        (
            {"problem": "6 times 7?", "solution": r"\boxed{42}", "level": "1"},
            {"answer": r"\boxed{42}", "solution": r"\boxed{42}", "level": "1"},
        ),
        # A table has every column in every row
        (
            {"messages": None, "prompt": "6 times 7?", "answer": None, "label": 42},
            {"answer": 42, "label": 42},
        ),
        # What pandas makes of a list
        ({"prompt": np.array([USER]), "answer": "42"}, {"answer": "42"}),
    ],
)  # fmt: skip
def test_a_row_is_read_as_it_is(row: dict[str, Any], metadata: dict[str, Any]) -> None:
    texts = [row.get(name) for name in ("messages", "prompt", "question", "problem")]
    is_text = isinstance(next(value for value in texts if value is not None), str)
    assert read(row) == Problem(ASKED, metadata, "set", text_prompt=is_text)


WEATHER = {
    "name": "weather",
    "description": "Today's weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
OF_OPENAI = [{"type": "function", "function": WEATHER}]


@pytest.mark.parametrize(
    "tools",
    [
        OF_OPENAI,
        [WEATHER],
        json.dumps(OF_OPENAI),
        np.array(OF_OPENAI),
        # What a table makes of it: a field of every row in each, and schemas as text.
        [{"type": "function", "function": {**WEATHER, "strict": None}}],
        [{**WEATHER, "parameters": json.dumps(WEATHER["parameters"])}],
        [{**WEATHER, "parameters": {**WEATHER["parameters"], "required": None}}],
    ],
)
def test_a_column_of_tools_is_the_tasks_tools(tools: object) -> None:
    problem = read({"messages": [USER], "tools": tools, "answer": "42"})
    assert problem.metadata == {"answer": "42"}
    task = describe_problem(problem, "Be brief.", SamplingConfig())
    (tool,) = task.conversation.tools
    assert (tool.name, tool.description) == ("weather", "Today's weather.")
    assert json_format.MessageToDict(tool.parameters) == WEATHER["parameters"]


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_are_none(tools: object) -> None:
    assert read({"messages": [USER], "tools": tools}) == Problem(ASKED, {}, "set")


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[{", "tools: not valid JSON"),
        ("weather", "tools: not valid JSON"),
        ({"name": "weather"}, "tools: expected a list of functions"),
        ([{"description": "none"}], "tools: a function needs a name"),
        (["weather"], "tools: a function needs a name"),
        (
            [{"name": "weather", "parameters": 3}],
            "tools: weather: parameters must be a JSON Schema",
        ),
        ([{"name": "weather", "parameters": "{"}], "tools: weather: parameters: "),
    ],
)
def test_tools_that_are_none_are_an_error_by_name(tools: object, problem: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"here: {problem}"):
        read({"messages": [USER], "tools": tools})


def test_a_worked_solution_does_not_replace_another_column() -> None:
    row = {"question": "q", "answer": WORKED, "solution": "own"}
    assert read(row).metadata == {"answer": "42", "solution": "own"}


def test_a_conversation_keeps_its_earlier_turns() -> None:
    said = {"role": "assistant", "content": "42"}
    problem = read({"messages": [USER, said, USER, said]})
    assert [role for role, _ in problem.messages] == ["user", "assistant", "user"]
    assert read({"messages": [said]}).messages == (("assistant", "42"),)


def test_verls_table_is_read_as_it_is(tmp_path: Path) -> None:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "train", "index": 0},
    }
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    problem = open_source(source_of(str(path), {}), 0).problem(0)
    assert problem.messages == ASKED
    assert problem.counted_under == "openai/gsm8k"
    del row["prompt"]
    assert problem.metadata == {**row, "answer": "42"}


def test_columns_of_any_name_are_mapped() -> None:
    row = {"ask": "6 times 7?", "prompt": "other", "of": {"it": "42"}, "answer": "other"}
    problem = read(row, prompt="ask", answer="of.it")
    metadata = {"prompt": "other", "of": {"it": "42"}, "answer": "42"}
    assert problem == Problem(ASKED, metadata, "set", text_prompt=True)
    # A column's own name comes first, and a column within another one stays there.
    assert read({"a.b": "6 times 7?"}, prompt="a.b").messages == ASKED
    inner = read({"a": {"b": "6 times 7?", "c": 1}}, prompt="a.b")
    assert inner == Problem(ASKED, {"a": {"b": "6 times 7?", "c": 1}}, "set", text_prompt=True)


@pytest.mark.parametrize(
    ("row", "columns", "words"),
    [
        (
            {"ask": "x", "id": 3},
            {},
            "no prompt in messages, prompt, question, problem; the row has ask, id; name it with "
            'columns = { prompt = "ask" }, or --columns prompt=ask',
        ),
        ({"id": 3}, {}, "prompt=COLUMN"),
        ({"dialogue": [USER], "note": "x"}, {}, "prompt=dialogue"),
        ({"note": "x", "query": "x"}, {}, "prompt=query"),
        ({"question": "x"}, {"prompt": "qestion"}, "'qestion'; the row has question; did you mean"),
        ({"prompt": "x", "truth": 1}, {"answer": "trut"}, "no answer in 'trut'; .*did you mean truth?"),
        ({"prompt": 3}, {}, "'prompt' is neither a text nor a list of messages: 3"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            {},
            "a message needs a role and a text as content",
        ),
        ({"messages": [USER, {"role": "user", "content": None}]}, {}, "a text as content"),
    ],
)  # fmt: skip
def test_a_row_without_prompt_or_answer_is_explained(
    row: Any, columns: dict[str, str], words: str
) -> None:
    pattern = words if ".*" in words else None
    with pytest.raises(ConfigInvalid, match=pattern) as refused:
        read(row, **columns)
    assert pattern or words in str(refused.value)
    assert str(refused.value).startswith("here: ")


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}
LINES = b'\xef\xbb\xbf{"prompt": "a"}\r\n', b'{"prompt": "b"}\r\n'


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_compressed_file_is_read_to_its_end(tmp_path: Path, ending: str) -> None:
    plain, path = tmp_path / "train.v1.jsonl", tmp_path / f"train.v1.jsonl.{ending}"
    plain.write_bytes(b"".join(LINES))
    # In two parts, as several compressors write it.
    path.write_bytes(b"".join(map(COMPRESS[ending], LINES)))
    source, same = (open_source(source_of(str(p), {}), 0) for p in (path, plain))
    assert {source.problem(n).messages for n in range(2)} == {(("user", "a"),), (("user", "b"),)}
    assert (
        (source.name, source.identity)
        == (same.name, same.identity)
        == ("train.v1", source.identity)
    )


@pytest.mark.parametrize("ending", COMPRESS)
def test_a_file_that_is_cut_off_or_something_else_is_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"train.jsonl.{ending}"
    noise = np.random.default_rng(0).integers(97, 122, 300_000, np.uint8).tobytes()
    whole = COMPRESS[ending](b'{"prompt": "a"}\n' * 1000 + b'{"prompt": "' + noise + b'"}\n')
    for content in (whole[:-40], b'{"prompt": "a"}\n'):
        path.write_bytes(content)
        with pytest.raises(
            ConfigInvalid, match=rf"data\.jsonl\.path: .*train\.jsonl\.{ending}: \w"
        ):
            open_source(source_of(str(path), {}), 0)


def test_the_option_is_read() -> None:
    assert parse_columns("prompt=question, answer=a.b") == {"prompt": "question", "answer": "a.b"}
    assert parse_columns("answer=solution") == {"answer": "solution"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "write it as prompt=COLUMN,answer=COLUMN"),
        ("question", "write it as prompt=COLUMN"),
        ("prompt=", "write it as prompt=COLUMN"),
        ("promt=question", "--columns.* unknown setting; did you mean prompt?"),
        ("text=question", "--columns.* unknown setting; .* has prompt, answer"),
    ],
)
def test_a_mistake_in_the_option_is_explained(text: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        parse_columns(text)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match=r"--data train\.csv: expected a \*\.jsonl or"):
        source_of("train.csv", {})
    own = source_of("data/rows.py:make", {}).python
    assert own is not None
    assert own.function == "data/rows.py:make"


def test_other_columns_are_other_data(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "x", "a": 1, "answer": 2}) + "\n")
    names = [
        open_source(DataConfig(jsonl=source_of(str(path), columns).jsonl), 0).identity
        for columns in ({}, {"answer": "a"}, {"prompt": "prompt"})
    ]
    assert len(set(names)) == 3
