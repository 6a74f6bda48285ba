"""Normal numbers from seeds: `rng.normal`, on a GPU with Triton as one kernel for any number of seeds."""

import math
from typing import Any

import torch
from torch import Tensor

from fedgist.core import rng
from fedgist.core.work import triton_is_there

BLOCK = 1024
"""Pairs of numbers that a program makes."""


def normal(seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers from a scalar int64 `seed`."""
    if not (seed.is_cuda and dtype == torch.float32 and triton_is_there()):
        return rng.normal(seed, shape, dtype)
    numbers: Tensor = gaussian(seed, math.prod(shape))
    return numbers.reshape(shape)


@torch.library.custom_op("fedgist::gaussian", mutates_args=(), device_types="cuda")
def gaussian(seeds: Tensor, count: int) -> Tensor:
    """`count` standard normal numbers in float32 for each of the int64 `seeds`: [*seeds, count]."""
    from fedgist.synthesis import gaussian_kernels

    numbers = torch.empty(*seeds.shape, count, device=seeds.device)
    half = (count + 1) // 2
    if numbers.numel():
        gaussian_kernels.normal[-(-half // BLOCK), seeds.numel()](seeds.contiguous(), numbers, count, half, BLOCK)
    return numbers


@gaussian.register_fake
def _(seeds: Tensor, count: int) -> Tensor:
    return torch.empty(*seeds.shape, count, device=seeds.device)


@gaussian.register_vmap
def _(info: Any, dims: tuple[int | None, None], seeds: Tensor, count: int) -> tuple[Tensor, int | None]:
    if dims[0] is None:
        return gaussian(seeds, count), None
    return gaussian(seeds.movedim(dims[0], 0), count), 0
