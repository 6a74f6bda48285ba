"""A linear classifier on a feature map: a model like any other, which files can be read back as."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output, Tap
from fedgist.features.feature_map import FeatureMap, below, drawn


def centred(features: Tensor, mean: Tensor, clip: float | Tensor) -> Tensor:
    """z = clip_C(φ − μ) / C, of norm at most 1; with C = 0 nothing but φ − μ."""
    apart = features - mean
    if isinstance(clip, float) and clip == 0:
        return apart
    return apart / torch.linalg.vector_norm(apart, dim=1, keepdim=True).clamp_min(clip)


@final
@dataclass(frozen=True)
class LinearModel(Model):
    """φ → centre → clip → W: logits zW + b. What φ computes with is under `features`, μ, C, W and b under `head`."""

    features: FeatureMap
    input_shape: tuple[int, ...]
    classes: int
    learned: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """What φ computes with beside what is drawn, as names and shapes."""
    spec: str = "gist"
    """The text from which it can be built again."""
    name: str = "gist"

    def init(self, rng: Rng) -> Params:
        fixed = {**self.features.weights(rng), **{name: torch.zeros(shape) for name, shape in self.learned}}
        blank = {name: torch.zeros(shape) for name, shape in self._head().items()}
        return {**{f"features.{name}": tensor.float() for name, tensor in fixed.items()}, **blank}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        fixed = {name: tuple(tensor.shape) for name, tensor in drawn(self.features, 0).items()} | dict(self.learned)
        return {**{f"features.{name}": shape for name, shape in fixed.items()}, **self._head()}

    def _head(self) -> dict[str, tuple[int, ...]]:
        size = self.features.size
        return {
            "head.mean": (size,),
            "head.clip": (),
            "head.weight": (size, self.classes),
            "head.bias": (self.classes,),
        }

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset(self.shapes) - {"head.weight", "head.bias"}

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"head": (self.features.size,)}

    def __call__(
        self, w: Params, x: Tensor, train: bool = False, start: str | None = None, tap: Tap | None = None
    ) -> Output:
        found = self.features(below(w, "features"), x) if start is None else x
        return Output(found, self.head(w, found), {})

    def head(self, w: Params, features: Tensor) -> Tensor:
        return centred(features, w["head.mean"], w["head.clip"]) @ w["head.weight"] + w["head.bias"]
