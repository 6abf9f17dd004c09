"""Indexes over the chunks: BM25 and sentence embeddings, each complete or as one of several shards.

    chunks -> build: bm25/, embeddings.npy -> load(kind, shard) -> search(queries, count) -> hits

A shard holds one of n equal parts of the chunks, in order. Its scores equal those of the complete index:
BM25's weights are computed once over all chunks, and a shard is a slice of them. So the hits of all shards,
merged by `merge`, equal those of one index. This includes ties: hits of equal score are ordered by chunk.
"""

from __future__ import annotations

import heapq
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

import numpy as np
from numpy.typing import NDArray

Kind: TypeAlias = Literal["bm25", "embeddings"]
KINDS: tuple[Kind, ...] = get_args(Kind)

LIBRARIES: dict[Kind, dict[str, str]] = {
    "bm25": {"bm25s": "bm25s", "Stemmer": "PyStemmer"},
    "embeddings": {"sentence_transformers": "sentence-transformers"},
}
"""Modules that a kind needs, and the packages that contain them."""

BM25_FOLDER = "bm25"
EMBEDDINGS_FILE = "embeddings.npy"
ENCODE_BATCH = 64

Encode: TypeAlias = Callable[[Sequence[str]], NDArray[np.float32]]
"""Turns texts into vectors of length one, shape [n, d]."""


@dataclass(frozen=True, slots=True, order=True)
class Hit:
    """A chunk that matches a query. Hits sort best first: by falling score, then by chunk."""

    negated_score: float
    chunk_id: int

    @property
    def score(self) -> float:
        """How well the chunk matches; comparable only within one index."""
        return -self.negated_score


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several parts: `Shard(0, 4)` is the first quarter."""

    number: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Parses "1/4", the first of four. Raises ValueError."""
        number, separator, of = text.partition("/")
        if not separator or not (number.isdecimal() and of.isdecimal()):
            raise ValueError(f"a shard must be NUMBER/COUNT, such as 1/4, got {text!r}")
        if not 1 <= int(number) <= int(of):
            raise ValueError(f"a shard must be one of 1/{of} to {of}/{of}, got {text!r}")
        return cls(int(number) - 1, int(of))

    def bounds(self, count: int) -> tuple[int, int]:
        """The index of its first chunk, and the index after its last."""
        return count * self.number // self.of, count * (self.number + 1) // self.of

    def __str__(self) -> str:
        return f"{self.number + 1}/{self.of}"


class Index(Protocol):
    """Finds chunks for queries."""

    def search(self, queries: Sequence[str], count: int) -> list[list[Hit]]:
        """The best hits of each query, at most `count`, best first."""
        ...


class Bm25Index:
    """Matches stemmed words, weighted as in Lucene (bm25s). A chunk needs a word of the query to match."""

    def __init__(self, weights: Any, first: int, end: int) -> None:
        """`weights` is a `bm25s.BM25` over all chunks; only those from `first` to `end` are kept."""
        self._stemmer = english_stemmer()
        self._first, self._weights = first, cut(weights, first, end)

    @classmethod
    def build(cls, texts: Sequence[str]) -> Any:
        """Computes the weights over all chunks."""
        weights = library("bm25s").BM25()
        weights.index(_tokenize(texts, english_stemmer()), show_progress=False)
        return weights

    def search(self, queries: Sequence[str], count: int) -> list[list[Hit]]:
        found: list[list[Hit]] = []
        for words in _tokenize(queries, self._stemmer):
            # bm25s fails on an empty query.
            scores = self._weights.get_scores(words) if words else np.zeros(0, np.float32)
            found.append(_best(scores, count, self._first, above=0.0))
        return found


class EmbeddingIndex:
    """Matches meaning: the cosine between the embeddings of query and chunk."""

    def __init__(self, vectors: NDArray[np.float32], first: int, end: int, encode: Encode) -> None:
        self._first, self._vectors = first, np.ascontiguousarray(vectors[first:end])
        self._encode = encode

    def search(self, queries: Sequence[str], count: int) -> list[list[Hit]]:
        # Not matrix multiplication, whose rounding depends on the number of rows. Then a chunk's score
        # would depend on its shard, and chunks with the same text would be ordered differently.
        scores = np.einsum("qd,nd->qn", self._encode(queries), self._vectors)
        return [_best(row, count, self._first) for row in scores]


def build(folder: Path, kind: Kind, texts: Sequence[str], encode: Encode | None = None) -> None:
    """Writes an index over all chunks into a folder; embeddings need `encode`."""
    if kind == "bm25":
        Bm25Index.build(texts).save(folder / BM25_FOLDER, show_progress=False)
        return
    assert encode is not None
    with (folder / f".{EMBEDDINGS_FILE}").open("wb") as file:
        np.save(file, encode(texts))
    (folder / f".{EMBEDDINGS_FILE}").rename(folder / EMBEDDINGS_FILE)


