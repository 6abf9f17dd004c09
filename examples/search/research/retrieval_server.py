"""The retrieval server: one shard of the corpus over HTTP.

    python -m research.retrieval_server FOLDER [--shard 1/2] [--kinds bm25,embeddings] [--listen HOST:PORT]

| call | answer |
|---|---|
| `POST /search` `{"queries": [...], "count": 3, "kind": "bm25"}` | `{"hits": [[{"chunk_id", "score", "title", "text"}]]}`, one list for each query |
| `GET /health` | 200, what it serves, and counters, once it serves |

Queries of all callers are searched in batches (`batching`). A malformed request gets status 400 and an error
message; if the queue is full, a request gets 503. The server listens before it has loaded, so callers wait
instead of failing. If data was not prepared, it prints one line and exits. On SIGTERM it accepts no more
requests, answers those it has, and exits.
"""  # noqa: E501 - a table.

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import click
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from research import indexes
from research.batching import Batcher, Closed, Full, Limits
from research.corpus import Chunk, load_chunks
from research.embedding_model import model_folder
from research.indexes import Hit, Index, Kind, Shard
from research.prepare import missing
from research.retrieval_client import LONGEST_QUERY

MOST_QUERIES = 256
MOST_HITS = 100
SECONDS_TO_DRAIN = 10
DEFAULTS = Limits()


class QueryInvalid(ValueError):
    """The request is malformed; the message names the field."""


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The parameters of `POST /search`."""

    queries: list[str]
    count: int
    kind: Kind

    @classmethod
    def parse(cls, body: bytes, kinds: Sequence[Kind]) -> SearchRequest:
        """Parses a request body. Raises QueryInvalid."""
        try:
            document: object = json.loads(body)
        except ValueError as error:
            raise QueryInvalid(f"the body is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise QueryInvalid("the body is not a JSON object")
        fields = cast("dict[str, object]", document)
        queries, count = fields.get("queries"), fields.get("count", 3)
        kind = fields.get("kind", kinds[0])
        if (
            not isinstance(queries, list)
            or not 1 <= len(cast("list[object]", queries)) <= MOST_QUERIES
        ):
            raise QueryInvalid(f"queries: a list of 1 to {MOST_QUERIES}")
        for query in cast("list[object]", queries):
            if not isinstance(query, str) or len(query) > LONGEST_QUERY:
                raise QueryInvalid(f"queries: texts of at most {LONGEST_QUERY} characters")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_HITS:
            raise QueryInvalid(f"count: 1 to {MOST_HITS}, got {count!r}")
        if kind not in kinds:
            raise QueryInvalid(f"kind: one of {', '.join(kinds)}, got {kind!r}")
        return cls(cast("list[str]", queries), count, cast("Kind", kind))


class Retrieval:
    """The loaded shard and its batchers."""

    def __init__(
        self, chunks: Sequence[Chunk], opened: dict[Kind, Index], shard: Shard, limits: Limits
    ) -> None:
        self._chunks, self._shard = chunks, shard
        self._batchers: dict[Kind, Batcher[tuple[str, int], list[Hit]]] = {
            kind: Batcher(partial(_search, index), limits) for kind, index in opened.items()
        }

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of index it has; the first is the default of a request."""
        return tuple(self._batchers)

    async def search(self, request: SearchRequest) -> list[list[dict[str, object]]]:
        """Searches all queries of a request; returns each one's hits. Raises Full and Closed."""
        batcher = self._batchers[request.kind]
        found = await asyncio.gather(
            *(batcher.submit((query, request.count)) for query in request.queries)
        )
        return [[self._show(hit) for hit in hits] for hits in found]

    def health(self) -> dict[str, object]:
        """What the server serves, and its counters."""
        first, end = self._shard.bounds(len(self._chunks))
        return {
            "status": "serving",
            "shard": str(self._shard),
            "chunks": end - first,
            "kinds": list(self.kinds),
            "waiting": sum(each.waiting for each in self._batchers.values()),
            "batches": sum(each.batches for each in self._batchers.values()),
            "requests": sum(each.requests for each in self._batchers.values()),
        }

    async def close(self) -> None:
        """Answers accepted requests, and accepts no more."""
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))

    def _show(self, hit: Hit) -> dict[str, object]:
        chunk = self._chunks[hit.chunk_id]
        return {
            "chunk_id": hit.chunk_id,
            "score": hit.score,
            "title": chunk.title,
            "text": chunk.text,
        }


