"""How the end of a process is put in words."""

from __future__ import annotations

import pytest

from penstock.common.answers import ending


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited 0"),
        (3, "exited 3"),
        (-9, "was ended by SIGKILL"),
        (-4, "was ended by SIGILL"),
        (-40, "was ended by signal 40"),
    ],
)
def test_an_ending_names_its_signal(status: int, words: str) -> None:
    assert ending(status) == words
