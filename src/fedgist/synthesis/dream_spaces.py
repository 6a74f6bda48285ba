"""What dreams are made of: free values, or codes and a generator. Both are dicts of tensors that optimisers step on."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.options import only_images, option


@dataclass(frozen=True)
class FreeDreams:
    """Every value of every dream is free: pixels, or the activation at a layer."""

    count: int
    shape: tuple[int, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.count, *self.shape)}

    def start(self, rng: Rng) -> Params:
        """x ~ N(0, 1)."""
        return {"x": rng.normal(self.count, *self.shape)}

    def render(self, v: Params) -> Tensor:
        return v["x"]


@dataclass(frozen=True)
class GeneratedDreams:
    """Dreams are what a small deconvolutional generator makes of codes z; both are optimised (Fang et al. 2022).

    A linear layer to 2·width maps of a quarter of the size, twice (nearest-neighbour up-sampling, 3×3 convolution), a
    last convolution, and a sigmoid into the range of pixels; BatchNorm, by the statistics of the batch, before each.
    """

    count: int
    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    noise: int = 256
    width: int = 64

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        channels, height, rows = self.shape[0], self.shape[1] // 4, self.shape[2] // 4
        wide, narrow = 2 * self.width, self.width
        norms = {"norm0": wide, "norm1": wide, "norm2": narrow}
        return {
            "z": (self.count, self.noise),
            "fc.weight": (wide * height * rows, self.noise),
            "fc.bias": (wide * height * rows,),
            "conv1.weight": (wide, wide, 3, 3),
            "conv2.weight": (narrow, wide, 3, 3),
            "conv3.weight": (channels, narrow, 3, 3),
            "conv3.bias": (channels,),
            **{f"{norm}.weight": (size,) for norm, size in norms.items()},
            **{f"{norm}.bias": (size,) for norm, size in norms.items()},
        }

    def start(self, rng: Rng) -> Params:
        """z ~ N(0, 1); the generator as torch would initialise it."""
        v: Params = {}
        for name, shape in self.shapes.items():
            if name == "z":
                v[name] = rng(name).normal(*shape)
            elif name.startswith("norm"):
                v[name] = torch.full(shape, float(name.endswith("weight")))
            else:
                fan_in = math.prod(self.shapes[name.replace("bias", "weight")][1:])
                v[name] = (2 * rng(name).uniform(*shape) - 1) / math.sqrt(fan_in)
        return v

    def render(self, v: Params) -> Tensor:
        height, rows = self.shape[1] // 4, self.shape[2] // 4
        x = F.linear(v["z"], v["fc.weight"], v["fc.bias"]).reshape(self.count, -1, height, rows)
        x = _norm(v, "norm0", x)
        x = F.leaky_relu(_norm(v, "norm1", F.conv2d(_double(x), v["conv1.weight"], padding=1)), 0.2)
        x = F.leaky_relu(_norm(v, "norm2", F.conv2d(_double(x), v["conv2.weight"], padding=1)), 0.2)
        x = torch.sigmoid(F.conv2d(x, v["conv3.weight"], v["conv3.bias"], padding=1))
        low, high = (_channels(x, ends) for ends in (self.low, self.high))
        return low + (high - low) * x


def _norm(v: Params, name: str, x: Tensor) -> Tensor:
    return torch.batch_norm(x, v[f"{name}.weight"], v[f"{name}.bias"], None, None, True, 0.0, 1e-5, False)


def _channels(like: Tensor, values: tuple[float, ...]) -> Tensor:
    """One value a channel, filled in on the device: a copy from the host could not be recorded as a CUDA graph."""
    return torch.stack([torch.full((1, 1), value, dtype=like.dtype, device=like.device) for value in values])


def _double(x: Tensor) -> Tensor:
    """Each pixel becomes 2×2."""
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


@dataclass(frozen=True)
class SpaceOptions:
    """Where dreams live; method configurations inherit these."""

    dreams: int = option(256, "Dreams in a batch; one batch is made a round.", low=2, safe=("2..4096",))
    layer: str | None = option(None, "Dream activations that enter this layer of a common model instead of images.")
    generator: bool = option(False, "Fast variant: dreams come from a generator that is shared and optimised.")
    noise: int = option(256, "Size of the generator's codes.", low=1, safe=("1..4096",))
    width: int = option(64, "Channels of the generator's last hidden layer.", low=1, safe=("1..1024",))


def dream_space(options: SpaceOptions, task: Task) -> FreeDreams | GeneratedDreams:
    """The space that a method's options describe."""
    if options.layer is not None:
        if options.generator:
            raise FedgistError("generator makes images: leave out layer")
        first = task.models[task.model]
        for model in task.models.values():
            if options.layer not in model.layer_shapes:
                raise unknown(f"layer of {model.name}", options.layer, model.layer_shapes)
            if model != first:
                raise FedgistError(f"layer = {options.layer}: dreams inside a model need the same model everywhere")
        return FreeDreams(options.dreams, first.layer_shapes[options.layer])
    if not options.generator:
        return FreeDreams(options.dreams, task.shape)
    only_images("generator", task.shape)
    if task.shape[1] % 4 or task.shape[2] % 4:
        raise FedgistError("the generator makes images whose height and width are multiples of 4")
    return GeneratedDreams(options.dreams, task.shape, task.low, task.high, options.noise, options.width)
