"""Pictures in the page: grids of images over the rounds of a run, each grid one PNG inside the page itself."""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from fedgist.experiments.artifacts import Shown

SIZES = ((8, 6), (6, 5), (6, 4), (5, 4), (5, 3), (4, 3), (4, 2), (3, 2), (2, 2), (1, 2), (1, 1))
"""Images of a class in a grid, and grids of a gallery: as many as the page has room for."""
ROOM = 200_000  # bytes of a page for pictures
ROWS = 12  # classes of a grid, at most
FEW_ROWS = 5  # of a grid without classes
LEVELS = 32  # of each colour: more cannot be told apart in small noisy images, and cost a third more
GAP = 1  # pixels between images

T = TypeVar("T")


@dataclass(frozen=True)
class Grid:
    """Images of one round, a row a class where there are labels."""

    round: int
    url: str
    width: int
    height: int
    rows: list[str]
    """What stands beside each row."""
    alt: str


@dataclass(frozen=True)
class Gallery:
    """What one method showed under one name."""

    label: str
    name: str
    soft: bool
    grids: list[Grid]


def within(shown: Mapping[str, Sequence[Shown]]) -> list[Gallery]:
    """The galleries of several groups, as large as there is room for in a page."""
    found: list[Gallery] = []
    for columns, rounds in SIZES:
        found = [one for label, some in shown.items() for one in galleries(label, some, columns, rounds)]
        if sum(len(grid.url) for one in found for grid in one.grids) <= ROOM:
            break
    return found


def galleries(label: str, shown: Sequence[Shown], columns: int = SIZES[0][0], most: int = SIZES[0][1]) -> list[Gallery]:
    """One gallery for every name that images were shown under."""
    images = [one for one in shown if one.are_images]
    found = []
    for name in dict.fromkeys(one.name for one in images):
        rounds = spread([one for one in images if one.name == name], most)
        soft = any(one.labels is not None and one.labels.ndim == 2 for one in rounds)
        found.append(Gallery(label, name, soft, [_grid(label, one, columns) for one in rounds]))
    return found


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly, the first and the last among them; of one, the last."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _grid(label: str, shown: Shown, columns: int) -> Grid:
    lines = _lines(shown, columns)
    _, channels, height, width = shown.values.shape
    columns = max(len(line) for _, line in lines)
    # One more channel says where there is an image at all; between images and after the last of a row there is none.
    cells = np.zeros((len(lines), columns, channels + 1, height + GAP, width + GAP), dtype=np.uint8)
    for i, (_, line) in enumerate(lines):
        cells[i, : len(line), :channels, :height, :width] = _levels(shown.values[line].numpy())
        cells[i, : len(line), channels, :height, :width] = 255
    shape = len(lines) * (height + GAP), columns * (width + GAP), channels + 1
    pixels = cells.transpose(0, 3, 1, 4, 2).reshape(shape)
    kinds = "a row a class" if shown.labels is not None else "in no order"
    return Grid(
        shown.round,
        f"data:image/png;base64,{base64.b64encode(png(pixels)).decode()}",
        pixels.shape[1],
        pixels.shape[0],
        [name for name, _ in lines],
        f"{label}: {shown.name} of round {shown.round}, {kinds}",
    )


def _levels(pixels: np.ndarray) -> np.ndarray:
    """Bytes rounded to a few levels, black and white among them."""
    level = np.rint(pixels / 255 * (LEVELS - 1))
    return np.rint(level * 255 / (LEVELS - 1)).astype(np.uint8)


def _lines(shown: Shown, columns: int) -> list[tuple[str, list[int]]]:
    """The rows of a grid: what stands beside each, and which images are in it."""
    classes = shown.classes
    if classes is None:
        count = min(len(shown.values), FEW_ROWS * columns)
        return [("", list(range(start, min(start + columns, count)))) for start in range(0, count, columns)]
    lines = []
    for c in spread(classes.unique().tolist(), ROWS):
        members = spread((classes == c).nonzero().flatten().tolist(), columns)
        name = str(c)
        if shown.labels is not None and shown.labels.ndim == 2:
            name += f" · {100 * float(shown.labels[torch.tensor(members), c].float().mean()):.0f} %"
        lines.append((name, members))
    return lines


def png(pixels: np.ndarray) -> bytes:
    """An image [height, width, grey or colours, and opacity] as ISO 15948 wants it: one deflated stream, no filter."""
    height, width, channels = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 4 if channels == 2 else 6, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body
