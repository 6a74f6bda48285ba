"""Inputs for a trained model, from files: `.npz`, a folder of pictures, or `.csv`, on the scale of the raw data."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.data import tables
from fedgist.data.files import arrays_in, checked, naming_file
from fedgist.data.pictures import SUFFIXES, read_pictures

LABELS = ("y", "label", "labels")
"""The names of a column, or an array, that says what the samples are."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of one file."""

    names: list[str]
    x: Tensor
    """float32 [samples, *shape]; full intensity of a picture is 1."""
    y: Tensor | None
    """int64, where the file says what the samples are."""


def read(
    path: Path,
    shape: tuple[int, ...],
    peak: float | None = None,
    columns: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
) -> Samples:
    """The samples in a file, each of `shape`; `peak` is the value of full intensity, where the file does not say it.

    With `columns`, those of a `.csv` are found by their names; its labels may be the names of `classes`.
    """
    if path.is_dir():
        return _read_folder(path, shape)
    if not path.is_file():
        raise FedgistError(f"there is no file or folder {path}")
    if path.suffix.lower() in SUFFIXES:
        return _pictures(path, [path], [path.name], shape)
    if columns and path.suffix.lower() == ".csv":
        return _read_table(path, columns, classes or ())
    readers = {".npz": _read_npz, ".csv": _read_csv}
    if path.suffix.lower() not in readers:
        raise FedgistError(f"{path} is neither .npz nor .csv, no picture, and no folder of pictures")
    return readers[path.suffix.lower()](path, shape, peak)


def _read_folder(folder: Path, shape: tuple[int, ...]) -> Samples:
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise FedgistError(f"there are no pictures in {folder}")
    return _pictures(folder, paths, [path.relative_to(folder).as_posix() for path in paths], shape)


def _pictures(where: Path, paths: Sequence[Path], names: list[str], shape: tuple[int, ...]) -> Samples:
    return Samples(names, _from_bytes(str(where), read_pictures(paths), shape, 255), None)


def _read_npz(path: Path, shape: tuple[int, ...], peak: float | None) -> Samples:
    """`x` (or `images`) and, if there is one, `y` (or `labels`); whole numbers are pixels, others have `shape`."""
    with arrays_in(path) as arrays:
        keys = list(arrays)
        held = {key: arrays[key] for key in ("x", "images", *LABELS, "peak") if key in keys}
        peak = peak or (float(held["peak"]) if "peak" in held else None)
    values = held.get("x", held.get("images"))
    if values is None:
        raise FedgistError(f"{path} must be an .npz with a key 'x' (or 'images'); it has {sorted(keys)}")
    labels = next((held[key] for key in LABELS if key in held), None)
    if peak is not None and not 0 < peak < math.inf:
        raise FedgistError(f"{path}: peak must be above 0, not {peak:g}")
    pixels = values.dtype == np.uint8
    convert = _from_bytes if pixels and values.shape[1:] != shape else _scaled
    x = convert(str(path), values, shape, peak or (255 if pixels else 1))
    return Samples([f"{path.name}:{i}" for i in range(len(x))], x, _labels(str(path), labels, len(x)))


def _read_csv(path: Path, shape: tuple[int, ...], peak: float | None) -> Samples:
    """A sample a row, its values in the order of `shape`; with a heading, a column `y` or `label` is its label."""
    with naming_file(path), path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    heading = rows[0] if rows and not all(map(_is_number, rows[0])) else None
    rows = rows[1:] if heading else rows
    if not rows:
        raise FedgistError(f"{path}: there are no rows in it")
    try:
        table = np.array(rows, np.float64)
    except ValueError:
        number, cell = next(
            ((i, cell) for i, row in enumerate(rows, 1 + bool(heading)) for cell in row if not _is_number(cell)),
            (0, ""),
        )
        what = f"row {number} holds {cell[:40]!r}, which is no number" if number else "not all rows are equally long"
        raise FedgistError(f"{path}: {what}; the model takes {math.prod(shape)} numbers a row") from None
    column = next((i for i, name in enumerate(heading or []) if name.strip().lower() in LABELS), None)
    labels = None if column is None else table[:, column]
    values = table if column is None else np.delete(table, column, 1)
    if values.shape[1] != math.prod(shape):
        raise FedgistError(f"{path}: a row has {values.shape[1]} values, but the model takes {math.prod(shape)}")
    x = _scaled(str(path), values.reshape(-1, *shape), shape, peak or 1)
    return Samples([f"{path.name}:{i}" for i in range(len(x))], x, _labels(str(path), labels, len(x)))


def _read_table(path: Path, columns: Sequence[str], classes: Sequence[str]) -> Samples:
    """A sample a row, its columns in any order; one that is left over is the label."""
    heading, rows = tables.read_rows(path)
    numeric = [name for name in columns if name in heading]
    categorical: dict[str, list[str]] = {}
    for column in [name for name in columns if name not in heading]:
        name = next((name for name in heading if column.startswith(f"{name}=")), None)
        if name is None:
            raise FedgistError(f"{path}: there is no column {column.partition('=')[0]!r}, which the model takes")
        categorical.setdefault(name, []).append(column.removeprefix(f"{name}="))
    left = [name for name in heading if name not in numeric and name not in categorical]
    target = next((name for name in left if len(left) == 1 or name.lower() in LABELS), None)
    x = torch.tensor(tables.encode(path, heading, rows, numeric, categorical))
    labels = None
    if target is not None:
        known = {name: label for label, name in enumerate(classes)} | {str(i): i for i in range(len(classes))}
        cells = [row[heading.index(target)] for row in rows]
        labels = torch.tensor([tables.known(path, i, target, cell, known) for i, cell in enumerate(cells, 2)])
    return Samples([f"{path.name}:{i}" for i in range(len(x))], x, labels)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _from_bytes(where: str, pixels: np.ndarray, shape: tuple[int, ...], peak: float) -> Tensor:
    """Pictures as in a data set's files: NHW or NHWC; grey ones serve a model of colours, too."""
    planes = checked(where, pixels, np.zeros(len(pixels), np.int64), int(peak)).planes
    if len(shape) == 3 and planes.shape[1] == 1 < shape[0]:
        planes = planes.repeat(shape[0], 1)
    return _scaled(where, planes, shape, peak)


def _scaled(where: str, values: np.ndarray, shape: tuple[int, ...], peak: float) -> Tensor:
    if values.shape[1:] != shape or values.dtype.kind not in "uif":
        ours, theirs = ("×".join(map(str, sides)) or "of one value" for sides in (values.shape[1:], shape))
        raise FedgistError(f"{where}: its samples have the form {ours} ({values.dtype}), but the model takes {theirs}")
    if not len(values) or not np.isfinite(values).all():
        raise FedgistError(f"{where}: {'not all values are finite numbers' if len(values) else 'there are no samples'}")
    return torch.tensor(np.ascontiguousarray(values)).float() / peak


def _labels(where: str, labels: np.ndarray | None, count: int) -> Tensor | None:
    if labels is None:
        return None
    if labels.shape != (count,) or labels.dtype.kind not in "uif" or (labels < 0).any() or (labels % 1).any():
        raise FedgistError(f"{where}: labels must be {count} whole numbers from 0, one for each sample")
    return torch.tensor(labels.astype(np.int64))
