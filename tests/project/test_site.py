"""The documentation site: every page is in its menu, and every link within it leads somewhere."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def listed(entry: object) -> Iterator[str]:
    """The pages of a menu, in order."""
    match entry:
        case str():
            yield entry
        case list():
            for each in entry:
                yield from listed(each)
        case dict():
            for each in entry.values():
                yield from listed(each)
        case _:
            raise TypeError(entry)


class Page(HTMLParser):
    """The anchors of a page, and its links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.anchors.add(str(found["id"]))
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))


@pytest.fixture(scope="module")
def site() -> Path:
    subprocess.run([sys.executable, ".ci/site.py"], cwd=ROOT, check=True)
    built = subprocess.run(
        [str(Path(sys.executable).with_name("zensical")), "build", "--strict"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return BUILD / "site"


def test_the_menu_lists_every_page_once(site: Path) -> None:
    menu = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [path.relative_to(BUILD / "pages") for path in (BUILD / "pages").rglob("*.md")]
    assert sorted(listed(menu)) == sorted(map(str, pages))


def test_every_link_of_the_site_leads_to_a_page_and_a_heading(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    broken: list[str] = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = pages.get(target)
            if not target.exists() or (
                there is not None
                and parts.fragment
                and unquote(parts.fragment) not in there.anchors | {"__top"}
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []
