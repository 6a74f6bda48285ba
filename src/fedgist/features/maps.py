"""Feature maps by their names, alone or side by side as in `model+scattering`, and linear models on them by a text."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.task import Model
from fedgist.features.convolutions import Convolutions
from fedgist.features.feature_map import Beside, Contrast, FeatureMap, Values
from fedgist.features.fourier import Fourier
from fedgist.features.linear_model import LinearModel
from fedgist.features.model_features import LearnedFeatures, ModelFeatures
from fedgist.features.scattering import Scattering
from fedgist.features.signals import SignalScattering

NAMES = ("scattering", "contrast", "fourier", "convolutions", "model", "learned")


@dataclass(frozen=True)
class Ground:
    """What maps are made for: images of this shape and range, and the net that `model` and `learned` are about."""

    shape: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    net: Model


@dataclass(frozen=True)
class Sizes:
    """How large they are, and how wide the kernel of `fourier` is."""

    grid: int
    scales: int
    orientations: int
    dimensions: int
    bandwidth: float


def build(names: str, ground: Ground, sizes: Sizes, raw: bool = False) -> FeatureMap:
    """The map that `a+b` names; with `raw`, learned features are of any norm."""
    parts = tuple(_one(name, ground, sizes, raw) for name in names.split("+"))
    return parts[0] if len(parts) == 1 else Beside(parts)


def _one(name: str, ground: Ground, sizes: Sizes, raw: bool) -> FeatureMap:
    if name not in NAMES:
        raise unknown("feature map", name, NAMES)
    if name == "model":
        return ModelFeatures(ground.net)
    if name == "learned":
        return LearnedFeatures(ground.net, raw)
    if name == "convolutions":
        return Convolutions(ground.shape, sizes.dimensions // (2 * sizes.grid**2), sizes.grid)
    if name == "scattering" and is_signal(ground.shape):
        return SignalScattering(ground.shape, sizes.grid)
    if name == "fourier" and len(ground.shape) != 3:
        return Fourier(Values(math.prod(ground.shape)), sizes.dimensions // 2 * 2, sizes.bandwidth)
    fixed = Scattering(ground.shape, ground.low, ground.high, sizes.scales, sizes.orientations, sizes.grid)
    if name == "contrast":
        return Contrast(fixed)
    return fixed if name == "scattering" else Fourier(fixed, sizes.dimensions // 2 * 2, sizes.bandwidth)


def usual(shape: tuple[int, ...]) -> str:
    """What fits such inputs where nobody says: scattering of images and of signals, fourier of all else."""
    return "scattering" if len(shape) == 3 or is_signal(shape) else "fourier"


def is_signal(shape: tuple[int, ...]) -> bool:
    """Channels of at least so many values that there is something to scatter."""
    return len(shape) == 2 and shape[1] >= 16


def learned(names: str, net: Model) -> dict[str, tuple[int, ...]]:
    """What a map computes with that no seed stands for, under the names that it has there."""
    parts = names.split("+")
    if "learned" not in parts:
        return {}
    prefix = "" if len(parts) == 1 else f"{parts.index('learned')}."
    return {f"{prefix}{name}": shape for name, shape in net.shapes.items()}


def linear_model(names: str, ground: Ground, sizes: Sizes) -> LinearModel:
    """The classifier on such a map; where its text has {net}, whoever writes it down says which net that is."""
    made = {"grid": sizes.grid, "scales": sizes.scales, "orientations": sizes.orientations}
    sized = {**made, "dimensions": sizes.dimensions}
    needed = {"scattering": made, "contrast": made, "fourier": sized, "convolutions": sized}
    told = {key: value for name in names.split("+") for key, value in needed.get(name, {"net": "{net}"}).items()}
    spec = ":".join(["gist", f"features={names}", *(f"{key}={value}" for key, value in told.items())])
    features, extra = build(names, ground, sizes), tuple(learned(names, ground.net).items())
    return LinearModel(features, ground.shape, ground.net.classes, extra, spec)


def from_text(options: Mapping[str, Any], ground: Callable[[str], Ground]) -> LinearModel:
    """The linear model that such a text is of; `ground` is made for the net that it names, its colons as semicolons."""
    told = dict(options)
    names, net = str(told.pop("features", "")), str(told.pop("net", "mlp")).replace(";", ":")
    for key, value in told.items():
        if key not in ("grid", "scales", "orientations", "dimensions") or not isinstance(value, int) or value < 1:
            raise FedgistError(f"a linear model on features has no {key} = {value}")
    sizes = Sizes(**{"grid": 4, "scales": 2, "orientations": 8, "dimensions": 2, **told}, bandwidth=1.0)
    return linear_model(names, ground(net), sizes)
