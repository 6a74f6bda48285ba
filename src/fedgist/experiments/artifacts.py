"""What is worth looking at: what a method shows in its rounds, kept in the run's folder at a few of them.

Synthetic signals are drawn as curves, and rows of a table in parallel coordinates: a place on the way for each column.

One small file a round: images as bytes, features as half-precision numbers, both with their labels; at most so many of
each name, taken evenly from all classes. Nothing is read back into a run.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedgist import storage
from fedgist.core.federation import Exhibit
from fedgist.core.task import Task
from fedgist.synthesis.pixels import quantise

TIMES = 8  # about as often in a run, where the configuration does not say how often
IMAGES, POINTS = 100, 500  # at most so many of a name in a round
WIDE, HIGH = 90, 45  # pixels of a curve
FAR = 10  # how many times the width of the data's range an image may leave it by before nobody should trust it


@dataclass(frozen=True, eq=False)
class Shown:
    """What was shown under one name in one round."""

    round: int
    name: str
    values: Tensor
    """Images as uint8 [n, channels, height, width], or features as float16 [n, d]."""
    labels: Tensor | None
    """A class each [n], or a probability for every class [n, classes]."""
    owners: list[str]
    """The client that each comes from, or nothing."""

    @property
    def are_images(self) -> bool:
        return self.values.ndim == 4

    @property
    def classes(self) -> Tensor | None:
        """The class of each, the likeliest where labels are soft."""
        return _classes(self.labels)


def due(round: int, rounds: int, every: int | None) -> bool:
    """Whether a round's exhibits are kept: the first's, the last's, and every so many; with `every` = 0, none."""
    if every == 0:
        return False
    every = every or math.ceil(rounds / TIMES)
    return round in (1, rounds) or round % every == 0


def save(exhibits: Sequence[Exhibit], task: Task, path: Path) -> None:
    """Writes what can be looked at; without anything, no file. Exhibits of the same name become one."""
    together: dict[str, list[Exhibit]] = defaultdict(list)
    for exhibit in exhibits:
        drawable = _is_picture(exhibit.values) or exhibit.values.ndim == 2 or _is_curve(exhibit.values, task)
        if len(exhibit.values) and drawable:
            together[exhibit.name].append(exhibit)
    kept = {name: _joined(parts, task) for name, parts in together.items()}
    if kept:
        storage.save(kept, path)


def out_of_range(exhibits: Sequence[Exhibit], task: Task) -> str | None:
    """What was shown that is no picture any more, in words: pixels far from all that data can have, or no numbers."""
    width = max(high - low for low, high in zip(task.low, task.high, strict=True))
    least, most = min(task.low) - FAR * width, max(task.high) + FAR * width
    for exhibit in exhibits:
        if len(exhibit.values) == 0:
            continue
        bottom, top = (float(end) for end in exhibit.values.float().aminmax())
        if not math.isfinite(top - bottom):
            return f"{exhibit.name} are not finite"
        inputs = exhibit.values.ndim == 4 or exhibit.values.shape[1:] == task.shape
        if inputs and not exhibit.stretched and not least <= bottom <= top <= most:
            data = f"the data's pixels from {min(task.low):.2g} to {max(task.high):.2g}"
            return f"{exhibit.name} reach from {bottom:.2g} to {top:.2g}, {data}"
    return None


def load(folder: Path) -> Iterator[Shown]:
    """All that a run kept, round by round; a file that cannot be read is left out."""
    for path in sorted(folder.glob("round-*.safetensors")):
        try:
            round, kept = int(path.stem.removeprefix("round-")), storage.load(path)
            yield from [Shown(round, name, **fields) for name, fields in kept.items()]
        except (OSError, ValueError, KeyError, TypeError):
            continue


def _is_picture(values: Tensor) -> bool:
    return values.ndim == 4 and values.shape[1] in (1, 3)


def _is_curve(values: Tensor, task: Task) -> bool:
    """Whether these are inputs of a task about signals or tables."""
    return len(task.shape) < 3 and values.shape[1:] == task.shape


def _curves(x: Tensor) -> Tensor:
    """Signals [n, channels, length], or rows [n, columns], as pictures of curves over one range: white on black."""
    x = x.float() if x.ndim == 3 else x.float()[:, None]
    x = torch.nn.functional.interpolate(x, size=WIDE, mode="linear", align_corners=True)
    low, high = x.aminmax()
    at = (1 - (x - low) / (high - low).clamp_min(1e-12)) * (HIGH - 1)
    ends = torch.stack([at, at.roll(-1, -1)])
    ends[1, ..., -1] = at[..., -1]  # the last goes nowhere
    top, bottom = ends.amin(0).floor()[..., None, :], ends.amax(0).ceil()[..., None, :]
    rows = torch.arange(HIGH)[:, None]
    return ((rows >= top) & (rows <= bottom)).any(1, keepdim=True).to(torch.uint8) * 255


def _joined(parts: Sequence[Exhibit], task: Task) -> dict[str, Tensor | list[str] | None]:
    values = torch.cat([part.values.detach().cpu() for part in parts])
    labels = [part.labels.detach().cpu() for part in parts if part.labels is not None]
    known = torch.cat(labels) if len(labels) == len(parts) else None
    owners = [part.owner for part in parts for _ in range(len(part.values))]
    curves = _is_curve(values, task)
    chosen = _some(len(values), _classes(known), IMAGES if values.ndim == 4 or curves else POINTS)
    values = values[chosen]
    if curves:
        values = _curves(values)
    elif values.ndim == 2:
        values = values.half()
    elif parts[0].stretched:
        values = _stretched(values)
    else:
        values = quantise(values.float(), task.low, task.high)
    if known is not None:
        known = known[chosen].half() if known.ndim == 2 else known[chosen].to(torch.int64)
    return {"values": values, "labels": known, "owners": [owners[i] for i in chosen.tolist()]}


def _some(count: int, classes: Tensor | None, most: int) -> Tensor:
    """The indices of at most so many: equally many of each class, spread evenly over those that there are."""
    if count <= most:
        return torch.arange(count)
    if classes is None:
        return torch.linspace(0, count - 1, most).long()
    groups = [(classes == c).nonzero().flatten() for c in classes.unique()]
    share = max(1, most // len(groups))
    even = [group[torch.linspace(0, len(group) - 1, min(share, len(group))).long()] for group in groups]
    return torch.cat(even)[:most].sort().values


def _classes(labels: Tensor | None) -> Tensor | None:
    return labels.argmax(1) if labels is not None and labels.ndim == 2 else labels


def _stretched(images: Tensor) -> Tensor:
    """Each image from its own darkest to its own brightest value."""
    flat = images.float().flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    return ((flat - low) / (high - low).clamp_min(1e-12) * 255).round().to(torch.uint8).view_as(images)
