"""Data preparation: corpus, questions, indexes; made once, and a moment when they are there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from research import corpus, embedding_model, indexes
from research.corpus import Say
from research.indexes import Kind


def prepare(kinds: Sequence[Kind], say: Say) -> Path:
    """The folder of the corpus with an index of each kind. Raises CorpusUnavailable."""
    folder = corpus.prepare(say)
    for kind in kinds:
        if indexes.is_built(folder, kind):
            continue
        encode = None
        if kind == "embeddings":
            encode = indexes.sentence_encoder(embedding_model.prepare(say))
        chunks = corpus.load_chunks(folder)
        say(f"indexing {len(chunks)} chunks by {kind} (once)")
        indexes.build(folder, kind, [f"{each.title}: {each.text}" for each in chunks], encode)
    return folder
