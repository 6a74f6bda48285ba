"""Layers as values: each knows its tensors and gives a pure function of (weights, activation)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from fedgist.core.message import Params
from fedgist.core.task import NormStatistics, Tap
from fedgist.core.work import stacked
from fedgist.models.gpu import pooling
from fedgist.models.gpu.convolution import convolve

MOMENTUM = 0.1  # BatchNorm: the share of the new batch in the running statistics
EPSILON = 1e-5  # added to every variance before its root
GROUPS = 32  # GroupNorm: at most this many groups (Wu and He 2018), each of at least two channels


# step(weights, activation, buffers, tap): BatchNorm layers write their new statistics into `buffers` (None: evaluation
# mode) and, as linear ones do, tell a `tap` what they saw (None: nobody asks). Full tensor names are bound once, not
# for each call.
Step = Callable[[Params, Tensor, Params | None, Tap | None], Tensor]


class Entry(NamedTuple):
    """One tensor of a layer; it starts uniform in fill ± bound."""

    shape: tuple[int, ...]
    fill: float = 0.0
    bound: float = 0.0
    trained: bool = True


class Layer(ABC):
    """A frozen dataclass, so that equal architectures are equal values."""

    def entries(self) -> dict[str, Entry]:
        """The tensors of this layer by their local names, in a fixed order."""
        return {}

    @abstractmethod
    def bind(self, name: str) -> Step:
        """The function of this layer when it is called `name`."""


Layers = tuple[tuple[str, Layer], ...]


def named_entries(layers: Layers) -> dict[str, Entry]:
    return {f"{name}.{key}": entry for name, layer in layers for key, entry in layer.entries().items()}


def bind_all(layers: Layers, prefix: str = "") -> tuple[Step, ...]:
    return tuple(layer.bind(prefix + name) for name, layer in layers)


Binder = Callable[[Layers, str], tuple[Step, ...]]
"""How a chain of layers becomes functions; the second argument is put before their names."""


def _affine(weight: tuple[int, ...], bias: bool, he: bool = False) -> dict[str, Entry]:
    """torch's default for Conv2d and Linear, weight and bias in ±1/√fan_in, or He's: weight in ±√(6/fan_in), bias 0."""
    bound = 1.0 / math.sqrt(math.prod(weight[1:]))
    entries = {"weight": Entry(weight, bound=math.sqrt(6.0) * bound if he else bound)}
    return entries | {"bias": Entry(weight[:1], bound=0.0 if he else bound)} if bias else entries


@dataclass(frozen=True)
class Conv(Layer):
    """he: starts as He et al. (2015) propose for a layer that a ReLU follows.

    A chain of ten then passes signals on as large as they came; torch's default makes them 6⁵ = 7,776 times smaller.
    """

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True
    he: bool = False

    def entries(self) -> dict[str, Entry]:
        return _affine((self.outputs, self.inputs, self.kernel, self.kernel), self.bias, self.he)

    def bind(self, name: str) -> Step:
        weight, bias = f"{name}.weight", f"{name}.bias"
        stride, padding = (self.stride, self.stride), (self.padding, self.padding)
        if self.bias:
            return lambda w, x, buffers, tap: convolve(x, w[weight], w[bias], stride, padding)
        return lambda w, x, buffers, tap: convolve(x, w[weight], None, stride, padding)


@dataclass(frozen=True)
class Conv1d(Layer):
    """Along the length of a signal, which stays as it is (an odd kernel, padded with zeros)."""

    inputs: int
    outputs: int
    kernel: int

    def entries(self) -> dict[str, Entry]:
        return _affine((self.outputs, self.inputs, self.kernel), bias=True)

    def bind(self, name: str) -> Step:
        weight, bias, padding = f"{name}.weight", f"{name}.bias", self.kernel // 2
        return lambda w, x, buffers, tap: torch.conv1d(x, w[weight], w[bias], padding=padding)


@dataclass(frozen=True)
class Embeddings(Layer):
    """The last columns of a table are one-hot blocks of these sizes: each becomes its row of a table of its own.

    As a product, so that a synthetic row, which is never quite one-hot, has an embedding and a gradient, too.
    """

    sizes: tuple[int, ...]
    width: int

    def entries(self) -> dict[str, Entry]:
        # as large as a standardised column: a row of the table is N(0, 1) in torch; uniform with variance 1 here
        return {f"{i}": Entry((size, self.width), bound=math.sqrt(3.0)) for i, size in enumerate(self.sizes)}

    def bind(self, name: str) -> Step:
        names = [f"{name}.{i}" for i in range(len(self.sizes))]

        def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
            numeric, *blocks = x.split([x.shape[1] - sum(self.sizes), *self.sizes], 1)
            return torch.cat([numeric, *(block @ w[own] for block, own in zip(blocks, names, strict=True))], 1)

        return step


@dataclass(frozen=True)
class Linear(Layer):
    inputs: int
    outputs: int

    def entries(self) -> dict[str, Entry]:
        return _affine((self.outputs, self.inputs), bias=True)

    def bind(self, name: str) -> Step:
        weight, bias = f"{name}.weight", f"{name}.bias"

        def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
            if tap is not None:
                tap.entering[name] = x
            if stacked() and x.is_cuda:  # vmap would multiply the bias by one first
                return x @ w[weight].mT + w[bias]
            return F.linear(x, w[weight], w[bias])

        return step


class Moments(Function):
    """Mean and biased variance of each channel in one pass, and one for their gradient: ∂x = (m̄ + 2 v̄ (x − m)) / n."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, _other_dims(x), correction=0)
        return mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x, mean), (to_mean, to_variance) = ctx.saved_tensors, grads
        count = x.numel() // x.shape[1]
        slope = to_variance * (2 / count)
        level = to_mean / count - slope * mean
        form = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(level.view(form), slope.view(form), x)