def _search(index: Index, batch: Sequence[tuple[str, int]]) -> list[list[Hit]]:
    """Searches a batch in one pass over the index; its queries may want different numbers of hits."""
    found = index.search([query for query, _ in batch], max(count for _, count in batch))
    return [hits[:count] for hits, (_, count) in zip(found, batch, strict=True)]


def make_app(folder: Path, kinds: Sequence[Kind], shard: Shard, limits: Limits) -> Starlette:
    """The application, over indexes that are already built."""
    serving: list[Retrieval] = []

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        chunks, opened = await asyncio.to_thread(_open, folder, kinds, shard)
        retrieval = Retrieval(chunks, opened, shard, limits)
        serving.append(retrieval)
        yield
        await retrieval.close()

    async def search(request: Request) -> JSONResponse:
        retrieval = serving[0]
        try:
            wanted = SearchRequest.parse(await request.body(), retrieval.kinds)
            return JSONResponse({"hits": await retrieval.search(wanted)})
        except QueryInvalid as error:
            return _refuse(400, "FIELD_INVALID", str(error))
        except Full:
            return _refuse(503, "OVERLOADED", "too many queries are waiting")
        except Closed:
            return _refuse(503, "STOPPING", "the server is stopping")

    async def health(_: Request) -> JSONResponse:
        return JSONResponse(serving[0].health())

    routes = [
        Route("/search", search, methods=["POST"]),
        Route("/health", health, methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def _open(
    folder: Path, kinds: Sequence[Kind], shard: Shard
) -> tuple[list[Chunk], dict[Kind, Index]]:
    encode = indexes.sentence_encoder(model_folder()) if "embeddings" in kinds else None
    opened: dict[Kind, Index] = {kind: indexes.load(folder, kind, shard, encode) for kind in kinds}
    return load_chunks(folder), opened


def _refuse(status: int, reason: str, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"reason": reason, "message": message}, status, headers)


class _Announced(uvicorn.Server):
    """Prints its address once it serves."""

    def __init__(self, config: uvicorn.Config, words: str) -> None:
        super().__init__(config)
        self._words = words

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn does, and then prints the address."""
        await super().startup(sockets)
        if self.started:
            print(self._words, flush=True)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--listen", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT")
@click.option("--shard", default="1/1", show_default=True, metavar="NUMBER/COUNT")
@click.option("--kinds", default="bm25", show_default=True, metavar="bm25,embeddings")
@click.option(
    "--window",
    type=click.FloatRange(min=0),
    default=DEFAULTS.window_seconds,
    show_default=True,
    metavar="SECONDS",
    help="How long the first query of a batch waits for others.",
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=DEFAULTS.max_batch,
    show_default=True,
    metavar="QUERIES",
)
def main(folder: Path, listen: str, shard: str, kinds: str, window: float, max_batch: int) -> None:
    """Serve a shard of the corpus in FOLDER."""
    try:
        chosen = indexes.parse_kinds(kinds)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        part = Shard.parse(shard)
    except ValueError as error:
        raise click.UsageError(f"--shard: {error}") from error
    # Checked here, because uvicorn would report a later failure with a traceback.
    if lacks := missing(folder, chosen):
        sys.exit(f"retrieval_server: {lacks}")
    host, _, port = listen.rpartition(":")
    listening = socket.create_server((host, int(port)), backlog=1024)
    host, port = listening.getsockname()[:2]
    app = make_app(folder, chosen, part, Limits(window_seconds=window, max_batch=max_batch))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=SECONDS_TO_DRAIN
    )
    server = _Announced(config, f"retrieval serving shard {part} at http://{host}:{port}")
    asyncio.run(server.serve([listening]))
    # uvicorn logs a failed start and returns normally.
    sys.exit(0 if server.started else 1)


if __name__ == "__main__":
    main()
