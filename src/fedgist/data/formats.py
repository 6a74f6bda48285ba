"""What a folder of images may hold: each format looks for its files, and gives a reader if they are all there.

EMNIST (Cohen et al. 2017): IDX files named emnist-SPLIT-train-images-idx3-ubyte and so on, their images transposed;
the letters are numbered from 1. MedMNIST (Yang et al. 2023): one `.npz` with both splits; its validation images are
left out.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np

from fedgist.core.errors import FedgistError
from fedgist.data import cifar, files, pictures, tables
from fedgist.data.cards import EMNIST_FILES
from fedgist.data.files import Images, Reader, arrays_in, check_forms, checked, read_idx

FILES = (
    "train.npz and test.npz, train.csv and test.csv with columns.toml, pictures in train/CLASS/ and test/CLASS/, "
    "or another of the formats in docs/data.md"
)
MEDMNIST_KEYS = {f"{split}_{part}" for split in ("train", "test") for part in ("images", "labels")}


def find(folder: Path) -> Reader | None:
    """Who reads the folder, or None where no data set is whole."""
    return next((reader for look in FORMATS if (reader := look(folder)) is not None), None)


def wanted(folder: Path) -> str:
    """The files that would make a folder a data set: those that a table in it lacks, or one of the formats."""
    lacking = [name for name in tables.FILES if not (folder / name).is_file()]
    return FILES if lacking == list(tables.FILES) else " and ".join(lacking)


def _find_npz_or_idx(folder: Path) -> Reader | None:
    return None if files.missing_splits(folder) else partial(files.read_folder, folder)


def _find_emnist(folder: Path) -> Reader | None:
    place = folder / "gzip" if (folder / "gzip").is_dir() else folder
    pattern = re.compile(r"emnist-(\w+)-train-images-idx3-ubyte(\.gz)?")
    splits = sorted({match[1] for path in place.glob("emnist-*") if (match := pattern.fullmatch(path.name))})
    found = {}
    for split in splits:
        either = [[place / f"emnist-{split}-{part}-ubyte{end}" for end in ("", ".gz")] for part in EMNIST_FILES]
        paths = [next(filter(Path.is_file, names), None) for names in either]
        if all(paths):
            found[split] = [path for path in paths if path]
    return partial(_read_emnist, folder, found) if found else None


def _read_emnist(folder: Path, found: dict[str, list[Path]]) -> tuple[Images, Images]:
    split = folder.name.removeprefix("emnist-") if len(found) > 1 else next(iter(found))
    if split not in found:
        names = ", ".join(f"emnist-{name}" for name in found)
        raise FedgistError(f"{folder} holds several splits of EMNIST; name the folder after the one to use: {names}")
    made = []
    for images, labels in (found[split][:2], found[split][2:]):
        pixels, numbers = emnist(split, read_idx(images, 3), read_idx(labels, 1))
        made.append(checked(f"{images} and {labels.name}", pixels, numbers))
    return check_forms(folder, made[0], made[1])


def emnist(split: str, pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """EMNIST's images upright; its letters, 1 to 26, from 0."""
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)), labels.astype(np.int64) - (split == "letters")


def _find_medmnist(folder: Path) -> Reader | None:
    """An `.npz` with both splits; among several, the one that has the folder's name, and that even if damaged."""
    keys = {path: _npz_keys(path) for path in sorted(folder.glob("*.npz"))}
    named = folder / f"{folder.name}.npz"
    paths = [path for path in keys if keys[path] >= MEDMNIST_KEYS or (path == named and not keys[path])]
    path = next((path for path in paths if path.stem == folder.name), paths[0] if len(paths) == 1 else None)
    return partial(_read_medmnist, path) if path else None


def _npz_keys(path: Path) -> set[str]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return set(archive.files)
    except Exception:  # damaged, or no archive at all: it is nothing for this reader
        return set()


def _read_medmnist(path: Path) -> tuple[Images, Images]:
    with arrays_in(path) as archive:
        content = {key: archive[key] for key in MEDMNIST_KEYS}
    train, test = (
        checked(str(path), content[f"{split}_images"], single_labels(str(path), content[f"{split}_labels"]))
        for split in ("train", "test")
    )
    return check_forms(path, train, test)


def single_labels(where: str, labels: np.ndarray) -> np.ndarray:
    """MedMNIST's labels [N, 1] as a list."""
    if labels.ndim == 2 and labels.shape[1] != 1:
        raise FedgistError(f"{where}: each image has {labels.shape[1]} labels; only sets with one can be used")
    return labels.reshape(len(labels))


FORMATS = (
    _find_npz_or_idx,
    tables.find,
    cifar.find,
    _find_emnist,
    _find_medmnist,
    pictures.find_leaf,
    pictures.find_classes,
)
