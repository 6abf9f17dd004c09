"""Data sources: what is read, in which order, and that a position in them is a single number."""

from __future__ import annotations

import datetime
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.values import from_struct
from penstock.trainer.config.data import (
    ColumnsConfig,
    DataConfig,
    HuggingFaceConfig,
    JsonlConfig,
    ParquetConfig,
    PythonConfig,
    ReasoningGymConfig,
    SamplingConfig,
)
from penstock.trainer.config.trainer import load_config, render_config
from penstock.trainer.core.errors import ConfigInvalid
from penstock.trainer.data.sources import function as own
from penstock.trainer.data.sources.factory import open_source
from penstock.trainer.data.sources.function import open_own
from penstock.trainer.data.sources.jsonl import open_jsonl
from penstock.trainer.data.sources.mixture import LONGEST_CYCLE, Interleaving, whole_weights
from penstock.trainer.data.sources.problem import Problem, Source
from penstock.trainer.data.sources.procedural import ReasoningGymSource
from penstock.trainer.data.sources.tables import open_huggingface, open_parquet
from penstock.trainer.data.tasks import build_task, describe_problem
from penstock.v1 import task_service_pb2
from penstock.wire import codec

HERE = "tests.trainer.data.test_sources"


def texts(source: Source, indices: Any) -> list[str]:
    return [source.problem(index).messages[-1][1] for index in indices]


def write(folder: Path, *lines: Any, name: str = "data") -> JsonlConfig:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines))
    return JsonlConfig(path=path)


def numbered(folder: Path, count: int, name: str = "data") -> JsonlConfig:
    return write(folder, *({"prompt": f"{name} {n}"} for n in range(count)), name=name)


# Rows


def test_unknown_data_sets_and_settings_are_named() -> None:
    with pytest.raises(ConfigInvalid, match="'nonsense'"):
        ReasoningGymSource(ReasoningGymConfig(name="nonsense"))
    with pytest.raises(ConfigInvalid, match="min_foo"):
        ReasoningGymSource(ReasoningGymConfig(name="chain_sum", config={"min_foo": 1}))