def is_built(folder: Path, kind: Kind) -> bool:
    """Whether a folder has an index of this kind."""
    return (folder / (BM25_FOLDER if kind == "bm25" else EMBEDDINGS_FILE)).exists()


def parse_kinds(text: str) -> list[Kind]:
    """Parses "bm25,embeddings". Raises ValueError."""
    chosen = text.split(",")
    if not set(chosen) <= set(KINDS):
        raise ValueError(f"--kinds takes {', '.join(KINDS)}, got {text!r}")
    return cast("list[Kind]", chosen)


def not_installed(kinds: Iterable[Kind]) -> str:
    """Names the packages that these kinds lack and the command that installs them; empty if none."""
    missing = [
        package
        for kind in dict.fromkeys(kinds)
        for module, package in LIBRARIES[kind].items()
        if importlib.util.find_spec(module) is None
    ]
    if not missing:
        return ""
    add_extra = Path(__file__).resolve().parents[3] / ".ci" / "add_extra.py"
    are = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {are} not installed: `{sys.executable} {add_extra} search`"


def load(folder: Path, kind: Kind, shard: Shard, encode: Encode | None = None) -> Index:
    """Loads a shard of an index. Only the shard is kept in memory."""
    if kind == "bm25":
        weights = library("bm25s").BM25.load(folder / BM25_FOLDER, mmap=True, show_progress=False)
        return Bm25Index(weights, *shard.bounds(weights.scores["num_docs"]))
    assert encode is not None
    vectors = np.load(folder / EMBEDDINGS_FILE, mmap_mode="r")
    return EmbeddingIndex(vectors, *shard.bounds(len(vectors)), encode)


def sentence_encoder(model_folder: Path) -> Encode:
    """Encodes with a sentence-transformers model."""
    model = library("sentence_transformers").SentenceTransformer(str(model_folder), device="cpu")

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        return model.encode(
            list(texts),
            batch_size=ENCODE_BATCH,
            normalize_embeddings=True,
            show_progress_bar=False,
        )

    return encode


def merge(parts: Iterable[Sequence[Hit]], count: int) -> list[Hit]:
    """The best hits of several shards; each shard's hits are best first."""
    return list(heapq.merge(*parts))[:count]


def fuse(rankings: Iterable[Sequence[Hit]], count: int, constant: float = 60.0) -> list[Hit]:
    """Reciprocal rank fusion of rankings by different indexes (Cormack, Clarke, Buettcher, SIGIR 2009)."""
    scores: dict[int, float] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.chunk_id] = scores.get(hit.chunk_id, 0.0) + 1.0 / (constant + rank)
    return sorted(Hit(-score, chunk_id) for chunk_id, score in scores.items())[:count]


def cut(weights: Any, first: int, end: int) -> Any:
    """A `bm25s.BM25` over only the chunks from `first` to `end`, with their weights from the whole."""
    scores = weights.scores
    kept = (scores["indices"] >= first) & (scores["indices"] < end)
    before = np.concatenate([[0], np.cumsum(kept)])
    part = library("bm25s").BM25(
        k1=weights.k1, b=weights.b, delta=weights.delta, method=weights.method
    )
    part.vocab_dict = weights.vocab_dict
    part.nonoccurrence_array = weights.nonoccurrence_array
    part.scores = {
        "data": np.asarray(scores["data"])[kept],
        "indices": np.asarray(scores["indices"])[kept] - first,
        "indptr": before[scores["indptr"]],
        "num_docs": end - first,
    }
    return part


def library(name: str) -> Any:
    """An untyped library, imported only when needed."""
    return importlib.import_module(name)


def english_stemmer() -> Any:
    """Reduces English words to their stems."""
    return library("Stemmer").Stemmer("english")


def _tokenize(texts: Sequence[str], stemmer: Any) -> list[list[str]]:
    return library("bm25s").tokenize(
        list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False
    )


def _best(scores: NDArray[np.float32], count: int, first: int, above: float = -np.inf) -> list[Hit]:
    """The hits with the highest scores. Ties at the edge are ordered by chunk, the same in every shard."""
    if not len(scores) or count < 1:
        return []
    least = np.partition(scores, -count)[-count] if count < len(scores) else -np.inf
    places = np.flatnonzero((scores >= least) & (scores > above))
    return sorted(Hit(-float(scores[place]), first + int(place)) for place in places)[:count]
