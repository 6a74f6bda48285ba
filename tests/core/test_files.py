"""A file is the old one or the new one, whatever happens to whoever writes it."""

from pathlib import Path

import pytest

from fedgist.storage import replacing


def test_a_file_appears_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "below" / "that" / "file"
    with replacing(path) as draft:
        draft.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


def test_what_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("ne")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
