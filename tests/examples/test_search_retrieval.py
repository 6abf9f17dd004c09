"""The search example's retrieval: shards that act as one index, and server processes that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("bm25s")

from research import indexes
from research.indexes import Bm25Index, EmbeddingIndex, Hit, Shard, fuse, merge
from research.retrieval_client import RetrievalClient, RetrievalFailed

from penstock.up.processes import Command, FirstMatch, Process, end

FOLDER = Path(__file__).parents[2] / "examples" / "search"
SERVING = re.compile(r"^retrieval serving shard \S+ at http://(\S+:\d+)$")
VOCABULARY = [
    "nile",
    "danube",
    "river",
    "length",
    "source",
    "vienna",
    "egypt",
    "metro",
    "paris",
    "opened",
    "novel",
    "whale",
]
TEXTS = st.lists(
    st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=6).map(" ".join),
    min_size=1,
    max_size=24,
)
QUERIES = st.lists(
    st.lists(st.sampled_from([*VOCABULARY, "xyzzy"]), max_size=4).map(" ".join),
    min_size=1,
    max_size=4,
)


def encode(texts: Sequence[str]) -> NDArray[np.float32]:
    """Unit vectors that are close for texts with words in common."""
    rows = np.zeros((len(texts), len(VOCABULARY)), np.float32)
    for row, text in zip(rows, texts, strict=True):
        row[0] += 0.1
        for word in text.split():
            if word in VOCABULARY:
                row[VOCABULARY.index(word)] += 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@settings(max_examples=40)
@example(["nile", "danube danube river"] * 2, ["", "nile river"], 3, 3)
@given(texts=TEXTS, queries=QUERIES, parts=st.integers(1, 5), count=st.integers(1, 8))
@pytest.mark.parametrize("kind", indexes.KINDS)
def test_shards_merged_are_one_index(
    kind: indexes.Kind, texts: list[str], queries: list[str], parts: int, count: int
) -> None:
    def shard(number: int, of: int) -> indexes.Index:
        bounds = Shard(number, of).bounds(len(texts))
        if kind == "bm25":
            return Bm25Index(Bm25Index.build(texts), *bounds)
        return EmbeddingIndex(encode(texts), *bounds, encode)

    whole = shard(0, 1).search(queries, count)
    found = [shard(number, parts).search(queries, count) for number in range(parts)]
    merged = [merge(of_query, count) for of_query in zip(*found, strict=True)]
    assert [[hit.chunk_id for hit in hits] for hits in merged] == [
        [hit.chunk_id for hit in hits] for hits in whole
    ]
    for hits, expected in zip(merged, whole, strict=True):
        assert [hit.score for hit in hits] == pytest.approx(
            [hit.score for hit in expected], abs=1e-6
        )
        assert hits == sorted(hits) and len({hit.chunk_id for hit in hits}) == len(hits) <= count


def test_bm25_scores_are_those_of_the_formula() -> None:
    """Compare with Lucene's BM25 by hand: idf = ln(1 + (N - n + 0.5) / (n + 0.5)), k1 = 1.5, b = 0.75."""
    texts = ["nile nile egypt", "danube vienna", "nile danube paris metro opened", "whale novel"]
    (hits,) = Bm25Index(Bm25Index.build(texts), 0, 4).search(["nile"], 4)
    documents = [text.split() for text in texts]
    average = sum(map(len, documents)) / len(documents)
    expected: list[Hit] = []
    containing = sum("nile" in document for document in documents)
    idf = np.log(1 + (len(texts) - containing + 0.5) / (containing + 0.5))
    for number, document in enumerate(documents):
        if tf := document.count("nile"):
            norm = 1.5 * (1 - 0.75 + 0.75 * len(document) / average)
            expected.append(Hit(-float(idf * tf / (tf + norm)), number))
    assert [hit.chunk_id for hit in hits] == [hit.chunk_id for hit in sorted(expected)] == [0, 2]
    assert [hit.score for hit in hits] == pytest.approx(
        [hit.score for hit in sorted(expected)], rel=1e-5
    )


