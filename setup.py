"""The README as an index page shows it: with absolute links. Everything else is in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
IMAGE = re.compile(r"(!\[[^\]]*\]\()(?![a-z]+:|#)")
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()(?![a-z]+:|#)")


def long_description() -> str:
    """An index page has no files beside it, so relative links lead to the repository on the web."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project["urls"]["Repository"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = IMAGE.sub(rf"\g<1>{repository}/raw/main/", text)
    return LINK.sub(rf"\g<1>{repository}/blob/main/", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