def test_jsonl_takes_prompts_and_messages(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        {"prompt": "one?", "answer": 1},
        "",
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two?"}]},
    )
    source = open_jsonl(config.model_copy(update={"shuffle": False}), seed=0)
    assert source.problem(0) == Problem(
        (("user", "one?"),), {"answer": 1}, "data", text_prompt=True
    )
    # Reading a row does not change it: a later pass returns it again.
    assert source.problem(2) == source.problem(0)
    assert source.problem(1).messages == (("system", "s"), ("user", "two?"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r":1: "),
        ("[1]", "expected an object"),
        ({"text": "x"}, 'no prompt in messages, prompt, .*; the row has text; .*prompt = "text"'),
        ({}, "no prompt in .*; the row has no columns"),
        ({"prompt": 3}, "'prompt' is neither a text nor a list of messages: 3"),
        ({"messages": []}, "a list of messages"),
        ({"messages": ["x"]}, "a role and a text as content, got 'x'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ('{"prompt": "x", "score": NaN}', r":1: .*not JSON compliant"),
        # Text that JSON can express but a task cannot.
        ('{"prompt": "bad \\ud83d tail"}', r":1: .*can't encode character '\\ud83d'"),
        ('{"prompt": "x", "note": ["bad \\ud83d"]}', r":1: .*can't encode"),
        ('{"prompt": "x", "bad \\ud83d": 1}', r":1: .*can't encode"),
        ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', r":1: .*can't encode"),
        ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", ":1: Exceeds the limit"),
        ('{"prompt": "x", "tree": ' + "[" * 40 + "]" * 40 + "}", ":1: it is nested more than 30"),
        ('{"prompt": "x", "tree": ' + "[" * 100_000 + "}", ":1: .*recursion"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        open_jsonl(write(tmp_path, line), seed=0)


def test_a_text_may_hold_separators_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "d"}\r\n'.encode())
    source = open_jsonl(JsonlConfig(path=path, shuffle=False), seed=0)
    assert texts(source, range(3)) == ["a\u2028b\x85c", "d", "a\u2028b\x85c"]


def test_every_row_that_is_taken_can_be_a_task(tmp_path: Path) -> None:
    tree: object = "leaf"
    for _ in range(29):
        tree = {"deep": tree}
    row = {"prompt": "\U0001f600", "tree": tree, "answer": 10**400, "\U0001f600": None}
    config = DataConfig(jsonl=write(tmp_path, row))
    task = build_task(open_source(config, 0).problem(0), run_id="r", index=0, config=config)
    sent = codec.twin(task_service_pb2.LeaseTasksResponse)(task=task).SerializeToString()
    read = task_service_pb2.LeaseTasksResponse.FromString(sent).task
    assert read.conversation.messages[0].content == "\U0001f600"
    assert "\U0001f600" in read.metadata.fields
    assert read.metadata["answer"] == str(10**400)


def test_a_number_that_a_task_would_round_is_its_text(tmp_path: Path) -> None:
    exact, rounded = [0, -(2**53), 2**53, 2**60, 10**22], [2**53 + 1, -(10**19) - 7, 10**23]
    row = {"prompt": "x", "answers": [*exact, *rounded], "of": {"id": 2**63 - 1}, "right": True}
    config = DataConfig(jsonl=write(tmp_path, row))
    problem = open_source(config, 0).problem(0)
    task = build_task(problem, run_id="r", index=0, config=config)
    sent = task_service_pb2.Task.FromString(task.SerializeToString())
    assert from_struct(sent.metadata) == {
        "data_source": "data",
        "answers": [*exact, *map(str, rounded)],
        "of": {"id": str(2**63 - 1)},
        "right": True,
    }


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    source = open_jsonl(JsonlConfig(path=path, shuffle=False), seed=0)
    assert texts(source, range(2)) == ["a", "b"]


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="has no lines"):
        open_jsonl(write(tmp_path, ""), seed=0)


def test_each_pass_over_a_file_has_its_own_order_and_misses_nothing(tmp_path: Path) -> None:
    source = open_jsonl(numbered(tmp_path, 20), seed=1)
    passes = [texts(source, range(20 * p, 20 * p + 20)) for p in range(3)]
    assert all(sorted(each) == sorted(passes[0]) and len(set(each)) == 20 for each in passes)
    assert passes[0] != passes[1] != passes[2]
    # Jumping back gives the same problem again.
    assert texts(source, [3]) == [passes[0][3]]


def table(count: int, name: str = "row") -> pyarrow.Table:
    return pyarrow.table(
        {
            "question": [f"{name} {n}" for n in range(count)],
            "answer": [{"value": n, "on": datetime.date(2020, 1, 1)} for n in range(count)],
            "messages": pyarrow.array([None] * count, pyarrow.null()),
        }
    )


def test_parquet_is_read_from_a_file_and_from_a_folder(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(3, "b"), tmp_path / "2.parquet")
    pyarrow.parquet.write_table(table(2, "a"), tmp_path / "1.parquet")
    config = ParquetConfig(path=tmp_path, columns=ColumnsConfig(prompt="question"), shuffle=False)
    source = open_parquet(config, seed=0)
    assert texts(source, range(6)) == ["a 0", "a 1", "b 0", "b 1", "b 2", "a 0"]
    answer = {"value": 1, "on": "2020-01-01"}
    assert source.problem(1).metadata == {"answer": answer, "messages": None}
    one = open_parquet(config.model_copy(update={"path": tmp_path / "1.parquet"}), seed=0)
    assert texts(one, range(3)) == ["a 0", "a 1", "a 0"]
    assert one.identity != source.identity
    assert source.problem(0).data_source == tmp_path.stem


def test_shards_may_differ_in_what_does_not_matter(tmp_path: Path) -> None:
    nothing = pyarrow.array([None], pyarrow.null())
    tables = [
        {"prompt": ["a"], "x": pyarrow.array([1], pyarrow.int32()), "note": nothing},
        {"note": ["n"], "x": pyarrow.array([2], pyarrow.int64()), "prompt": ["b"]},
        {"prompt": ["c"], "x": [3], "note": nothing, "__index_level_0__": [7]},
    ]
    for number, columns in enumerate(tables):
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{number}.parquet")
    config = ParquetConfig(path=tmp_path, shuffle=False)
    source = open_parquet(config, seed=0)
    found = [source.problem(index) for index in range(3)]
    assert [problem.messages[0][1] for problem in found] == ["a", "b", "c"]
    assert [(p.metadata["x"], p.metadata.get("note")) for p in found] == [
        (1, None),
        (2, "n"),
        (3, None),
    ]
    assert not any("__index" in key for problem in found for key in problem.metadata)
    pyarrow.parquet.write_table(
        pyarrow.table({"prompt": ["d"], "x": ["text"]}), tmp_path / "3.parquet"
    )
    with pytest.raises(ConfigInvalid, match=r"data\.parquet\.path: "):
        open_parquet(config, seed=0)


def test_a_row_without_a_source_of_its_own_is_of_its_source(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "data_source": None}, {"prompt": "b", "data_source": "own"}]
    rows.append({"prompt": "c", "data_source": 5})
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_jsonl(JsonlConfig(path=tmp_path / "set.jsonl", shuffle=False), seed=0)
    asked = [describe_problem(source.problem(n), "", SamplingConfig()).metadata for n in range(3)]
    assert [from_struct(metadata)["data_source"] for metadata in asked] == ["set", "own", 5]


