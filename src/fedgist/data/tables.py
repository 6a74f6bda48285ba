"""Tables: two that come with scikit-learn, and any that lies in a folder as train.csv, test.csv and columns.toml.

What the columns mean is public and the same for everybody, so it is in a file of its own and never guessed from rows:

    target = "diagnosis"
    classes = ["malignant", "benign"]

    [numeric]                                # numbers, in this order; mean and std where they are public
    age = {mean = 54.1, std = 9.0}
    pulse = {}

    [categorical]                            # one-hot after them, in the order of these words
    sex = ["f", "m"]
"""

import csv
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.core.errors import FedgistError
from fedgist.data.files import Images, Reader, checked, naming_file

EMBEDDED = ("breast_cancer", "wine")
COLUMNS = "columns.toml"
AS_TEXT = "save it as text in UTF-8 (in Excel: CSV UTF-8)"
FILES = ("train.csv", "test.csv", COLUMNS)


@dataclass(frozen=True)
class Columns:
    """What a row holds: which columns are numbers, which are words and of which, and which says the class."""

    target: str
    classes: tuple[str, ...]
    numeric: dict[str, tuple[float, float] | None]
    """Mean and deviation, where they are public."""
    categorical: dict[str, tuple[str, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the numbers that a model is given."""
        return (*self.numeric, *(f"{name}={value}" for name, words in self.categorical.items() for value in words))

    @property
    def numbers(self) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
        """Mean and deviation of each; categories stay 0 and 1."""
        known = [*(both or (None, None) for both in self.numeric.values())]
        known += [(0.0, 1.0)] * sum(map(len, self.categorical.values()))
        return tuple(mean for mean, _ in known), tuple(std for _, std in known)


def embedded(name: str) -> Images:
    """A table of scikit-learn."""
    from sklearn import datasets  # imported here: it takes a second that most runs need not spend

    source = getattr(datasets, f"load_{name}")()
    classes, columns = (tuple(map(str, names)) for names in (source.target_names, source.feature_names))
    return Images(source.data.astype(np.float32), source.target.astype(np.int64), 1, names=classes, columns=columns)


def find(folder: Path) -> Reader | None:
    """Reads train.csv and test.csv by columns.toml."""
    return partial(_read, folder) if all((folder / name).is_file() for name in FILES) else None


def _read(folder: Path) -> tuple[Images, Images]:
    columns = read_columns(folder / COLUMNS)
    train, test = (read_csv(folder / name, columns) for name in FILES[:2])
    return train, test


def read_columns(path: Path) -> Columns:
    """The public description of a table."""
    with naming_file(path, "docs/data.md shows such a file"):
        told = tomllib.loads(path.read_text("utf-8"))
    if strangers := told.keys() - {"target", "classes", "numeric", "categorical"}:
        raise FedgistError(f"{path}: {min(strangers)!r} is not known; it has target, classes, numeric and categorical")
    numeric, categorical = told.get("numeric", {}), told.get("categorical", {})
    words = {"classes": told.get("classes"), **{f"categorical.{name}": value for name, value in categorical.items()}}
    for name, value in words.items():
        if not _are_words(value):
            raise FedgistError(f"{path}: {name} must be a list of at least two different words, not {value!r}")
    if not isinstance(told.get("target"), str) or told["target"] in (*numeric, *categorical):
        raise FedgistError(f"{path}: target must name the column that says the class, which is no input")
    if not (numeric or categorical) or numeric.keys() & categorical.keys():
        raise FedgistError(f"{path}: each column is either in numeric or in categorical, and there must be one")
    known = {name: _moments(path, name, about) for name, about in numeric.items()}
    categories = {name: tuple(values) for name, values in categorical.items()}
    return Columns(told["target"], tuple(told["classes"]), known, categories)


def _are_words(value: Any) -> bool:
    good = isinstance(value, list) and all(isinstance(word, str) for word in value)
    return good and len(value) == len(set(value)) >= 2


def _moments(path: Path, name: str, about: Any) -> tuple[float, float] | None:
    if about == {}:
        return None
    try:
        mean, std = float(about["mean"]), float(about["std"])
        good = about.keys() == {"mean", "std"} and math.isfinite(mean) and 0 < std < math.inf
    except (TypeError, KeyError, ValueError, AttributeError):
        good = False
    if not good:
        raise FedgistError(f"{path}: {name} must be {{mean = …, std = …}} with std above 0, or {{}}, not {about!r}")
    return mean, std


def read_csv(path: Path, columns: Columns) -> Images:
    """The rows of a file with a heading, whose columns may be in any order."""
    heading, rows = read_rows(path)
    wanted = [*columns.numeric, *columns.categorical, columns.target]
    if missing := [name for name in wanted if name not in heading]:
        raise FedgistError(f"{path}: there is no column {missing[0]!r}; its heading has {', '.join(heading)}")
    x = encode(path, heading, rows, columns.numeric, columns.categorical)
    target = heading.index(columns.target)
    numbers = {name: label for label, name in enumerate(columns.classes)}
    labels = [known(path, i, columns.target, row[target], numbers) for i, row in enumerate(rows, 2)]
    made = checked(str(path), x, np.array(labels, np.int64), 1)
    mean, std = columns.numbers
    return Images(made.pixels, made.labels, 1, None, columns.classes, mean, std, columns.names)


def read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """The heading and the rows of a file."""
    with naming_file(path, AS_TEXT), path.open(encoding="utf-8-sig", newline="") as file:
        heading, *rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row] or [[]]
    if len(heading) == 1 and (other := set(heading[0]) & {";", "\t"}):
        raise FedgistError(f"{path}: its columns are separated by {other.pop()!r}; write commas, and 54.1, not 54,1")
    if not rows:
        raise FedgistError(f"{path}: it needs a heading and rows")
    if len(heading) != len(set(heading)):
        raise FedgistError(f"{path}: a name occurs twice in its heading")
    for i, row in enumerate(rows, 2):
        if len(row) != len(heading):
            raise FedgistError(f"{path}: row {i} has {len(row)} cells, the heading {len(heading)}")
    return heading, rows


def encode(
    path: Path,
    heading: Sequence[str],
    rows: Sequence[Sequence[str]],
    numeric: Iterable[str],
    categorical: Mapping[str, Sequence[str]],
) -> np.ndarray:
    """Rows as numbers: those of the numeric columns, then a 1 among 0s for each category."""
    parts = []
    for name in numeric:
        cells = [row[heading.index(name)] for row in rows]
        parts.append(np.array([[_number(path, i, name, cell)] for i, cell in enumerate(cells, 2)], np.float32))
    for name, words in categorical.items():
        cells, places = [row[heading.index(name)] for row in rows], {word: k for k, word in enumerate(words)}
        chosen = [known(path, i, name, cell, places) for i, cell in enumerate(cells, 2)]
        parts.append(np.eye(len(words), dtype=np.float32)[chosen])
    return np.concatenate(parts, 1)


def _number(path: Path, row: int, name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FedgistError(f"{path}: row {row}: {name} must be a number, not {cell!r}; fill it in or leave the row out")
    return value


def known(path: Path, row: int, name: str, cell: str, words: Mapping[str, int]) -> int:
    """The number of a word that is listed for its column."""
    if cell not in words:
        raise FedgistError(f"{path}: row {row}: {name} is {cell!r}, and only {', '.join(words)} are listed for it")
    return words[cell]


def write(folder: Path, split: str, images: Images, classes: int) -> None:
    """Writes what `find` reads; a table of numbers alone."""
    from fedgist import storage  # with torch, which those who only look for files need not wait for

    if images.pixels.ndim != 2:
        raise FedgistError("csv holds tables; choose npz")
    names = images.columns or tuple(f"x{i}" for i in range(images.pixels.shape[1]))
    words = images.names or tuple(map(str, range(classes)))
    with storage.replacing(folder / f"{split}.csv") as draft, draft.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow([*names, "class"])
        for values, label in zip(images.pixels, images.labels, strict=True):
            rows.writerow([*(np.format_float_positional(value, trim="-") for value in values), words[label]])
    numbers = zip(images.mean, images.std, strict=True) if images.mean else [(None, None)] * len(names)
    lines = ['target = "class"', f"classes = {json.dumps(words, ensure_ascii=False)}", "", "[numeric]"]
    for name, (mean, std) in zip(names, numbers, strict=True):
        known = "{}" if mean is None else f"{{mean = {mean!r}, std = {std!r}}}"
        lines.append(f"{json.dumps(name, ensure_ascii=False)} = {known}")
    storage.write(folder / COLUMNS, ("\n".join(lines) + "\n").encode())
