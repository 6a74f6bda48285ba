"""Trees and files on disk: what is read back, what a failed write leaves, what a digest sees."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist import storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.storage import replacing

tensors = st.builds(
    lambda shape, dtype: Rng(sum(shape)).normal(*shape).mul(10).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool]),
)


leaves = tensors | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.none() | st.booleans()


trees = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


@given(value=trees)
def test_save_and_load_give_back_the_same(value: Any, folder: Path) -> None:
    storage.save(value, folder / "t")
    again = storage.load(folder / "t")
    assert storage.digest(again) == storage.digest(value)
    assert tree.structure(again) == tree.structure(value)
    assert [path.name for path in folder.iterdir()] == ["t"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    storage.save({"a": 1}, tmp_path / "t")
    with pytest.raises(TypeError, match="not object"):
        storage.save({"a": object()}, tmp_path / "t")
    assert storage.load(tmp_path / "t") == {"a": 1}


def test_lines_are_whole_or_not_there(tmp_path: Path) -> None:
    """Half a line, of a writer that was killed or of a full disk, is no line, and spoils none of those after it."""
    path = tmp_path / "folder" / "lines"
    assert not list(storage.lines(path))
    for line in ("one", "of \u2028 two", ""):
        storage.append(path, line.encode())
    for half in (b"h", b"half a line that is longer than a line", b"\x00\x00"):
        with path.open("ab") as file:
            file.write(half)
        assert [line.decode() for line in storage.lines(path)] == ["one", "of \u2028 two", ""]
    storage.append(path, b"three")
    assert path.read_text("utf-8") == "one\nof \u2028 two\n\nthree\n"
    path.write_bytes(b"half")
    storage.append(path, b"one")
    assert path.read_bytes() == b"one\n"


def test_a_line_and_the_name_of_its_file_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    for _ in range(2):
        storage.append(tmp_path / "folder" / "lines", b"line")
    assert synced == ["lines", "folder", "lines"]
    storage.append(tmp_path / "folder" / "lines", b"line", synced=False)
    assert len(synced) == 3


def with_header(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode()


def described(tree: str) -> bytes:
    return with_header(json.dumps({"__metadata__": {"tree": tree}}))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 20,  # a header longer than any memory
        (2**40).to_bytes(8, "little") + b"{}",  # a header longer than the file
        *map(with_header, ("not json", "[]", "{}", '{"__metadata__":{}}')),
        *map(described, ("", "3", "[]", "{}", '{"dict":3}', '{"dict":[3]}', '{"tensor":"0"}', '{"tensor":[]}')),
        described("[" * 100_000),
    ],
    ids=lambda content: str(content[8:50]),
)
def test_what_is_no_saved_tree_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ValueError, match="t is damaged, or no tree that fedgist saved"):
        storage.load(tmp_path / "t")


def test_a_file_that_was_cut_anywhere_is_a_value_error(tmp_path: Path) -> None:
    storage.save({"a": torch.ones(3), "b": [1, None]}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "t").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged"):
            storage.load(tmp_path / "t")


def test_digest_sees_every_difference() -> None:
    base = {"a": torch.zeros(2), "b": (1, None)}
    different: list[Any] = [
        {"a": torch.zeros(2), "b": [1, None]},
        {"a": torch.zeros(2), "b": (1.0, None)},
        {"a": torch.zeros(2, 1), "b": (1, None)},
        {"a": torch.zeros(2, dtype=torch.int32), "b": (1, None)},
        {"a": torch.tensor([0.0, 1e-45]), "b": (1, None)},
        {"c": torch.zeros(2), "b": (1, None)},
    ]
    assert storage.digest(base) == storage.digest(tree.copy(base))
    assert len({storage.digest(value) for value in [base, *different]}) == 1 + len(different)


def test_digest_does_not_depend_on_the_order_of_keys() -> None:
    one, other = {"a": torch.ones(2), "b": [1, {"c": 2, "d": 3}]}, {"b": [1, {"d": 3, "c": 2}], "a": torch.ones(2)}
    assert storage.digest(one) == storage.digest(other)
    assert storage.digest(one) != storage.digest({"a": torch.ones(2), "b": [1, {"c": 3, "d": 2}]})


def test_what_is_loaded_lies_where_torch_puts_tensors(tmp_path: Path) -> None:
    """At multiples of 64 bytes: the last bit of a product depends on it, and with it whether a run resumes exactly."""
    storage.save([torch.ones(size) for size in (1, 3, 5, 7, 64)], tmp_path / "t")
    assert [tensor.data_ptr() % 64 for tensor in storage.load(tmp_path / "t")] == [0] * 5


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
