"""Samples and labels in files: IDX (LeCun's MNIST format, gzipped or not) and `.npz`, read without trusting them.

A folder holds two splits, `train` and `test`. Each is either `.npz` with the keys `images` (uint8, NHW or NHWC; or any
other array as float32 or uint16, channels first) and `labels`, whole (`train.npz`) or in parts (`train_1.npz`,
`train_2.npz`, …), or a pair of IDX files.
"""

import gzip
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedgist.core.errors import FedgistError

IDX_PREFIXES = {"train": ("train",), "test": ("t10k", "test")}
LARGEST_NUMBER = 2**31 - 1
"""Of a class or a group."""
DEFLATE_RATIO = 1032  # no gzip stream unpacks to more than this multiple of its size


@dataclass(frozen=True, eq=False)
class Images:
    """One split as it lies in a file."""

    pixels: np.ndarray
    """Pictures as uint8, NHW or NHWC; any other array as float32 or uint16, its channels (or columns) first."""
    labels: np.ndarray
    """int64, one for each image."""
    peak: float = 255
    """The value that stands for full intensity, or 1 where there is no such thing."""
    groups: np.ndarray | None = None
    """int64, who each image is from (a writer, a person, a hospital), where that is known."""
    names: tuple[str, ...] = ()
    """Of the classes, where the files say them."""
    mean: tuple[float | None, ...] = ()
    """Public numbers of each channel by which everybody normalises, where the files state them, on the scale of 1."""
    std: tuple[float | None, ...] = ()
    columns: tuple[str, ...] = ()
    """Of a table; a category is called NAME=VALUE."""

    @property
    def planes(self) -> np.ndarray:
        """The values with channels first, as a model takes them."""
        if self.pixels.dtype != np.uint8:
            return self.pixels
        return (self.pixels if self.pixels.ndim == 4 else self.pixels[..., None]).transpose(0, 3, 1, 2)


Reader = Callable[[], tuple[Images, Images]]
"""Reads the train and the test split of a folder in which they were found."""


def read_folder(folder: Path) -> tuple[Images, Images]:
    """The train and the test split that lie in a folder."""
    train, test = (_read_split(folder, split) for split in ("train", "test"))
    return check_forms(folder, train, test)


def check_forms(where: Path | str, train: Images, test: Images) -> tuple[Images, Images]:
    """Both splits, if they have the same form."""
    if train.pixels.shape[1:] != test.pixels.shape[1:] or train.peak != test.peak:
        raise FedgistError(
            f"{where}: the train images (shape {train.pixels.shape[1:]}, peak {train.peak}) and the test images "
            f"(shape {test.pixels.shape[1:]}, peak {test.peak}) differ; both splits must have the same form"
        )
    return train, test


def missing_splits(folder: Path) -> list[str]:
    """Which of `train` and `test` a folder lacks."""
    return [split for split in ("train", "test") if not (_npz_files(folder, split) or _idx_pair(folder, split))]


def wanted_files(split: str) -> str:
    """The files that would supply a split, in words."""
    prefix = IDX_PREFIXES[split][0]
    return f"{prefix}-images-idx3-ubyte[.gz] with {prefix}-labels-idx1-ubyte[.gz] (or {split}.npz, or {split}_1.npz …)"


def _read_split(folder: Path, split: str) -> Images:
    if paths := _npz_files(folder, split):
        _check_parts(folder, split, list(paths))
        return _join(list(paths.values()))
    if pair := _idx_pair(folder, split):
        return checked(f"{pair[0]} and {pair[1].name}", read_idx(pair[0], 3), read_idx(pair[1], 1))
    raise FedgistError(f"{folder} has no {split} split; it needs {wanted_files(split)}")


def _npz_files(folder: Path, split: str) -> dict[int, Path]:
    """`train.npz` as number -1 and its parts by their numbers, in that order."""
    whole = folder / f"{split}.npz"
    found = (re.fullmatch(rf"{split}_(\d+)\.npz", path.name) for path in folder.glob(f"{split}_*.npz"))
    parts = {int(match[1]): folder / match[0] for match in found if match}
    return dict(sorted((({-1: whole} if whole.is_file() else {}) | parts).items()))