def channel_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of each channel."""
    if x.is_cuda:
        mean, variance = Moments.apply(x)
        return mean, variance
    # two plain means: torch.var_mean costs twice as much on a CPU
    others = _other_dims(x)
    mean = x.mean(others, keepdim=True)
    return mean.flatten(), (x - mean).square().mean(others)


def _other_dims(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_variance: Tensor,
    names: tuple[str, str],
    buffers: Params | None,
    tap: Tap | None,
    momentum: float = MOMENTUM,
    epsilon: float = EPSILON,
) -> Tensor:
    """torch's BatchNorm without its in-place update: new running statistics go into `buffers` under `names`."""
    if tap is not None:
        tap.append(NormStatistics(*channel_moments(x), running_mean, running_variance))
    if buffers is None:
        return torch.batch_norm(x, weight, bias, running_mean, running_variance, False, 0.0, epsilon, True)
    # The kernel hands its own batch statistics back (as mean and 1/√(variance + ε)), so no second pass over x.
    out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, epsilon)
    values = x.numel() // x.shape[1]
    buffers[names[0]] = torch.lerp(running_mean, mean.detach(), momentum)
    if values > 1:
        variance = (scale.detach() ** -2 - epsilon).clamp_min(0.0) * (values / (values - 1))
        buffers[names[1]] = torch.lerp(running_variance, variance, momentum)
    else:
        buffers[names[1]] = running_variance  # one value a channel has no unbiased variance
    return out


NORMS = ("batch", "instance", "group", "none")


