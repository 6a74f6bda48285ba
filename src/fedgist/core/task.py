"""The learning problem as the kernel sees it: what may be asked of a model and of data, and what everybody knows."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.work import Pool

Samples = tuple[Tensor, Tensor]
"""Inputs and their labels."""

Batches = dict[str, Tensor]
"""`index`: int64 [batches, batch], positions in the pool; `mask`: float32, 0 where a sample only fills up."""


class Data(Protocol):
    """What one client holds; any part of it may be empty."""

    @property
    def x(self) -> Tensor: ...

    @property
    def y(self) -> Tensor: ...

    @property
    def test(self) -> Samples | None:
        """The client's own test set, where the protocol gives it one."""

    @property
    def n(self) -> int: ...

    @property
    def pool(self) -> Pool:
        """The samples as the constant of a scan, into which a batch plan points."""

    def counts(self) -> Tensor:
        """The number of samples of each class."""

    def steps(self, rng: Rng, count: int, batch: int) -> Batches:
        """`count` full batches cut from an endless stream of reshuffled passes."""

    def epochs(self, rng: Rng, count: int, batch: int) -> Batches:
        """`count` passes, each reshuffled; what the last batch lacks is filled up under mask 0."""


class Output(NamedTuple):
    """What a model gives for a batch."""

    features: Tensor
    """[batch, feature_size], what enters the classifier (the last layer)."""
    logits: Tensor
    """[batch, classes], what leaves it."""
    buffers: Params
    """Train mode: the new running statistics, by their full names; {} otherwise."""


class NormStatistics(NamedTuple):
    """What enters a BatchNorm layer against what it remembers (Co-Dream's Eq. 6); the first two are differentiable."""

    mean: Tensor
    variance: Tensor  # biased: divided by the number of values
    running_mean: Tensor
    running_variance: Tensor


class Tap(list[NormStatistics]):
    """Hears from layers while a model runs: what BatchNorm saw, and what entered each of `Model.linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.entering: Params = {}


class Model(Protocol):
    """A classifier: a value that holds no tensors and, called on named ones, a pure function."""

    name: str
    input_shape: tuple[int, ...]
    classes: int

    @abstractmethod
    def init(self, rng: Rng) -> Params:
        """Fresh weights and buffers, in the order of `shapes`."""

    @property
    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, parameters and buffers, in a fixed order."""

    @property
    @abstractmethod
    def buffers(self) -> frozenset[str]:
        """The names that are not trained."""

    @property
    @abstractmethod
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of the activation of one image that enters each layer; its keys are what `start` may name."""

    @abstractmethod
    def __call__(
        self, w: Params, x: Tensor, train: bool = False, start: str | None = None, tap: Tap | None = None
    ) -> Output:
        """The whole model, or what remains of it from layer `start` on, where `x` is the activation that enters it.

        Train mode normalises by the statistics of the batch and returns the new running ones in `buffers`; `w` is never
        changed. Every layer that is run and has something to tell tells `tap`.
        """

    @abstractmethod
    def head(self, w: Params, features: Tensor) -> Tensor:
        """The logits of given features."""

    @property
    def linear(self) -> tuple[str, ...]:
        """Layers that are x Wᵀ + b of flat activations x, and tell a tap what enters them; in their order, because
        sums over them are rounded in it."""
        return ()

    @property
    def classifier(self) -> str:
        """The name of the last layer."""
        return next(reversed(self.layer_shapes))

    def names_from(self, layer: str) -> frozenset[str]:
        """The names of the tensors of a layer and of all after it."""
        layers = list(self.layer_shapes)
        prefixes = tuple(f"{name}." for name in layers[layers.index(layer) :])
        return frozenset(name for name in self.shapes if name.startswith(prefixes))

    @property
    def size(self) -> int:
        """The number of trained parameters."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.buffers)

    @property
    def feature_size(self) -> int:
        return self.layer_shapes[self.classifier][0]


@dataclass(frozen=True, eq=False)
class Task:
    """What everybody knows about the learning problem; nothing in it comes from a client's data.

    `shape` is that of one input, channels (of a table: columns) first. For each channel, `low` to `high` is the range
    of its values after `mean` was subtracted and they were divided by `std`, where there are such numbers.
    """

    shape: tuple[int, ...]
    classes: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    models: Mapping[str, Model]
    model: str
    proxy: Tensor | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    private: bool = False
    """Whether what clients send is differentially private: then one record may move a sum by no more than declared."""
