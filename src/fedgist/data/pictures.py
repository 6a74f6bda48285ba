"""Image files: a folder for each class, and LEAF's JSON (Caldas et al. 2018), whose images may be files, too."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.core.errors import FedgistError, extra
from fedgist.data.files import Images, Reader, check_forms, checked, naming_file

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
GREY, COLOUR = ("1", "L"), ("RGB", "RGBA", "P", "PA", "LA", "CMYK", "YCbCr", "HSV", "LAB")
LEAF_SIDE = 84  # what LEAF scales the pictures of CelebA to
LEAF_PICTURES = ("images", "img_align_celeba", "data/raw/img_align_celeba", "raw/img_align_celeba")


def find_classes(folder: Path) -> Reader | None:
    """Reads train/CLASS/IMAGE and test/CLASS/IMAGE."""
    there = all(
        any(path.suffix.lower() in SUFFIXES for path in (folder / split).glob("*/*")) for split in ("train", "test")
    )
    return partial(_read_classes, folder) if there else None


def _read_classes(folder: Path) -> tuple[Images, Images]:
    """Classes are numbered in the order of their folders' names."""
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    files: dict[str, list[Path]] = {}
    labels: dict[str, list[int]] = {}
    for split in ("train", "test"):
        if strangers := {path.name for path in (folder / split).iterdir() if path.is_dir()} - set(names):
            raise FedgistError(f"{folder / split} has a class {min(strangers)!r} that {folder / 'train'} lacks")
        both = [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((folder / split / name).glob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
        files[split], labels[split] = [path for path, _ in both], [label for _, label in both]
    pixels = read_pictures([*files["train"], *files["test"]])
    cut = len(files["train"])
    train = checked(str(folder / "train"), pixels[:cut], np.array(labels["train"]))
    test = checked(str(folder / "test"), pixels[cut:], np.array(labels["test"]))
    return replace(train, names=tuple(names)), test


def read_pictures(paths: Sequence[Path], side: int | None = None) -> np.ndarray:
    """Pictures of one size (or made side × side) as uint8: grey if all are, else colour."""
    with extra("image files need Pillow: pip install 'fedgist[images]'"):
        from PIL import Image
    size: tuple[int, int] | None = None
    modes = set()
    for path in paths:
        with naming_file(path), Image.open(path) as picture:  # reads the header only
            modes.add(picture.mode)
            if picture.mode not in GREY + COLOUR:
                raise FedgistError(f"{path} has pixels of mode {picture.mode!r}; only 8 bits a channel can be read")
            size = size or picture.size
            if side is None and picture.size != size:
                shapes = " and ".join(f"{width}×{height}" for width, height in (picture.size, size))
                raise FedgistError(f"{path} and {paths[0].name} are {shapes} pixels; all images must have one size")
    grey = modes <= set(GREY)
    width, height = (side, side) if side else size or (0, 0)
    pixels = np.empty((len(paths), height, width, *([] if grey else [3])), np.uint8)
    for i, path in enumerate(paths):
        with naming_file(path), Image.open(path) as picture:
            plain = picture.convert("L" if grey else "RGB")
            pixels[i] = np.asarray(plain.resize((width, height)) if side else plain)
    return pixels


def find_leaf(folder: Path) -> Reader | None:
    """Reads train/*.json and test/*.json, here or in data/."""
    for place in (folder, folder / "data"):
        if all(any((place / split).glob("*.json")) for split in ("train", "test")):
            return partial(_read_leaf, folder, place)
    return None


def _read_leaf(folder: Path, place: Path) -> tuple[Images, Images]:
    """LEAF's JSON: `users` and, in `user_data`, lists x and y for each; users are the groups, by their sorted names.

    x is a list of pixels (0 to 1, or 0 to 255) of a square image, or the name of a picture, as for CelebA.
    """
    splits = [_leaf_samples(place / split) for split in ("train", "test")]
    users = {user: number for number, user in enumerate(sorted({user for split in splits for user, _, _ in split}))}
    made = []
    for split, samples in zip(("train", "test"), splits, strict=True):
        where = str(place / split)
        xs = [x for _, x, _ in samples]
        named = all(isinstance(x, str) for x in xs)
        pixels = read_pictures(_leaf_paths(folder, xs), LEAF_SIDE) if named else _leaf_pixels(where, xs)
        try:
            labels = np.array([int(y) for _, _, y in samples], np.int64)
        except (TypeError, ValueError):
            raise FedgistError(f"{where}: y must be lists of whole numbers") from None
        made.append(checked(where, pixels, labels, groups=np.array([users[user] for user, _, _ in samples])))
    return check_forms(folder, made[0], made[1])


def _leaf_samples(folder: Path) -> list[tuple[str, Any, Any]]:
    """(user, x, y) of every sample, in the order of the files."""
    samples = []
    for path in sorted(folder.glob("*.json")):
        with naming_file(path):
            content = json.loads(path.read_text(encoding="utf-8"))
            for user in content["users"]:
                held = content["user_data"][user]
                samples += [(str(user), x, y) for x, y in zip(held["x"], held["y"], strict=True)]
    if not samples:
        raise FedgistError(f"{folder}: there are no samples in it")
    return samples


def _leaf_paths(folder: Path, names: Sequence[str]) -> list[Path]:
    home = next((folder / place for place in LEAF_PICTURES if (folder / place).is_dir()), None)
    if home is None:
        raise FedgistError(f"{folder}: its JSON names pictures; put them in {folder / LEAF_PICTURES[0]}")
    for name in names:
        if Path(name).name != name or not (home / name).is_file():
            raise FedgistError(f"{folder}: its JSON names a picture {name!r}, which {home} does not hold")
    return [home / name for name in names]


def _leaf_pixels(where: str, xs: Sequence[Any]) -> np.ndarray:
    try:
        values = np.array(xs, np.float64)
    except (TypeError, ValueError):
        raise FedgistError(f"{where}: x must be lists of numbers of one length, or names of pictures") from None
    flat = values.reshape(len(values), -1)
    channels = next((c for c in (1, 3) if math.isqrt(flat.shape[1] // c) ** 2 * c == flat.shape[1]), None)
    if channels is None or flat.shape[1] == 0 or not np.isfinite(flat).all() or flat.min() < 0 or flat.max() > 255:
        raise FedgistError(f"{where}: x must be the pixels of square images, 0 to 1 or 0 to 255")
    side = math.isqrt(flat.shape[1] // channels)
    pixels = np.rint(flat * (255 if flat.max() <= 1 else 1)).astype(np.uint8)
    return pixels.reshape(len(pixels), side, side, *([3] if channels == 3 else []))
