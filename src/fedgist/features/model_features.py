"""What enters a model's last layer as a feature map, at weights that a seed stands for or at learned ones."""

from dataclasses import dataclass

from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.features.feature_map import unit


@dataclass(frozen=True)
class ModelFeatures:
    """A model's features at its initial weights, at norm 1."""

    model: Model

    @property
    def size(self) -> int:
        return self.model.feature_size

    def weights(self, rng: Rng) -> Params:
        return self.model.init(rng)

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        return unit(self.model(w, x).features)


@dataclass(frozen=True)
class LearnedFeatures:
    """A model's features at weights that no seed stands for: who uses the map puts them beside what is drawn."""

    model: Model
    raw: bool = False
    """As they are, of any norm."""

    @property
    def size(self) -> int:
        return self.model.feature_size

    def weights(self, rng: Rng) -> Params:
        return {}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        found = self.model(w, x).features
        return found if self.raw else unit(found)
