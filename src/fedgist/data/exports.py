"""Writing images in the formats that `fedgist.data.formats` reads: `.npz`, IDX files, a folder of pictures."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedgist.core.errors import FedgistError, check_known, extra
from fedgist.data import tables
from fedgist.data.files import IDX_PREFIXES, Images, write_npz


def write(folder: Path, train: Images, test: Images, form: str = "npz") -> None:
    """Writes both splits into a folder."""
    check_known("format", form, FORMS)
    classes = 1 + int(max(train.labels.max(), test.labels.max()))
    for split, images in (("train", train), ("test", test)):
        FORMS[form](folder, split, images, classes)


def part(images: Images, spec: str) -> Images:
    """Every N-th image from the K-th on, for a text such as 1/3."""
    first, _, count = spec.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise FedgistError(f"a part is written K/N, as in 1/3, not {spec!r}")
    if int(first) > len(images.labels):
        raise FedgistError(f"part {spec} of {len(images.labels)} images is empty; make fewer parts")
    chosen = slice(int(first) - 1, None, int(count))
    groups = None if images.groups is None else images.groups[chosen]
    return replace(images, pixels=images.pixels[chosen], labels=images.labels[chosen], groups=groups)


def _write_npz(folder: Path, split: str, images: Images, classes: int) -> None:
    write_npz(folder / f"{split}.npz", images)


def _write_idx(folder: Path, split: str, images: Images, classes: int) -> None:
    if images.pixels.dtype != np.uint8 or images.pixels.ndim != 3 or classes > 256:
        raise FedgistError("IDX files hold grey images of at most 256 classes; choose npz or pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("images-idx3", _full_range(images)), ("labels-idx1", images.labels.astype(np.uint8))):
        header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
        (folder / f"{IDX_PREFIXES[split][0]}-{name}-ubyte").write_bytes(header + values.tobytes())


def _write_pictures(folder: Path, split: str, images: Images, classes: int) -> None:
    """A folder for every class, also where there are no images of it: folders are numbered by those that are there."""
    with extra("image files need Pillow: pip install 'fedgist[images]'"):
        from PIL import Image
    if images.pixels.dtype != np.uint8:
        raise FedgistError("this data set has no pictures; choose npz or csv")
    width = len(str(classes - 1))  # zero-padded: in the order of their names
    places = [folder / split / f"{label:0{width}d}" for label in range(classes)]
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
    for number, (pixels, label) in enumerate(zip(_full_range(images), images.labels, strict=True)):
        Image.fromarray(pixels).save(places[label] / f"{number:06d}.png")


def _full_range(images: Images) -> np.ndarray:
    """The pixels on a scale from 0 to 255, the only one that these files know."""
    if images.peak == 255:
        return np.ascontiguousarray(images.pixels)
    return np.rint(images.pixels * (255 / images.peak)).astype(np.uint8)


FORMS: dict[str, Callable[[Path, str, Images, int], None]] = {
    "npz": _write_npz,
    "csv": tables.write,
    "idx": _write_idx,
    "pictures": _write_pictures,
}
