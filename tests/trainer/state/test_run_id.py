"""The id that tells one start of a run from another in the same folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.trainer.core.errors import StorageFailed
from penstock.trainer.state.run_id import new_start_id, read_start_id, remove_start_id


def test_the_id_of_a_folder_is_that_of_its_last_start(tmp_path: Path) -> None:
    assert read_start_id(tmp_path) == ""
    first = new_start_id(tmp_path)
    second = new_start_id(tmp_path)
    assert first and read_start_id(tmp_path) == second != first
    assert [path.name for path in tmp_path.iterdir()] == ["start"]
    for _ in range(2):
        remove_start_id(tmp_path)
        assert read_start_id(tmp_path) == ""


def test_a_start_that_nobody_can_resume_leaves_nothing(tmp_path: Path) -> None:
    assert new_start_id(None) != new_start_id(None)
    assert not list(tmp_path.iterdir())


def test_an_id_that_cannot_be_written_is_not_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_start_id(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageFailed, match="start: No space left on device"):
            new_start_id(tmp_path)
        with pytest.raises(StorageFailed):
            remove_start_id(tmp_path / "none")
    assert read_start_id(tmp_path) == first
    assert read_start_id(tmp_path) != new_start_id(tmp_path) == read_start_id(tmp_path)
