"""Distribution matching to sums that were released once: of clipped features of each class under public nets.

The real data enter through `sums` alone, whose rows have norm 1 at most whatever a record is; all else is about the
images that are made. Relatives: DP-MERF (Harder et al. 2021), with random features, and FedDM, whose nets these are.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.task import Batches, Model
from fedgist.core.tree import Tree
from fedgist.core.work import Pool, gradient
from fedgist.learning.optimisers import Adam
from fedgist.synthesis.matching import embed, on_sphere

ADAM = Adam()
COUNTED = 0.1
"""β: a row ends with it, so that a sum of rows tells how many there were."""


@dataclass(frozen=True)
class ClassSums:
    """A value: rows φ_j(x) = clip_C(u_j(x) − a_j)/C under nets w_j on the sphere of radius ρ around w, which a public
    seed each stands for; u are the net's features and logits at norm 1, a_j is public.
    """

    model: Model
    rho: float
    clip: float

    @property
    def size(self) -> int:
        """Numbers of a row, without the one that counts."""
        return self.model.feature_size + self.model.classes

    @staticmethod
    def sensitivity(nets: int) -> float:
        """How far one record moves the sums under all nets, added or removed: a row of norm 1 under each."""
        return math.sqrt(nets)

    def around(self, w: Params, seed: Tensor) -> Params:
        return on_sphere(w, seed, self.rho, self.model.buffers)

    def unit(self, w: Params, x: Tensor) -> Tensor:
        found = embed(self.model, w, x)
        return found / torch.linalg.vector_norm(found, dim=1, keepdim=True).clamp_min(1e-12)

    def rows(self, w: Params, x: Tensor, centre: Tensor) -> Tensor:
        away = self.unit(w, x) - centre
        return away / torch.linalg.vector_norm(away, dim=1, keepdim=True).clamp_min(self.clip)

    def sums(self, plan: Batches, pool: Pool, w: Params, seeds: Tensor, centres: Tensor) -> Tensor:
        """[nets, classes, size + 1]: Σ (√(1 − β²) φ_j(x), β) over the records of each class, in float64."""
        found = []
        for seed, centre in zip(seeds, centres, strict=True):
            around = self.around(w, seed)
            total = torch.zeros(self.model.classes, self.size + 1, dtype=torch.float64, device=centre.device)
            for index, mask in zip(plan["index"], plan["mask"], strict=True):
                own = F.one_hot(pool["y"][index], self.model.classes).double() * mask[:, None].double()
                total = total + own.T @ _counted(self.rows(around, pool["x"][index], centre.to(pool["x"].dtype)))
            found.append(total)
        return torch.stack(found)

    def means(self, total: Tensor) -> Tensor:
        """[nets, classes, size]: mean rows from sums that noise has moved; the counts are those of all nets."""
        count = (total[..., -1].mean(0) / COUNTED).clamp_min(1.0)
        return total[..., :-1] / (math.sqrt(1 - COUNTED**2) * count[:, None])

    def centres(self, x: Tensor, w: Params, seeds: Tensor) -> Tensor:
        """[nets, size]: where public images lie under each net."""
        return torch.stack([self.unit(self.around(w, seed), x).mean(0) for seed in seeds])


def _counted(rows: Tensor) -> Tensor:
    """Rows of norm 1 at most and finite, whatever they were made of, each with β at its end."""
    rows = rows.double().nan_to_num(0.0, 0.0, 0.0)
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1)
    return torch.cat([math.sqrt(1 - COUNTED**2) * rows, torch.full_like(rows[:, :1], COUNTED)], 1)


@dataclass(frozen=True)
class SumMatcher:
    """Moves images, as many of each class, class after class, until their mean rows are those that were released."""

    sums: ClassSums
    lr: float

    def init(self, images: Tensor) -> Tree:
        """What the scan carries."""
        return {"x": images}, ADAM.init({"x": images})

    def step(
        self, carry: Tree, drawn: Tree, w: Params, seeds: Tensor, centres: Tensor, means: Tensor, box: Tensor
    ) -> Tree:
        """One step, under the net that it is the turn of; pixels stay in the `box` [2, channels, 1, 1]."""
        images, state = carry
        around, centre, target = self.sums.around(w, seeds[drawn["net"]]), centres[drawn["net"]], means[drawn["net"]]

        def loss(images: Params) -> tuple[Tensor, tuple[()]]:
            own = self.sums.rows(around, images["x"], centre).unflatten(0, (len(target), -1)).mean(1)
            return (own - target).square().sum(), ()

        grads, _ = gradient(loss, images)
        moved, state = ADAM.step(images, grads, state, self.lr)
        return {"x": moved["x"].clamp(box[0], box[1])}, state
