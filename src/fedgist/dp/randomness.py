"""Random bits for noise and for secret samples: a key of the operating system's, or, in a simulation, a seed."""

import hashlib
import math
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedgist.core.rng import Rng, words
from fedgist.dp.discrete_gaussian import Bits, discrete_gaussian

Noise = Callable[[int, int], Tensor]
"""So many whole numbers of a deviation that is a whole number; never the same twice."""


def secret(device: torch.device = torch.device("cpu")) -> Bits:
    """ChaCha20 (RFC 8439) under a fresh key from the operating system, which nobody keeps and no run's seed decides."""
    return _chacha20(os.urandom(32), device)


def keyed(key: bytes, *names: str, device: torch.device = torch.device("cpu")) -> Bits:
    """The same under a key that is made from one of a site's own and from names: asked again, the same bits."""
    return _chacha20(hashlib.blake2b(repr(names).encode(), key=key, digest_size=32).digest(), device)


def _chacha20(key: bytes, device: torch.device) -> Bits:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def bits(count: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(stream.update(bytes(8 * count)), dtype=np.int64).copy()).to(device)

    return bits


def simulated(rng: Rng, device: torch.device = torch.device("cpu")) -> Bits:
    """The stream of a named seed: the same on every machine and device, as all randomness of a simulation."""
    seed, drawn = torch.tensor(rng.seed, device=device), 0

    def bits(count: int) -> Tensor:
        nonlocal drawn
        drawn += count
        return words(seed, count, drawn - count)

    return bits


def exact(bits: Bits) -> Noise:
    """The discrete Gaussian, as it must be where somebody could look."""
    return lambda count, sigma: discrete_gaussian(count, sigma, bits)


def rounded(rng: Rng, device: torch.device = torch.device("cpu")) -> Noise:
    """Normal numbers of a named seed (Box and Muller, 53 bits), rounded: for simulations, which hide nothing.

    At a deviation of millions no test tells them from the discrete Gaussian, whose many small steps take most of an
    exchange's time on a GPU.
    """
    seed, drawn = torch.tensor(rng.seed, device=device), 0

    def noise(count: int, sigma: int) -> Tensor:
        nonlocal drawn
        half = (count + 1) // 2
        u, v = ((words(seed, 2 * half, drawn) >> 11 & (1 << 53) - 1).double() + 0.5).mul(2.0**-53).split(half)
        drawn += 2 * half
        radius, angle = sigma * torch.sqrt(-2.0 * torch.log(u)), 2.0 * math.pi * v
        return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])[:count].round().long()

    return noise
