"""Gathers the pages of the documentation site in build/pages: `make site` builds them with zensical.

The pages of docs/ keep their places. Pages beside the code they describe, such as proto/README.md, get a
place among them (`ELSEWHERE`), with the pictures they show. A link to any other file leads to the
repository on the web, because the documentation site has no such file.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
ELSEWHERE = {
    "proto/README.md": "reference/contract.md",
    "clients/typescript/README.md": "guides/typescript.md",
    "clients/go/README.md": "guides/go.md",
    "examples/math/README.md": "examples/math.md",
    "examples/coding/README.md": "examples/coding.md",
    "examples/search/README.md": "examples/search.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def main() -> None:
    settings = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    shutil.rmtree(PAGES, ignore_errors=True)
    for source in sorted((ROOT / "docs").rglob("*")):
        if source.is_file():
            write(source, source.relative_to(ROOT / "docs"), settings["repo_url"])
    for path, place in ELSEWHERE.items():
        if place != "index.md":
            write(ROOT / path, Path(place), settings["repo_url"])
    shutil.copy(ROOT / ".ci" / "site.css", PAGES)


def write(source: Path, place: Path, repository: str) -> None:
    """Copies a file; the links of a page are those that hold at its new place."""
    target = PAGES / place
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix != ".md":
        shutil.copy(source, target)
        return

    def follow(match: re.Match[str]) -> str:
        path, hash_, fragment = match[2].partition("#")
        if "://" in path or not path:
            return match[0]
        there = (source.parent / path).resolve().relative_to(ROOT).as_posix()
        if there in ELSEWHERE:
            there = f"docs/{ELSEWHERE[there]}"
        if there.startswith("docs/"):
            link = os.path.relpath(there.removeprefix("docs/"), place.parent)
        elif there.endswith(".png"):
            shutil.copy(ROOT / there, target.parent)
            link = Path(there).name
        else:
            link = f"{repository}/blob/main/{there}"
        return f"{match[1]}{link}{hash_}{fragment}{match[3]}"

    target.write_text(LINK.sub(follow, source.read_text()))


if __name__ == "__main__":
    main()