def test_rankings_are_fused_by_rank() -> None:
    first = [Hit(-9.0, 4), Hit(-8.0, 2), Hit(-1.0, 7)]
    second = [Hit(-0.3, 2), Hit(-0.2, 5)]
    fused = fuse([first, second], 3)
    assert [hit.chunk_id for hit in fused] == [2, 4, 5]
    assert fused[0].score == pytest.approx(1 / 62 + 1 / 61)


def test_a_shard_is_written_as_one_of_several() -> None:
    assert Shard.parse("2/3") == Shard(1, 3) and str(Shard(1, 3)) == "2/3"
    assert [Shard(number, 3).bounds(10) for number in range(3)] == [(0, 3), (3, 6), (6, 10)]
    for wrong in ("0/3", "4/3", "1", "1/0", "a/b", "-1/3"):
        with pytest.raises(ValueError, match="shard"):
            Shard.parse(wrong)


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(3)
    texts = [f"number {n} {' '.join(rng.choices(VOCABULARY, k=8))}" for n in range(300)]
    with (folder / "chunks.jsonl").open("w") as file:
        for number, text in enumerate(texts):
            row = {"chunk_id": number, "passage": number, "title": f"T{number}", "text": text}
            file.write(json.dumps(row) + "\n")
    indexes.build(folder, "bm25", texts)
    return folder


class Servers:
    def __init__(self, corpus: Path, logs: Path) -> None:
        self.corpus, self.logs = corpus, logs
        self.processes: list[Process] = []

    async def start(
        self, shard: str = "1/1", listen: str = "127.0.0.1:0", *options: str
    ) -> tuple[Process, str]:
        """Start a server. Returns it and its address."""
        line = FirstMatch(SERVING)
        log = self.logs / f"retrieval-{len(self.processes)}.log"
        module = (sys.executable, "-m", "research.retrieval_server", str(self.corpus))
        arguments = (*module, "--shard", shard, "--listen", listen, *options)
        process = Process.start(
            Command("retrieval", arguments, log, {"PYTHONPATH": str(FOLDER)}), line
        )
        self.processes.append(process)
        async with asyncio.timeout(60):
            return process, await line.wait(process)


@pytest.fixture
async def servers(corpus_folder: Path, tmp_path: Path) -> AsyncGenerator[Servers]:
    running = Servers(corpus_folder, tmp_path)
    yield running
    await end(running.processes)


async def test_a_replica_is_killed_and_comes_back_while_agents_search(servers: Servers) -> None:
    started = await asyncio.gather(*(servers.start(f"{shard}/2") for shard in (1, 1, 2, 2)))
    addresses = [address for _, address in started]
    urls = [f"http://{address}" for address in addresses]
    whole = indexes.load(servers.corpus, "bm25", Shard())
    rng = random.Random(5)
    async with RetrievalClient(
        [urls[:2], urls[2:]], balance="round_robin", timeout_seconds=60
    ) as client:
        asked = 0

        async def search(times: int) -> None:
            nonlocal asked
            for _ in range(times):
                queries = [" ".join(rng.choices(VOCABULARY, k=3)) for _ in range(rng.randint(1, 3))]
                found = await client.search(queries, 3)
                expected = whole.search(queries, 3)
                assert [[each.chunk_id for each in hits] for hits in found] == [
                    [hit.chunk_id for hit in hits] for hits in expected
                ]
                assert all(each.title == f"T{each.chunk_id}" for hits in found for each in hits)
                asked += 1

        async def kill() -> None:
            while asked < 10:
                await asyncio.sleep(0.001)
            started[0][0].signal(signal.SIGKILL)

        await asyncio.gather(kill(), *(search(12) for _ in range(8)))
        assert asked == 96
        killed, other = client.shards[0].replicas
        assert killed.failed >= 1 and other.failed == 0
        assert sum(replica.failed for replica in client.shards[1].replicas) == 0
        await servers.start("1/2", addresses[0])
        calls = killed.calls - killed.failed
        async with asyncio.timeout(30):
            while killed.failures or killed.calls - killed.failed == calls:
                await search(1)
                await asyncio.sleep(0.01)