def test_numbers_of_a_table_that_are_none_are_their_text(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    columns = {"prompt": ["a", "b"], "x": [nan, 1.5], "y": [[inf, 2.0], [-inf, 3.0]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    source = open_parquet(ParquetConfig(path=tmp_path, shuffle=False), seed=0)
    assert source.problem(0).metadata == {"x": "nan", "y": ["inf", 2.0]}
    assert source.problem(1).metadata == {"x": 1.5, "y": ["-inf", 3.0]}


def test_a_date_that_python_does_not_have_is_named(tmp_path: Path) -> None:
    days = pyarrow.array([0, 3_000_000], pyarrow.int32()).cast(pyarrow.date32())
    path = tmp_path / "far.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "day": days}), path)
    with pytest.raises(ConfigInvalid, match=r"rows 1 to 2 of a table cannot be read: .*range"):
        open_parquet(ParquetConfig(path=path), seed=0)


def test_a_parquet_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"holds no file named \*\.parquet"):
        open_parquet(ParquetConfig(path=tmp_path), seed=0)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 or not")
    with pytest.raises(ConfigInvalid, match=r"data\.parquet\.path: .*a\.parquet"):
        open_parquet(ParquetConfig(path=tmp_path), seed=0)
    pyarrow.parquet.write_table(pyarrow.table({"ask": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigInvalid, match=r"row 1: no prompt in messages, prompt, "):
        open_parquet(ParquetConfig(path=tmp_path), seed=0)


@pytest.mark.parametrize("how", ["disk", "splits", "jsonl"])
def test_data_sets_of_hugging_face_are_read(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "sums"
    rows = datasets.Dataset.from_list([{"prompt": f"p {n}", "answer": n} for n in range(5)])
    if how == "disk":
        rows.save_to_disk(folder)
    elif how == "splits":
        datasets.DatasetDict({"test": rows}).save_to_disk(folder)
    else:
        folder.mkdir()
        rows.to_json(folder / "test.jsonl")
    config = HuggingFaceConfig(path=str(folder), split="test", shuffle=False)
    source = open_huggingface(config, seed=0)
    assert texts(source, range(6)) == [f"p {n}" for n in (0, 1, 2, 3, 4, 0)]
    assert source.problem(4) == Problem((("user", "p 4"),), {"answer": 4}, "sums", text_prompt=True)
    assert open_huggingface(config, seed=0).identity == source.identity
    wrong = config.model_copy(update={"split": "nonsense"})
    with pytest.raises(ConfigInvalid, match=r"data\.huggingface: .*'nonsense'"):
        open_huggingface(wrong, seed=0)
    for split, wanted in [
        ("test[:2]", (0, 1)),
        ("test[40%:]", (2, 3, 4)),
        ("test[-1:]+test[1:3]", (4, 1, 2)),
        ("all", (0, 1, 2, 3, 4)),
    ]:
        part = open_huggingface(config.model_copy(update={"split": split}), seed=0)
        assert texts(part, range(part.size)) == [f"p {n}" for n in wanted]


def test_a_saved_data_set_has_the_split_that_it_was_saved_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"p {n}"} for n in range(3)]
    rows = datasets.Dataset.from_list(rows, split=datasets.Split.VALIDATION)
    rows.save_to_disk(tmp_path / "sums")
    config = HuggingFaceConfig(path=str(tmp_path / "sums"), split="validation[1:]", shuffle=False)
    assert texts(open_huggingface(config, seed=0), range(2)) == ["p 1", "p 2"]
    for split, words in [
        ("train", r"Unknown split .train.*'validation'"),
        ("validation[", "Unrecognized"),
        ("validation[3:]", "out of range"),
    ]:
        with pytest.raises(ConfigInvalid, match=words):
            open_huggingface(config.model_copy(update={"split": split}), seed=0)


@pytest.mark.parametrize("split", ["train", "all"])
def test_a_saved_slice_of_a_data_set_goes_by_any_name(tmp_path: Path, split: str) -> None:
    datasets = pytest.importorskip("datasets")
    lines = tmp_path / "sums.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"p {n}"}) + "\n" for n in range(5)))
    cut = datasets.load_dataset("json", data_files=str(lines), split="train[:60%]")
    assert str(cut.split) == "train[:60%]"
    cut.save_to_disk(tmp_path / "cut")
    config = HuggingFaceConfig(path=str(tmp_path / "cut"), split=split, shuffle=False)
    assert texts(open_huggingface(config, seed=0), range(3)) == ["p 0", "p 1", "p 2"]


def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigInvalid, match=r"pip install 'penstock-rl\[datasets\]'"):
        open_huggingface(HuggingFaceConfig(path="x"), seed=0)


# The user's own functions


class Squares:
    """A sequence that never raises IndexError."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"prompt": f"{index} squared", "answer": np.int64(index**2)}


def squares() -> Squares:
    return Squares()


def stories(count: int = 5, word: str = "story") -> Iterator[str]:
    return (f"{word} {n}" for n in range(count))


def endless() -> Iterator[dict[str, object]]:
    n = 0
    while True:
        yield {"prompt": f"endless {n}"}
        n += 1


def broken() -> Iterator[str]:
    yield from (f"fine {n}" for n in range(70))
    raise OSError("no more")


def nothing() -> list[str]:
    return []


def no_stories() -> Iterator[str]:
    return iter(())


def a_text() -> str:
    return "prompt"


def a_table() -> dict[str, list[str]]:
    return {"prompt": ["a", "b"]}


def a_frame() -> Any:
    return pandas.DataFrame(a_table())


COUNTED = iter(range(10**6))


def counted() -> Iterator[str]:
    """Every call consumes the same shared iterator."""
    yield from (f"p{n}" for n in COUNTED)


def a_data_set() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(a_table())


def a_stream() -> Any:
    return a_data_set().to_iterable_dataset()


class Breaking:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, str]:
        if index == 1:
            raise OSError("gone")
        return {"prompt": str(index)}


def breaks() -> Breaking:
    return Breaking()


def a_number() -> int:
    return 3


SHARED = iter([f"once {n}" for n in range(200)])


def shared() -> Iterator[str]:
    return SHARED


def own_source(name: str, **rest: Any) -> Source:
    return open_own(PythonConfig(function=f"{HERE}:{name}", **rest), seed=0)


def test_a_sequence_of_ones_own_is_looked_up() -> None:
    source = own_source("squares", shuffle=False)
    assert texts(source, range(5)) == [f"{n} squared" for n in (0, 1, 2, 3, 0)]
    assert source.problem(3).metadata == {"answer": 9}
    shuffled = own_source("squares")
    assert sorted(texts(shuffled, range(4, 8))) == sorted(texts(source, range(4)))


def test_an_iterator_of_ones_own_is_gone_through_pass_after_pass() -> None:
    source = own_source("stories", options={"count": 3, "word": "tale"})
    assert texts(source, range(7)) == [f"tale {n}" for n in (0, 1, 2, 0, 1, 2, 0)]
    other = own_source("stories", options={"count": 3, "word": "yarn"})
    assert other.identity != source.identity


def test_an_iterator_begins_again_for_what_lies_too_far_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own, "ENTRIES_REMEMBERED", 3)
    source = own_source("endless")
    assert texts(source, [9, 7, 8]) == ["endless 9", "endless 7", "endless 8"]
    assert texts(source, [2, 10, 0]) == ["endless 2", "endless 10", "endless 0"]
    assert len(source._recent) <= 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["a_data_set", "a_stream"])
def test_a_function_may_return_a_data_set_of_hugging_face(name: str) -> None:
    assert sorted(texts(own_source(name), range(2))) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "there are no rows"),
        ("shared", "returns the same iterator each time"),
        ("no_stories", "entry 1: there are no entries"),
        ("a_number", "it returns a int, not a sequence or iterator"),
        ("a_text", "it returns a str; return a list of rows"),
        ("a_table", "it returns a dict; return a list of rows"),
        ("a_frame", r'it returns a DataFrame; .* to_dict\("records"\)'),
        ("breaks", f"{HERE}:breaks, entry 2: OSError: gone"),
        ("missing", f"{HERE} has no missing"),
    ],
)
def test_a_function_that_is_of_no_use_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigInvalid, match=words):
        own_source(name)


def test_data_of_hugging_face_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.csv").write_text("prompt,x\na,1\nb,2,3,4\n")
    with pytest.raises(ConfigInvalid, match=r"data\.huggingface: .*Expected 2 fields"):
        open_huggingface(HuggingFaceConfig(path=str(tmp_path / "rows")), seed=0)
    datasets.Dataset.from_list([{"prompt": "p"}]).save_to_disk(tmp_path / "saved")
    for key in ("name", "revision"):
        config = HuggingFaceConfig.model_validate({"path": str(tmp_path / "saved"), key: "x"})
        with pytest.raises(ConfigInvalid, match=rf"data\.huggingface\.{key}: .* saved to disk"):
            open_huggingface(config, seed=0)


def test_problems_of_a_library_that_draws_by_itself_are_the_same_again() -> None:
    source = ReasoningGymSource(ReasoningGymConfig(name="list_functions", size=30))
    random.seed(5)
    first = texts(source, range(30))
    drawn = random.random()
    random.seed(5)
    assert drawn == random.random()
    random.seed(6)
    assert texts(source, range(30)) == first


def test_a_library_that_seeds_numpys_generator_leaves_it_as_it_was() -> None:
    source = ReasoningGymSource(ReasoningGymConfig(name="pool_matrix", size=3))
    np.random.seed(5)
    first = texts(source, range(3))
    drawn = np.random.random()
    np.random.seed(5)
    assert drawn == np.random.random()
    assert texts(source, range(3)) == first


HASHED = """
from penstock.trainer.config.data import ReasoningGymConfig
from penstock.trainer.data.sources.procedural import ReasoningGymSource
source = ReasoningGymSource(ReasoningGymConfig(name="isomorphic_strings", size=3))
print(source.identity, [source.problem(n).messages for n in range(3)])
"""


def test_problems_that_depend_on_the_seed_of_hashes_need_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ReasoningGymConfig(name="isomorphic_strings", size=3)
    for random_seed in (None, "random"):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if random_seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", random_seed)
        with pytest.raises(
            ConfigInvalid, match="set it in the environment, such as PYTHONHASHSEED=0"
        ):
            ReasoningGymSource(config)

    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = (sys.executable, "-c", HASHED)
    said = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
    assert said[0] == said[1]
    assert "PYTHONHASHSEED=0" in said[0]


def test_calls_that_return_other_entries_are_noticed() -> None:
    source = own_source("counted")
    with pytest.raises(ConfigInvalid, match="entry 1: it differs from the previous pass"):
        source.problem(0)


def test_an_iterator_that_fails_says_where() -> None:
    source = own_source("broken")
    assert texts(source, [69]) == ["fine 69"]
    with pytest.raises(ConfigInvalid, match="entry 71: OSError: no more"):
        source.problem(70)


# Mixtures


def parts(folder: Path, *weights: float) -> DataConfig:
    config = {
        "mixture": [
            {"weight": weight, "jsonl": numbered(folder, 3 + n, "abcdef"[n]).model_dump()}
            for n, weight in enumerate(weights)
        ]
    }
    return DataConfig.model_validate(config)


def test_a_mixture_names_its_parts_and_goes_through_each_of_them(tmp_path: Path) -> None:
    source = open_source(parts(tmp_path, 2, 1), seed=5)
    problems = [source.problem(index) for index in range(12)]
    assert Counter(problem.data_source for problem in problems) == {"a": 8, "b": 4}
    own_a = open_source(DataConfig(jsonl=numbered(tmp_path, 3, "a")), seed=5)
    assert [p for p in problems if p.data_source == "a"] == [own_a.problem(n) for n in range(8)]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_no_source_is_a_problem_ahead_of_its_share_and_none_skips(weights: list[int]) -> None:
    interleaving = Interleaving(weights)
    given, total = [0] * len(weights), sum(weights)
    for index in range(2 * total + 3):
        source, own_index = interleaving.place(index)
        assert own_index == given[source]
        given[source] += 1
        for count, weight in zip(given, weights, strict=True):
            assert count - (index + 1) * weight / total < 1
        if (index + 1) % total == 0:
            assert given == [weight * (index + 1) // total for weight in weights]


def test_weights_are_what_they_are_written_as() -> None:
    assert whole_weights([0.7, 0.3]) == (7, 3)
    assert whole_weights([2.0, 4.0, 6.0]) == (1, 2, 3)
    assert whole_weights([1e-3, 1]) == (1, 1000)
    with pytest.raises(ConfigInvalid, match=f"at most {LONGEST_CYCLE}"):
        whole_weights([0.33333333, 0.66666667])


def test_what_is_wrong_with_a_mixture_is_said_of_its_section(tmp_path: Path) -> None:
    rows = {"jsonl": numbered(tmp_path, 3).model_dump(), "name": "a"}
    for weights, said in (((1, 1), "two parts are named 'a'"), ((0.33333333, 1), "at most")):
        parts = [{**rows, "weight": weight} for weight in weights]
        if said == "at most":
            parts[1]["name"] = "b"
        config = DataConfig.model_validate({"mixture": parts})
        with pytest.raises(ConfigInvalid, match=rf"^evaluation\.0\.mixture: .*{said}"):
            open_source(config, 0, "evaluation.0")


def test_a_level_of_an_environment_stays_one_in_a_mixture(tmp_path: Path) -> None:
    levels = [{"name": "easy"}, {"name": "hard"}]
    part = {"environment": {"name": "game", "levels": levels}}
    rows = {"jsonl": numbered(tmp_path, 3).model_dump()}
    for name, expected in ((None, "game"), ("games", "games")):
        mixed = {"mixture": [{**part, "name": name} if name else part, rows]}
        source = open_source(DataConfig.model_validate(mixed), seed=0)
        found = [source.problem(n).data_source for n in range(4)]
        assert found == [f"{expected}/easy", "data", f"{expected}/hard", "data"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [("chain_sum", {"min_digits": 4}), ("pool_matrix", {}), ("knights_knaves", {})],
)
def test_sets_of_other_seeds_are_other_problems(name: str, settings: dict[str, Any]) -> None:
    def asked(seed: int) -> list[str]:
        source = ReasoningGymSource(ReasoningGymConfig(name=name, seed=seed, config=settings))
        return texts(source, range(20))

    of_each = {seed: asked(seed) for seed in (0, 1, 2, 1000, 2**62)}
    assert of_each[1] == asked(1)
    several = [text for texts_of in of_each.values() for text in set(texts_of)]
    assert len(several) == len(set(several))
    # Seed 0, the default, gives the library's own problems.
    own = reasoning_gym.create_dataset(name, size=20, seed=0, **settings)
    assert of_each[0] == [own[n]["question"] for n in range(20)]


def test_two_parts_of_one_name_need_names(tmp_path: Path) -> None:
    part = {"jsonl": numbered(tmp_path, 3).model_dump()}
    with pytest.raises(ConfigInvalid, match="two parts are named 'data'"):
        open_source(DataConfig.model_validate({"mixture": [part, part]}), seed=0)
    named = [{**part, "name": "first"}, {**part, "name": "second"}]
    source = open_source(DataConfig.model_validate({"mixture": named}), seed=0)
    assert [source.problem(n).data_source for n in range(3)] == ["first", "second", "first"]


def test_a_mixture_is_written_in_the_configuration(tmp_path: Path) -> None:
    numbered(tmp_path, 3)
    file = tmp_path / "train.toml"
    file.write_text(f"""
        [model]
        path = "m"
        [[data.mixture]]
        weight = 3
        jsonl.path = "{tmp_path}/data.jsonl"
        [[data.mixture]]
        name = "sums"
        [data.mixture.reasoning_gym]
        name = "chain_sum"
    """)
    config = load_config(file)
    file.write_text(render_config(config))
    assert load_config(file) == config
    source = open_source(config.data, seed=0)
    assert [source.problem(n).data_source for n in range(4)].count("sums") == 1


# Resuming


def each_kind(folder: Path) -> Iterator[DataConfig]:
    yield DataConfig(jsonl=numbered(folder, 7))
    yield DataConfig(python=PythonConfig(function=f"{HERE}:stories"))
    yield DataConfig(python=PythonConfig(function=f"{HERE}:squares"))
    yield DataConfig(reasoning_gym=ReasoningGymConfig(name="chain_sum", size=5))
    yield DataConfig.model_validate(
        {
            "mixture": [
                {"weight": 2.5, "jsonl": numbered(folder, 7).model_dump()},
                {"weight": 1.5, "python": {"function": f"{HERE}:endless"}},
                {"weight": 1, "reasoning_gym": {"name": "chain_sum", "size": 5}},
            ]
        }
    )


@pytest.mark.parametrize("kind", range(5))
def test_any_interruption_goes_on_with_the_same_sequence(
    tmp_path_factory: pytest.TempPathFactory, kind: int
) -> None:
    config = list(each_kind(tmp_path_factory.mktemp("data")))[kind]
    undisturbed = open_source(config, seed=3)
    expected = [undisturbed.problem(index) for index in range(60)]

    # Each trainer resubmits its outstanding tasks, and continues at the stored position.
    lives = st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 59))), max_size=5)

    @settings(deadline=None, max_examples=20)
    @given(lives)
    def check(lives: list[tuple[int, set[int]]]) -> None:
        reached = 0
        for count, again in lives:
            source = open_source(config, seed=3)
            assert source.identity == undisturbed.identity
            indices = [*sorted(i for i in again if i < reached), *range(reached, reached + count)]
            assert [source.problem(i) for i in indices] == [expected[i] for i in indices]
            reached += count

    check()


def test_data_are_known_by_what_they_say_and_how_they_are_ordered(tmp_path: Path) -> None:
    config = write(tmp_path, {"prompt": "one?", "ask": "two?"})

    def name(seed: int = 1, **changes: Any) -> str:
        data = DataConfig(jsonl=config.model_copy(update=changes))
        return open_source(data, seed).identity

    before = name()
    assert name() == before != name(seed=2)
    assert name(shuffle=False) == name(seed=2, shuffle=False) != before
    assert name(columns=ColumnsConfig(prompt="ask")) != before
    write(tmp_path, {"prompt": "two?", "ask": "two?"})
    assert name() != before
    gym = [ReasoningGymConfig(name="chain_sum", size=5, seed=seed) for seed in (3, 4)]
    assert ReasoningGymSource(gym[0]).identity != ReasoningGymSource(gym[1]).identity
    mixtures = {open_source(parts(tmp_path, *w), 0).identity for w in ((1, 2), (2, 1), (1, 1))}
    assert len(mixtures) == 3
    config.path.unlink()
    with pytest.raises(ConfigInvalid, match=r"data\.jsonl\.path"):
        name()
