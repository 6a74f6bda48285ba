"""Training on images that are good only near the weights at which they were made. Xiong et al. 2023, Eqs. 3 and 5.

It starts at the centre w_r of the ball B_ρ(w_r) and never leaves it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.task import Output
from fedgist.core.tree import Tree
from fedgist.learning.optimisers import add_scaled
from fedgist.learning.training import Carry, Trainer
from fedgist.synthesis.augmentation import Change


def project(w: Params, centre: Params, radius: float, fixed: frozenset[str]) -> Params:
    """The point of the ball around `centre` that is nearest to `w`; the tensors named in `fixed` stay as they are."""
    free = [name for name in w if name not in fixed]
    from_here = {name: centre[name] for name in free}
    way = add_scaled({name: w[name] for name in free}, -1.0, from_here)
    factor = (radius / tree.norm(way).clamp_min(1e-12)).clamp_max(1.0)
    return {**w, **add_scaled(from_here, factor, way)}


def weighted_cross_entropy(output: Output, y: Tensor, weight: Tensor, w: Params) -> Tensor:
    """The mean over the images that count of weight times cross-entropy; 0 where none does."""
    losses = F.cross_entropy(output.logits, y, reduction="none")
    return (losses * weight).sum() / (weight > 0).sum().clamp_min(1)


@dataclass(frozen=True)
class SurrogateTrainer:
    """Supervised training that stays in the ball B_ρ(w_r) (Eq. 3)."""

    trainer: Trainer
    rho: float

    def step(self, carry: Carry, batch: Tree, pool: Tree, centre: Params) -> Carry:
        if "changes" in batch:
            index = batch["index"]
            x = pool["x"][index]
            pool = {"x": Change(batch["changes"], x)(x), "y": pool["y"][index]}
            batch = {**batch, "index": torch.arange(len(index), device=index.device)}
        w, state = self.trainer.step(carry, batch, pool, batch["lr"])
        return project(w, centre, self.rho, self.trainer.model.buffers), state