def _check_parts(folder: Path, split: str, numbers: list[int]) -> None:
    """An ambiguous or incomplete list of files is refused, not guessed at."""
    if numbers[0] == -1 and len(numbers) > 1:
        raise FedgistError(f"{folder} holds both {split}.npz and {split}_{numbers[1]}.npz; remove one kind of the two")
    if gaps := set(range(min(1, numbers[0]), numbers[-1])) - set(numbers):
        raise FedgistError(f"{folder} lacks {split}_{min(gaps)}.npz, though it has {split}_{numbers[-1]}.npz")


def _idx_pair(folder: Path, split: str) -> tuple[Path, Path] | None:
    for prefix in IDX_PREFIXES[split]:
        pair = [
            next((path for end in ("", ".gz") if (path := folder / f"{prefix}-{name}{end}").is_file()), None)
            for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
        ]
        if pair[0] and pair[1]:
            return pair[0], pair[1]
    return None


def _join(paths: list[Path]) -> Images:
    parts = [read_npz(path) for path in paths]
    first = parts[0]
    for path, part in zip(paths, parts, strict=True):
        if part.pixels.shape[1:] != first.pixels.shape[1:] or part.peak != first.peak or part.mean != first.mean:
            raise FedgistError(f"{path}: its images have another shape, peak or mean than those of {paths[0].name}")
    if len(parts) == 1:
        return first
    if any((part.groups is None) != (first.groups is None) for part in parts):
        raise FedgistError(f"{paths[0].parent}: some parts say who their images are from and some do not")
    groups = (
        None if first.groups is None else np.concatenate([part.groups for part in parts if part.groups is not None])
    )
    pixels, labels = (np.concatenate(arrays) for arrays in zip(*((p.pixels, p.labels) for p in parts), strict=True))
    return replace(first, pixels=pixels, labels=labels, groups=groups)


def checked(
    where: str, pixels: np.ndarray, labels: np.ndarray, peak: float = 255, groups: np.ndarray | None = None
) -> Images:
    """The images, if they are what every reader relies on."""
    channels = pixels.shape[3] if pixels.ndim == 4 else 1
    array = pixels.dtype in (np.float32, np.uint16) and pixels.ndim >= 2
    if not array and (pixels.dtype != np.uint8 or pixels.ndim not in (3, 4) or not 1 <= channels <= 4):
        raise FedgistError(
            f"{where}: images must be uint8 of shape (N, H, W) or (N, H, W, C) with C at most 4, or float32 or uint16 "
            f"of shape (N, columns) or (N, channels, …), not {pixels.dtype} of shape {pixels.shape}"
        )
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise FedgistError(f"{where}: labels must be a list of integers, not {labels.dtype} of shape {labels.shape}")
    if len(labels) != len(pixels):
        raise FedgistError(f"{where}: {len(pixels)} images but {len(labels)} labels")
    if pixels.size == 0:
        raise FedgistError(f"{where}: there are no images in it")
    if labels.min() < 0:
        raise FedgistError(f"{where}: label {labels.min()} is negative; classes are numbered from 0")
    if labels.max() > LARGEST_NUMBER:
        raise FedgistError(f"{where}: label {labels.max()} is above {LARGEST_NUMBER}; classes are numbered from 0")
    if not np.isfinite(pixels).all():
        raise FedgistError(f"{where}: not all values are finite numbers; fill in or leave out what is missing")
    if pixels.dtype != np.float32 and pixels.max() > peak:
        raise FedgistError(f"{where}: a pixel has the value {pixels.max()}, above the declared peak {peak}")
    if groups is None:
        return Images(pixels, labels.astype(np.int64), peak)
    fits = groups.shape == labels.shape and groups.dtype.kind in "iu"
    if not fits or groups.min() < 0 or groups.max() > LARGEST_NUMBER:
        raise FedgistError(f"{where}: groups must be {len(labels)} whole numbers from 0, one for each image")
    return Images(pixels, labels.astype(np.int64), peak, groups.astype(np.int64))


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """An IDX file of bytes: magic 0x0000080D for D dimensions, D sizes, all big-endian; then data of just that size."""
    magic = 0x0800 + dimensions
    packed = path.suffix == ".gz"
    with naming_file(path), gzip.open(path) if packed else path.open("rb") as file:
        header = file.read(4 + 4 * dimensions)
        if len(header) < 4 + 4 * dimensions:
            raise FedgistError(f"{path} is truncated: it ends inside its header")
        found, *shape = struct.unpack(f">{1 + dimensions}I", header)
        if found != magic:
            raise FedgistError(f"{path} is not such an IDX file: it starts with {found:#010x}, not {magic:#010x}")
        size = math.prod(shape)
        room = path.stat().st_size * (DEFLATE_RATIO if packed else 1)
        data = file.read(size + 1) if size <= room else b""
    if len(data) != size:
        problem = "has more" if len(data) > size else "is truncated: it has fewer"
        raise FedgistError(f"{path} {problem} bytes than its header {tuple(shape)} announces; fetch it again")
    return np.frombuffer(data, np.uint8).reshape(shape)


