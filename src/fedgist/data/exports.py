"""Writing images in the formats that `fedgist.data.formats` reads: `.npz`, IDX files, a folder of pictures."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedgist.core.errors import FedgistError, unknown
from fedgist.data.files import IDX_PREFIXES, Images, write_npz


def write(folder: Path, split: str, images: Images, form: str = "npz") -> None:
    """Writes one split, `train` or `test`, into a folder."""
    if form not in FORMS:
        raise unknown("format", form, FORMS)
    FORMS[form](folder, split, images)


def part(images: Images, spec: str) -> Images:
    """Every N-th image from the K-th on, for a text such as 1/3."""
    first, _, count = spec.partition("/")
    if not (first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise FedgistError(f"a part is written K/N, as in 1/3, not {spec!r}")
    chosen = slice(int(first) - 1, None, int(count))
    groups = None if images.groups is None else images.groups[chosen]
    return Images(images.pixels[chosen], images.labels[chosen], images.peak, groups)


def _write_npz(folder: Path, split: str, images: Images) -> None:
    write_npz(folder / f"{split}.npz", images)


def _write_idx(folder: Path, split: str, images: Images) -> None:
    if images.pixels.ndim != 3 or images.labels.max() > 255:
        raise FedgistError("IDX files hold grey images of at most 256 classes; choose npz or pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("images-idx3", _full_range(images)), ("labels-idx1", images.labels.astype(np.uint8))):
        header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
        (folder / f"{IDX_PREFIXES[split][0]}-{name}-ubyte").write_bytes(header + values.tobytes())


def _write_pictures(folder: Path, split: str, images: Images) -> None:
    try:
        from PIL import Image
    except ImportError:
        raise FedgistError("image files need Pillow: pip install 'fedgist[images]'") from None
    width = len(str(images.labels.max()))  # zero-padded: classes are numbered in the order of their folders' names
    for number, (pixels, label) in enumerate(zip(_full_range(images), images.labels, strict=True)):
        place = folder / split / f"{label:0{width}d}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number:06d}.png")


def _full_range(images: Images) -> np.ndarray:
    """The pixels on a scale from 0 to 255, the only one that these files know."""
    if images.peak == 255:
        return np.ascontiguousarray(images.pixels)
    return np.rint(images.pixels * (255 / images.peak)).astype(np.uint8)


FORMS: dict[str, Callable[[Path, str, Images], None]] = {
    "npz": _write_npz,
    "idx": _write_idx,
    "pictures": _write_pictures,
}