@dataclass(frozen=True)
class Norm(Layer):
    """A norm layer with affine weights. `instance` is GroupNorm with one channel a group, and keeps no statistics."""

    kind: str
    channels: int

    def entries(self) -> dict[str, Entry]:
        # No num_batches_tracked: torch needs it only for a cumulative average, and an integer cannot be averaged.
        size = (self.channels,)
        entries = {"weight": Entry(size, fill=1.0), "bias": Entry(size)}
        if self.kind == "batch":
            entries |= {"running_mean": Entry(size, trained=False)}
            entries |= {"running_var": Entry(size, fill=1.0, trained=False)}
        return entries

    def bind(self, name: str) -> Step:
        weight, bias = f"{name}.weight", f"{name}.bias"
        if self.kind == "batch":
            names = mean, variance = f"{name}.running_mean", f"{name}.running_var"
            return lambda w, x, buffers, tap: batch_norm(
                x, w[weight], w[bias], w[mean], w[variance], names, buffers, tap
            )
        groups = self.channels if self.kind == "instance" else max(1, math.gcd(2 * GROUPS, self.channels) // 2)
        return lambda w, x, buffers, tap: F.group_norm(x, groups, w[weight], w[bias], EPSILON)


def norm_layer(name: str, kind: str, channels: int) -> Layers:
    """The named norm layer, or nothing for `none`: to be spliced into a tuple of layers."""
    return () if kind == "none" else ((name, Norm(kind, channels)),)


@dataclass(frozen=True)
class Relu(Layer):
    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: torch.relu(x)


@dataclass(frozen=True)
class Tanh(Layer):
    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: torch.tanh(x)


def max_pool(x: Tensor, size: int) -> Tensor:
    """F.max_pool2d. On a CPU torch compares value by value, unless channels lie last: all squares at once are faster.

    To train there, the places of the maxima are found with some images at a time taken for channels that lie last.
    """
    if not is_eager(x) or min(x.shape[2:]) < size:  # of images that are too small torch says so
        return torch.max_pool2d(x, size)  # torch's own builtin: F.max_pool2d adds a Python dispatch to every call
    if not x.requires_grad:
        return _maxima(x, size)
    images, channels, *sides = x.shape
    turned = (
        x.detach().reshape(-1, math.gcd(images, 8) * channels, *sides).contiguous(memory_format=torch.channels_last)
    )
    _, where = torch.ops.aten.max_pool2d_with_indices(turned, size)
    where = where.contiguous().view(images, channels, *where.shape[2:])
    return x.flatten(2).gather(2, where.flatten(2)).view(where.shape)


def _maxima(x: Tensor, size: int) -> Tensor:
    """Of lines first, which lie together in memory, then of what they leave."""
    height, width = (side // size * size for side in x.shape[2:])
    lines = reduce(torch.maximum, (x[..., i:height:size, :width] for i in range(size)))
    return reduce(torch.maximum, (lines[..., j::size] for j in range(size)))


@dataclass(frozen=True)
class MaxPool(Layer):
    size: int = 2

    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: max_pool(x, self.size)


@dataclass(frozen=True)
class MaxPool1d(Layer):
    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: torch.max_pool1d(x, 2)


def is_eager(x: Tensor) -> bool:
    """Whether a CPU works on `x` here and now, and nobody stacks or traces it: another way to the same bits will do."""
    traced = torch.jit.is_tracing() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.is_cpu and not traced


class Averages(Function):
    """The averages of squares that tile an image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return _averages(x, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """A square's gradient goes to all its pixels alike."""
        share = (grads[0] / ctx.size**2)[:, :, :, None, :, None]
        return share.expand(-1, -1, -1, ctx.size, -1, ctx.size).flatten(4).flatten(2, 3), None


def _averages(x: Tensor, size: int) -> Tensor:
    """In torch's order of summing, so that rounding is the same."""
    height, width = (side // size * size for side in x.shape[2:])
    first, *others = (x[..., i:height:size, j:width:size] for i in range(size) for j in range(size))
    return sum(others, first).div_(size**2)


def average_pool(x: Tensor, size: int) -> Tensor:
    """F.avg_pool2d. On a CPU torch adds square by square; all squares at once have the same bits a few times sooner."""
    if size == 1 or x.dtype.itemsize < 4 or not is_eager(x):
        return pooling.average_pool(x, size)
    if not torch.is_grad_enabled():
        return _averages(x, size)
    tiled = x.shape[2] % size == 0 and x.shape[3] % size == 0
    return Averages.apply(x, size) if tiled else F.avg_pool2d(x, size)


@dataclass(frozen=True)
class AvgPool(Layer):
    size: int = 2

    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: average_pool(x, self.size)


@dataclass(frozen=True)
class GlobalAvgPool(Layer):
    """The mean over all places: [batch, channels, height, width] or [batch, channels, length] to [batch, channels]."""

    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: x.mean(tuple(range(2, x.dim())))


@dataclass(frozen=True)
class Flatten(Layer):
    def bind(self, name: str) -> Step:
        return lambda w, x, buffers, tap: x.flatten(1)


@dataclass(frozen=True)
class Residual(Layer):
    """body(x) + shortcut(x); an empty shortcut is the identity. An activation after the sum is a layer of its own."""

    body: Layers
    shortcut: Layers = ()

    def entries(self) -> dict[str, Entry]:
        return named_entries(self.body) | named_entries(self.shortcut)

    def bind(self, name: str, binder: Binder = bind_all) -> Step:
        body, shortcut = binder(self.body, f"{name}."), binder(self.shortcut, f"{name}.")

        def step(w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> Tensor:
            y = x
            for part in body:
                y = part(w, y, buffers, tap)
            for part in shortcut:
                x = part(w, x, buffers, tap)
            return y + x

        return step
