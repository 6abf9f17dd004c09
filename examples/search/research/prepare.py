"""Prepares the data: corpus, questions and indexes. They are built once; later calls return quickly.

Without the launcher: `python -m research.prepare --kinds bm25,embeddings`, which prints their folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from research import corpus, embedding_model, indexes
from research.corpus import CorpusUnavailable, Say
from research.indexes import Kind


def prepare(kinds: Sequence[Kind], say: Say) -> Path:
    """The folder of the corpus, with an index of each kind. Raises CorpusUnavailable."""
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


def missing(folder: Path, kinds: Sequence[Kind]) -> str:
    """One line on what a server of these kinds lacks, and how to create it; empty if it lacks nothing."""
    lacks = [
        f"{folder} has no {kind} index" for kind in kinds if not indexes.is_built(folder, kind)
    ]
    if not (folder / corpus.CHUNKS).exists():
        lacks.append(f"{folder} has no {corpus.CHUNKS}")
    if "embeddings" in kinds and not embedding_model.model_folder().is_dir():
        lacks.append(f"the embedding model is not at {embedding_model.model_folder()}")
    # Installation comes first, because indexing needs the packages.
    steps = [indexes.not_installed(kinds)]
    if lacks:
        command = f"{sys.executable} -m research.prepare --kinds {','.join(kinds)}"
        steps.append(f"{', '.join(lacks)}: `{command}` makes what is missing and prints its folder")
    return "; ".join(step for step in steps if step)


@click.command()
@click.option("--kinds", default="bm25", show_default=True, metavar="bm25,embeddings")
def main(kinds: str) -> None:
    """Build the corpus and its indexes if necessary, and print their folder."""
    try:
        chosen = indexes.parse_kinds(kinds)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if wanting := indexes.not_installed(chosen):
        sys.exit(f"prepare: {wanting}")
    try:
        print(prepare(chosen, lambda text: print(text, file=sys.stderr, flush=True)))
    except CorpusUnavailable as error:
        sys.exit(f"prepare: {error}")


if __name__ == "__main__":
    main()
