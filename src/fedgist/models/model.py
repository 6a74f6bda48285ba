"""The model made of layers.

A model is a value that holds no tensors. Called on a flat dict of tensors it is a pure function: safe in threads, and
`torch.func.vmap`, `torch.func.grad` and `torch.compile` go through it, BatchNorm in train mode included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output, Tap
from fedgist.models.gpu.blocks import bind_blocks
from fedgist.models.layers import Entry, Layers, Linear, Step, bind_all, is_eager, named_entries

MOST_SIDES, MOST_INPUTS = 8, 2**26
"""Dimensions of an input, and numbers in it; or in a layer, of which the product of two is far from int64's end."""
CACHED, FEWEST = 2**20, 4
"""Numbers that a layer may make on a CPU and the next one still find in its caches; and fewer images than that are
convolved otherwise.
"""


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_INPUTS


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """`shape` if it can be that of an input, or an error that says how it should look."""
    if not (1 <= len(shape) <= MOST_SIDES and all(map(is_count, shape)) and math.prod(shape) <= MOST_INPUTS):
        raise FedgistError(
            f"input_shape must be 1 to {MOST_SIDES} positive whole numbers, channels first, as in (30,), (1, 187) or "
            f"(3, 32, 32), with a product of at most {MOST_INPUTS:,}, not {tuple(shape)}"
        )
    return tuple(shape)


@final
@dataclass(frozen=True)
class LayeredModel(Model):
    """A chain of layers whose last one is the linear classifier. Equal by value."""

    name: str
    input_shape: tuple[int, ...]
    classes: int
    layers: Layers

    # What every call needs is computed once, and not lazily: torch.compile cannot trace functools.cached_property.
    _hash: int = field(init=False, repr=False, compare=False)
    _entries: dict[str, Entry] = field(init=False, repr=False, compare=False)
    _buffers: frozenset[str] = field(init=False, repr=False, compare=False)
    _layer_shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _positions: dict[str, int] = field(init=False, repr=False, compare=False)
    _on_images: int = field(init=False, repr=False, compare=False)
    _at_once: int = field(init=False, repr=False, compare=False)
    _extractor: tuple[Step, ...] = field(init=False, repr=False, compare=False)
    _whole: tuple[Step, ...] = field(init=False, repr=False, compare=False)
    _classify: Step = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        entries = named_entries(self.layers)
        names = [name for name, _ in self.layers]
        steps = bind_all(self.layers)
        shapes = activation_shapes(self.layers, self.input_shape)
        to_vectors = next((i for i, shape in enumerate(shapes) if len(shape) == 1), len(steps) - 1)
        on_images, on_vectors = bind_blocks(self.layers[:to_vectors]), bind_blocks(self.layers[to_vectors:-1])
        vars(self).update(  # past the frozen setattr
            _hash=hash((self.name, self.input_shape, self.classes, self.layers)),
            _entries=entries,
            _buffers=frozenset(name for name, entry in entries.items() if not entry.trained),
            _layer_shapes=dict(zip(names, shapes, strict=False)),
            _positions={name: i for i, name in enumerate(names)},
            _on_images=len(on_images),
            _at_once=max(2 * FEWEST, CACHED // max(math.prod(shape) for shape in shapes)),
            _extractor=steps[:-1],
            _whole=on_images + on_vectors,
            _classify=steps[-1],
        )

    def init(self, rng: Rng) -> Params:
        return {name: _draw(entry, rng(name)) for name, entry in self._entries.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def buffers(self) -> frozenset[str]:
        return self._buffers

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._layer_shapes)

    @property
    def linear(self) -> tuple[str, ...]:
        return tuple(name for name, layer in self.layers if isinstance(layer, Linear))

    def __call__(
        self, w: Params, x: Tensor, train: bool = False, start: str | None = None, tap: Tap | None = None
    ) -> Output:
        new: Params | None = {} if train else None
        steps = self._whole if start is None else self._extractor[self._position(start) :]
        if start is None and not train and tap is None and self._is_better_in_pieces(x):
            pieces = x.tensor_split(math.ceil(len(x) / self._at_once))  # none of them much smaller than the others
            x = torch.cat([_run(steps[: self._on_images], w, piece, None, None) for piece in pieces])
            steps = steps[self._on_images :]
        x = _run(steps, w, x, new, tap)
        return Output(x, self._classify(w, x, None, tap), {} if new is None else new)

    def head(self, w: Params, features: Tensor) -> Tensor:
        return self._classify(w, features, None, None)

    def __hash__(self) -> int:
        return self._hash

    def _is_better_in_pieces(self, x: Tensor) -> bool:
        """Whether what convolutions make of these images leaves a CPU's caches before the next layer reads it, and no
        gradient needs it again. Vectors stay together: a product of fewer rows may round otherwise.
        """
        alone = self._on_images > 1 and not torch.is_grad_enabled() and is_eager(x)
        return alone and len(x) > 2 * self._at_once  # asked last: of an exported model it would fix how many there are

    def _position(self, layer: str) -> int:
        if layer not in self._positions:
            raise unknown(f"layer of {self.name}", layer, self._positions)
        return self._positions[layer]


def _run(steps: Sequence[Step], w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
    for step in steps:
        x = step(w, x, buffers, tap)
    return x


def _draw(entry: Entry, rng: Rng) -> Tensor:
    if not entry.bound:
        return torch.full(entry.shape, entry.fill)
    return rng.uniform(*entry.shape).mul_(2 * entry.bound).add_(entry.fill - entry.bound)


MOST_BLANK = 2**24
"""Numbers, of weights and of what passes between layers, that are made to see how a model fits together."""


def activation_shapes(layers: Layers, input_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What enters each layer and, last, what leaves the chain, found by running one blank image through it.

    One image on purpose: a norm over a single value (instance norm of a 1×1 map) erases its input; torch refuses it.
    On torch's meta device only where it would be large, for all of it may be somebody else's words: its first use costs
    a second of imports, the image milliseconds.
    """
    known = named_entries(layers).values()
    widest = max((entry.shape[0] for entry in known if entry.shape), default=1)
    numbers = sum(math.prod(entry.shape) for entry in known) + widest * math.prod(input_shape)
    device = "cpu" if numbers <= MOST_BLANK else "meta"
    x = torch.zeros(1, *input_shape, device=device)
    shapes: list[tuple[int, ...]] = [tuple(input_shape)]
    for name, layer in layers:
        entries = named_entries(((name, layer),))
        w = {key: torch.zeros(entry.shape, device=device) for key, entry in entries.items()}
        try:
            x = layer.bind(name)(w, x, None, None)
        except (RuntimeError, ValueError) as error:
            got = "×".join(map(str, x.shape[1:]))
            raise FedgistError(f"its layer {name!r} cannot work on an activation of shape {got}") from error
        shapes.append(tuple(x.shape[1:]))
    return shapes


def output_size(layers: Layers, input_shape: tuple[int, ...]) -> int:
    """The number of values that leave the chain for one image."""
    return math.prod(activation_shapes(layers, input_shape)[-1])
