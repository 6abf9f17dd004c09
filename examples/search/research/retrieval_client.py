"""The agent's side of retrieval: asks one replica of every shard, and merges the hits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias

import httpx

from research.indexes import Hit, Kind, fuse, merge
from research.replicas import Balance, NoReplica, ReplicaFailed, Replicas

Method: TypeAlias = Literal["bm25", "embeddings", "hybrid"]
"""What searches the chunks; hybrid fuses two rankings."""

KINDS: dict[Method, tuple[Kind, ...]] = {
    "bm25": ("bm25",),
    "embeddings": ("embeddings",),
    "hybrid": ("bm25", "embeddings"),
}
LONGEST_QUERY = 2000
"""Maximum query length that a server accepts, in characters."""
# Before two rankings are fused, each is read to this many times the depth of the result.
_DEPTH = 4
# It logs a line for every call.
logging.getLogger("httpx").setLevel(logging.WARNING)


class RetrievalFailed(Exception):
    """All replicas of some shard failed."""


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that a search found."""

    chunk_id: int
    title: str
    text: str


class RetrievalClient:
    """Searches all shards. An async context manager; safe to use from several tasks."""

    def __init__(
        self,
        shards: Sequence[Sequence[str]],
        method: Method = "bm25",
        balance: Balance = "least_outstanding",
        *,
        timeout_seconds: float = 10.0,
        patience_seconds: float = 30.0,
    ) -> None:
        """`shards` has the replica URLs of each shard. `timeout_seconds` limits one call to one replica,
        `patience_seconds` the whole search."""
        self.shards = [
            Replicas(urls, balance, patience_seconds=patience_seconds) for urls in shards
        ]
        self._method: Method = method
        self._http = httpx.AsyncClient(
            timeout=timeout_seconds, limits=httpx.Limits(max_connections=256)
        )

    async def __aenter__(self) -> RetrievalClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def search(self, queries: Sequence[str], count: int) -> list[list[Found]]:
        """The best chunks of each query, at most `count`, best first.

        Raises RetrievalFailed, and ValueError for queries that a server rejects.
        """
        kinds = KINDS[self._method]
        depth = count if len(kinds) == 1 else _DEPTH * count
        texts: dict[int, Found] = {}
        rankings = await asyncio.gather(
            *(self._rank(kind, queries, depth, texts) for kind in kinds)
        )
        joined = (
            rankings[0]
            if len(kinds) == 1
            else [fuse(several, count) for several in zip(*rankings, strict=True)]
        )
        return [[texts[hit.chunk_id] for hit in hits] for hits in joined]

    async def _rank(
        self, kind: Kind, queries: Sequence[str], count: int, texts: dict[int, Found]
    ) -> list[list[Hit]]:
        """One ranking of each query over all shards; adds the chunks found to `texts`."""
        body = {"queries": list(queries), "count": count, "kind": kind}
        parts = await asyncio.gather(*(self._ask(shard, body) for shard in self.shards))
        rankings: list[list[Hit]] = []
        for number in range(len(queries)):
            of_shards = [part[number] for part in parts]
            for hits in of_shards:
                for hit in hits:
                    chunk_id = int(hit["chunk_id"])
                    texts[chunk_id] = Found(chunk_id, hit["title"], hit["text"])
            rankings.append(
                merge(
                    (
                        [Hit(-hit["score"], int(hit["chunk_id"])) for hit in hits]
                        for hits in of_shards
                    ),
                    count,
                )
            )
        return rankings

    async def _ask(self, shard: Replicas, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
        async def ask(url: str) -> list[list[dict[str, Any]]]:
            return (await post_json(self._http, f"{url}/search", body))["hits"]

        try:
            return await shard.call(ask)
        except NoReplica as error:
            raise RetrievalFailed(str(error)) from error


async def post_json(
    http: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> Any:
    """Posts JSON and returns the answer. Raises ReplicaFailed if another server may succeed, else
    ValueError."""
    try:
        response = await http.post(url, json=body, headers=headers)
    except httpx.TransportError as error:
        raise ReplicaFailed(f"{type(error).__name__}: {error}") from error
    if response.status_code >= 500 or response.status_code == 429:
        raise ReplicaFailed(f"HTTP {response.status_code}: {response.text[:200]}")
    if response.status_code >= 400:
        raise ValueError(f"{url}: HTTP {response.status_code}: {response.text[:200]}")
    try:
        return response.json()
    except ValueError as error:
        raise ReplicaFailed(f"not JSON: {response.text[:200]!r}") from error
