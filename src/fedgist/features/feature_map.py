"""What a feature map is: a value that holds no tensors and, called on public ones, a pure function of images."""

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng


class FeatureMap(Protocol):
    """φ: images [n, channels, height, width] to features [n, size] of norm at most 1."""

    @property
    def size(self) -> int: ...

    def weights(self, rng: Rng) -> Params:
        """The tensors that it computes with: made from its own fields and from public randomness, never from data."""

    def __call__(self, w: Params, x: Tensor) -> Tensor: ...

    def __hash__(self) -> int:
        """A value, so that equal maps are one computation."""


@dataclass(frozen=True)
class Values:
    """The values of an input as they are, over √d: standardised columns then have a norm of about 1."""

    size: int

    def weights(self, rng: Rng) -> Params:
        return {}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        return x.flatten(1) / math.sqrt(self.size)


@dataclass(frozen=True)
class Contrast:
    """Another map less the mean of its own numbers, record by record, at norm 1: all that linear layers need of it."""

    of: FeatureMap

    @property
    def size(self) -> int:
        return self.of.size

    def weights(self, rng: Rng) -> Params:
        return self.of.weights(rng)

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        found = self.of(w, x)
        return unit(found - found.mean(1, keepdim=True))


@functools.lru_cache(maxsize=8)
def drawn(features: FeatureMap, seed: int) -> Params:
    """The weights that a public seed stands for; the same objects for everybody here, so that they are stacked once."""
    return features.weights(Rng(seed, "features"))


def unit(features: Tensor) -> Tensor:
    """Each row at norm 1; a row of zeros stays."""
    return features / torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_min(1e-12)


@dataclass(frozen=True)
class Beside:
    """Several maps side by side, each with the same share of the norm."""

    parts: tuple[FeatureMap, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def weights(self, rng: Rng) -> Params:
        drawn = {str(i): part.weights(rng(i)) for i, part in enumerate(self.parts)}
        return {f"{i}.{name}": tensor for i, part in drawn.items() for name, tensor in part.items()}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        found = [part(below(w, str(i)), x) for i, part in enumerate(self.parts)]
        return torch.cat(found, dim=1) / math.sqrt(len(found))


def below(w: Params, name: str) -> Params:
    """The tensors under a name."""
    return {key.removeprefix(f"{name}."): tensor for key, tensor in w.items() if key.startswith(f"{name}.")}
