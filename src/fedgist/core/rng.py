"""Named, splittable randomness. There is no global generator anywhere in fedgist.

An `Rng` is a name: `Rng(seed)("client", id, "batches", round)` always yields the same numbers, whoever asks, in
whatever order, on whatever engine. Draw on the host before a computation and pass the numbers in; where that would be
too many numbers (noise for thousands of steps), pass seeds as tensors and expand them inside the computation with
`uniform` or `normal`: pure functions of tensors that vmap, compile and agree between devices.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor


class Rng:
    """A point in the tree of random streams; calling it with names gives a child stream."""

    def __init__(self, seed: int, *path: str | int):
        self.root = int(seed)
        self.path = path

    def __call__(self, *names: str | int) -> "Rng":
        return Rng(self.root, *self.path, *names)

    def __repr__(self) -> str:
        return f"Rng({', '.join(map(repr, (self.root, *self.path)))})"

    @property
    def seed(self) -> int:
        """The 63-bit seed that this name stands for."""
        name = repr((self.root, *self.path)).encode()
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1

    def generator(self) -> torch.Generator:
        """A fresh host generator at the start of this stream."""
        return torch.Generator().manual_seed(self.seed)

    def numpy(self) -> np.random.Generator:
        """The same for numpy, whose distributions (Dirichlet, choice) torch lacks."""
        return np.random.default_rng(self.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator())

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator())

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator())

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator())

    def seeds(self, count: int) -> Tensor:
        """`count` seeds for `uniform` and `normal`, one for each step of a scan."""
        return torch.randint(2**62, (count,), generator=self.generator())


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64 bits, and a good hash of a counter."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def words(seed: Tensor, count: int, first: int = 0) -> Tensor:
    """64 random bits each, from a scalar int64 `seed`: counter-based, so it has no state and works under vmap."""
    start = _mix(seed)
    # ^ start twice changes no number: a compiler takes a bare counter for an index and fails to bound its product
    counter = torch.arange(first, first + count, device=seed.device) ^ start ^ start
    return _mix(start + counter * -0x61C8864680B583EB)


def uniform(seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in (0, 1) from a scalar int64 `seed`."""
    bits = words(seed, math.prod(shape))
    top = (bits >> 41) & 0x7FFFFF  # 23 bits: with the half added they are exact in float32, so 0 and 1 never occur
    return ((top.to(dtype) + 0.5) * 2.0**-23).reshape(shape)


def normal(seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers from a scalar int64 `seed`, by Box and Muller."""
    n = math.prod(shape)
    u = uniform(seed, (2, (n + 1) // 2), dtype)
    radius, angle = torch.sqrt(-2.0 * torch.log(u[0])), 2.0 * math.pi * u[1]
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:n].reshape(shape)
