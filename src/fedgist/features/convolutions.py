"""Random convolutions: filters that nobody learned, both halves of what they give, averaged over the cells of a grid.

Jarrett et al. 2009 and Coates and Ng 2011 found how far such filters go. Here a filter has mean 0 in every channel, so
that brightness and tint do not count.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.features.feature_map import unit
from fedgist.options import only_images

SIDE = 4
"""Of a filter: 4 was better than 6 on held-out images of CIFAR-10."""


@dataclass(frozen=True)
class Convolutions:
    """φ(x) = √ of the means of max(x ∗ f, 0) and of max(−x ∗ f, 0) over cells, at norm 1."""

    shape: tuple[int, ...]
    filters: int
    grid: int

    def __post_init__(self) -> None:
        only_images("features=convolutions", self.shape)
        if self.filters < 1 or min(self.shape[1:]) - SIDE + 1 < self.grid:
            least = self.grid + SIDE - 1
            raise FedgistError(
                f"random convolutions with grid={self.grid} need dimensions={2 * self.grid**2} and images of "
                f"{least}×{least} at least: take a smaller grid"
            )

    @property
    def size(self) -> int:
        return 2 * self.filters * self.grid**2

    def weights(self, rng: Rng) -> Params:
        drawn = rng("filters").normal(self.filters, self.shape[0], SIDE, SIDE)
        drawn = drawn - drawn.mean((2, 3), keepdim=True)
        return {"filters": drawn / torch.linalg.vector_norm(drawn, dim=(1, 2, 3), keepdim=True)}

    def __call__(self, w: Params, x: Tensor) -> Tensor:
        found = F.conv2d(x, w["filters"])
        halves = torch.cat([found.clamp_min(0), (-found).clamp_min(0)], dim=1)
        return unit(F.adaptive_avg_pool2d(halves, self.grid).flatten(1).sqrt())