async def test_queries_of_many_callers_are_batched_and_what_is_wrong_is_refused(
    servers: Servers,
) -> None:
    process, address = await servers.start(
        "1/1", "127.0.0.1:0", "--window", "0.2", "--max-batch", "16"
    )
    url = f"http://{address}"
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        one = {"queries": ["nile"], "count": 1}
        answers = await asyncio.gather(*(http.post("/search", json=one) for _ in range(32)))
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        health = (await http.get("/health")).json()
        assert health["requests"] == 32 and 2 <= health["batches"] < 16
        assert health["chunks"] == 300 and health["shard"] == "1/1" and health["kinds"] == ["bm25"]
        wrong: list[tuple[object, str]] = [
            ([], "object"),
            ({}, "queries"),
            ({"queries": []}, "queries"),
            ({"queries": ["x"] * 257}, "queries"),
            ({"queries": [1]}, "queries"),
            ({"queries": ["x" * 2001]}, "queries"),
            ({"queries": ["x"], "count": 0}, "count"),
            ({"queries": ["x"], "count": True}, "count"),
            ({"queries": ["x"], "kind": "embeddings"}, "kind"),
            ({"queries": ["x"], "kind": ["bm25"]}, "kind"),
        ]
        for body, field in wrong:
            answer = await http.post("/search", json=body)
            assert answer.status_code == 400, body
            assert answer.json()["reason"] == "FIELD_INVALID" and field in answer.json()["message"]
        assert (await http.post("/search", content=b"{")).status_code == 400
        assert (await http.post("/search", json={"queries": ["", "xyzzy"]})).json() == {
            "hits": [[], []]
        }
    process.signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        assert await process.wait() in (0, -signal.SIGTERM)


async def test_without_a_replica_a_search_fails_in_time(servers: Servers) -> None:
    process, address = await servers.start()
    process.signal(signal.SIGKILL)
    await process.wait()
    async with RetrievalClient([[f"http://{address}"]], patience_seconds=0.5) as client:
        with pytest.raises(RetrievalFailed, match=address):
            await client.search(["nile"], 1)


async def refused(folder: Path, *options: str) -> str:
    """The whole output of a server that must fail to start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "research.retrieval_server", str(folder), *options),
        cwd=FOLDER,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    with contextlib.suppress(ProcessLookupError):
        async with asyncio.timeout(60):
            said, _ = await process.communicate()
    assert process.returncode not in (0, None)
    return said.decode()


async def test_a_server_without_an_index_says_why_and_ends(tmp_path: Path) -> None:
    said = await refused(tmp_path)
    assert "bm25" in said and "serving" not in said and said.count("\n") == 1
    assert f"{sys.executable} -m research.prepare --kinds bm25`" in said


async def test_a_server_without_embeddings_says_in_a_line_how_to_make_them(
    corpus_folder: Path,
) -> None:
    said = await refused(corpus_folder, "--kinds", "bm25,embeddings")
    assert said.startswith("retrieval_server: ") and said.count("\n") == 1
    assert f"{corpus_folder} has no embeddings index" in said and "no bm25 index" not in said
    assert "-m research.prepare --kinds bm25,embeddings`" in said


def test_what_is_not_installed_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"json": "json", "no_such_module": "some-package"}
    monkeypatch.setitem(indexes.LIBRARIES, "embeddings", packages)
    assert indexes.not_installed(["bm25"]) == ""
    said = indexes.not_installed(["bm25", "embeddings"])
    command = said.removeprefix("some-package is not installed: ").strip("`").split()
    assert command[0] == sys.executable and command[2] == "search"
    assert Path(command[1]).name == "add_extra.py" and Path(command[1]).is_file()
