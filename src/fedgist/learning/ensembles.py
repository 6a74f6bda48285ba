"""Ensembles: what several models of one architecture say together, and a student that learns to say the same."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output
from fedgist.core.tree import Tree
from fedgist.core.work import Pool, scan
from fedgist.learning.distillation import Distiller
from fedgist.learning.evaluation import BATCH
from fedgist.learning.optimisers import Adam
from fedgist.learning.training import Trainer


@dataclass(frozen=True)
class Ensemble:
    """Models of one architecture; a value, so that the ensembles of several seeds are one computation."""

    model: Model

    def logits(self, members: Params, shares: Tensor, x: Tensor) -> Tensor:
        """Σ_k s_k f(x; w_k) for stacked weights; in evaluation mode, one member after the other to save memory."""

        def said(x: Tensor) -> Tensor:
            each = (self.model(tree.index(members, k), x).logits * shares[k] for k in range(len(shares)))
            return torch.stack(list(each)).sum(0)

        return torch.cat([said(part) for part in x.split(BATCH[x.device.type])])

    def __call__(self, w: Tree, x: Tensor) -> Output:
        """What the ensemble says on average, as a model would: `w` holds its `members` and their `shares`.

        A sum would win by the same class, but be the surer of it the more members there are.
        """
        said = self.logits(w["members"], w["shares"], x) / w["shares"].sum()
        return Output(said, said, {})

    def hits(self, members: Params, shares: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """How many images of each label the ensemble gets right: [classes]."""
        right = self.logits(members, shares, x).argmax(1) == y
        return (right[:, None] & (y[:, None] == torch.arange(self.model.classes, device=y.device))).sum(0)


async def distil(
    model: Model, w: Params, x: Tensor, teacher: Tensor, steps: int, batch: int, lr: float, rng: Rng
) -> Params:
    """`w` after `steps` of Adam towards the teacher's logits on images `x`; the rate falls along a cosine to zero."""
    student = Distiller(Trainer(model, Adam()))
    rates = lr * 0.5 * (1 + torch.cos(torch.arange(steps) * (math.pi / max(1, steps))))
    plan = {"index": rng.integers(len(x), steps, batch), "mask": torch.ones(steps, batch), "lr": rates}
    learned, _ = await scan(student.step, (w, student.init(w)), plan, Pool(x=x, logits=teacher))
    return learned