@contextmanager
def arrays_in(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """The arrays of an `.npz`, each read when it is asked for; of any other file numpy would say how to unpickle it."""
    with naming_file(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise FedgistError(f"{path} is damaged or no .npz; fetch it again, or write it with numpy.savez")
        file.seek(0)
        with np.load(file, allow_pickle=False) as archive:
            yield archive


def read_npz(path: Path) -> Images:
    """One `.npz` file. Besides `images` and `labels` it may have `groups`, `peak`, `mean` and `std`.

    A missing `peak` is the largest number of the type (255), of float32 1.
    """
    with arrays_in(path) as arrays:
        keys = set(arrays)
        if not {"images", "labels"} <= keys:
            raise FedgistError(f"{path} must be an .npz with the keys 'images' and 'labels'; it has {sorted(keys)}")
        pixels, labels = arrays["images"], arrays["labels"]
        most = np.iinfo(pixels.dtype).max if pixels.dtype.kind in "iu" else 1
        peak = float(arrays["peak"]) if "peak" in keys else most
        groups = arrays["groups"] if "groups" in keys else None
        mean, std = (np.atleast_1d(arrays[key]).tolist() if key in keys else [] for key in ("mean", "std"))
    whole = pixels.dtype.kind in "iu"
    if not (0 < peak < math.inf) or (whole and not (1 <= peak <= most and peak == int(peak))):
        raise FedgistError(f"{path}: peak must be between 1 and {most}, not {peak:g}")
    made = checked(str(path), pixels, labels, int(peak) if whole else peak, groups)
    return normalised_by(str(path), made, mean, std)


def normalised_by(where: str, images: Images, mean: Sequence[float], std: Sequence[float]) -> Images:
    """The images with the public numbers that come with them."""
    channels = images.planes.shape[1]
    good = len(mean) == len(std) and len(mean) in (0, channels) and all(isinstance(n, float) for n in (*mean, *std))
    if not good or not np.isfinite([*mean, *std]).all() or min(std, default=1) <= 0:
        raise FedgistError(f"{where}: mean and std must be {channels} numbers each, one a channel, and std above 0")
    return replace(images, mean=tuple(mean), std=tuple(std))


def write_npz(path: Path, images: Images) -> None:
    """Writes what `read_npz` reads."""
    from fedgist.storage import replacing  # with torch, which those who only look for files need not wait for

    arrays = {"images": images.pixels, "labels": images.labels, "peak": np.array(images.peak)}
    arrays |= {"mean": np.array(images.mean), "std": np.array(images.std)} if images.mean else {}
    arrays |= {} if images.groups is None else {"groups": images.groups}
    with replacing(path) as draft, draft.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


@contextmanager
def naming_file(path: Path, remedy: str = "fetch or write it again") -> Iterator[None]:
    """Damaged files fail in as many ways as zip, gzip and numpy have parts; what the user needs is the file's name."""
    try:
        yield
    except FedgistError:
        raise
    except Exception as error:
        raise FedgistError(f"{path} is damaged or not what its name says ({error}); {remedy}") from error
