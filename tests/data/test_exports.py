"""Data sets written in each format, whole or in parts, and read back."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.errors import FedgistError
from fedgist.data import datasets, exports, formats
from fedgist.data.files import Images


def read(folder: Path) -> tuple[Images, Images]:
    found = formats.find(folder)
    assert found is not None
    return found()


@pytest.mark.parametrize("form", sorted(exports.FORMS.keys() - {"csv"}))  # of tables: test_tables.py
def test_what_is_exported_is_read_back(form: str, tmp_path: Path) -> None:
    """Labels exactly; pixels to a rounded 255th, where a file has no other scale. Pictures come back class by class."""
    if form == "pictures":
        pytest.importorskip("PIL")
    done = CliRunner().invoke(app, ["data", "export", "digits", str(tmp_path), "--format", form, "--part", "2/3"])
    assert done.exit_code == 0, done.output
    for whole, found in zip(datasets.load("digits", normalise="unit"), read(tmp_path / "digits"), strict=True):
        pixels, labels = whole.x[1::3, 0].numpy(), whole.y[1::3].numpy()
        order = np.argsort(labels, kind="stable") if form == "pictures" else np.arange(len(labels))
        assert found.labels.tolist() == labels[order].tolist()
        assert np.abs(found.pixels / found.peak - pixels[order]).max() <= 0.501 / 255


def test_the_parts_make_the_whole() -> None:
    images = Images(np.zeros((7, 2, 2), np.uint8), np.arange(7))
    parts = [exports.part(images, f"{k}/3").labels.tolist() for k in (1, 2, 3)]
    assert parts == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [*((spec, "K/N") for spec in ("0/3", "4/3", "3", "a/b", "-1/3")), ("8/9", "of 7 images is empty")],
)
def test_a_part_that_cannot_be(spec: str, problem: str) -> None:
    with pytest.raises(FedgistError, match=problem):
        exports.part(Images(np.zeros((7, 2, 2), np.uint8), np.arange(7)), spec)


def test_an_unknown_format_and_colour_in_idx(tmp_path: Path) -> None:
    colour = Images(np.zeros((2, 4, 4, 3), np.uint8), np.arange(2))
    with pytest.raises(FedgistError, match="did you mean 'npz'"):
        exports.write(tmp_path, colour, colour, "npy")
    with pytest.raises(FedgistError, match="grey"):
        exports.write(tmp_path, colour, colour, "idx")


@pytest.mark.parametrize(("train", "test"), [([0, 1, 3, 4], [4, 0]), (range(12), range(9)), ([1, 2], [0, 11])])
def test_pictures_keep_the_numbers_of_classes_that_are_not_there(
    train: Sequence[int], test: Sequence[int], tmp_path: Path
) -> None:
    """As in a part of a data set that has no image of some class, or none in one of its splits."""
    pytest.importorskip("PIL")
    splits = [Images(np.zeros((len(labels), 4, 4), np.uint8), np.array(labels)) for labels in (train, test)]
    exports.write(tmp_path / "emnist-byclass", splits[0], splits[1], "pictures")
    read_back = datasets.load("emnist-byclass", tmp_path)
    assert [split.y.tolist() for split in read_back] == [sorted(train), sorted(test)]
