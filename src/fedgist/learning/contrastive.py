"""The losses of representation sharing, and which samples a released representation averages. Berdoz 2022, Eqs. 5 to 7.

A student's feature s is drawn towards the mean feature of its class (the distance), and the client's own classifier
must tell which of the others' features t are of the class of s (the discriminator). It may also be a small net beside
the model, as in Tian, Krishnan and Isola 2020, from whom the loss is.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output
from fedgist.options import option

DISCRIMINATORS = ("classifier", "external")
CRITIC = "discriminator."
"""What the names of an external discriminator's weights begin with, which lie beside those of the model."""
TEMPERATURE = 0.1
"""Of an external discriminator, which sees directions of features alone."""
REDUCTIONS = ("code", "paper")
"""`paper`: sums over features and classes, as printed; `code`: means, which is how the published numbers were made."""


@dataclass(frozen=True)
class Choices:
    """What every client decides for itself."""

    lambda_kd: float = option(10.0, "Weight of the distance to the global representation of a sample's class.", low=0)
    lambda_disc: float = option(1.0, "Weight of the contrastive discriminator loss.", low=0)
    discriminator: str = option(
        "classifier", "What tells classes of features apart: the own classifier, or a net beside it.", DISCRIMINATORS
    )
    released: tuple[int, ...] = option(
        (), "Classes of which representations are released; without it, all.", low=0, formerly="classes"
    )
    share: float = option(
        1.0,
        "Share of the samples of each class that released averages may use.",
        low=0,
        high=1,
        safe=("0.5..1",),
        reveals="Averages over a small share are nearly the features of single samples.",
    )
    peers: tuple[str, ...] = option((), "Clients listened to, then alone in global means too; without it, all.")


def bounded(model: Model) -> bool:
    """Whether features stay between −1 and 1 however far away an input is, as those that end in a tanh do."""
    w = model.init(Rng(0))
    far = 1e3 * Rng(0)("far").normal(8, *model.input_shape)
    with torch.no_grad():
        return float(model(w, far.to(next(iter(w.values())))).features.abs().max()) <= 1


def log_agreement(students: Tensor, teachers: Tensor) -> tuple[Tensor, Tensor]:
    """log ĥ and log(1 − ĥ) of Eq. 5 for every pair, from logits [B, K] and [T, K]: two tensors [B, T].

    With p and q the softmax of the two, ĥ = Σ_a p_a q_a, and 1 − ĥ = Σ_a p_a r_a with r_a = Σ_{b≠a} q_b. Both are sums
    of positive numbers, so their logarithms are exact where 1 − ĥ itself would round to 0.
    """
    p, q = students.log_softmax(-1)[:, None], teachers.log_softmax(-1)
    same = torch.eye(q.shape[-1], dtype=torch.bool, device=q.device)
    r = q[:, None].masked_fill(same, -torch.inf).logsumexp(-1)
    return (p + q).logsumexp(-1), (p + r).logsumexp(-1)


def critic(features: int, rng: Rng) -> Params:
    """An external discriminator's weights: a linear map of students' features, and one of teachers'."""
    names = (f"{CRITIC}student", f"{CRITIC}teacher")
    return {name: rng(name).normal(features, features) / features**0.5 for name in names}


def critic_agreement(w: Params, students: Tensor, teachers: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """log ĥ and log(1 − ĥ) of an external discriminator for every pair, from features [B, d'] and [T, d'].

    ĥ = e^z / (e^z + C − 1), z the cosine of the mapped features over a temperature: where features tell nothing (z =
    0), ĥ is 1/C, the share of pairs of one class.
    """
    s, t = F.normalize(students @ w[f"{CRITIC}student"].T), F.normalize(teachers @ w[f"{CRITIC}teacher"].T)
    z = s @ t.T / TEMPERATURE - math.log(max(1, classes - 1))
    return F.logsigmoid(z), F.logsigmoid(-z)


def discriminator(agreement: tuple[Tensor, Tensor], y: Tensor, many: int, observed: Tensor) -> Tensor:
    """Σ_c ℓ_disc([c = y], s, t^c) of Eq. 7 for every student, as a mean over the M teachers of each class.

    agreement: log ĥ and log(1 − ĥ), each [B, M·C]; y: [B]; observed: [C], 0 where a class has no teacher.
    """
    classes = len(observed)
    own = y[:, None] == torch.arange(classes, device=y.device).repeat(many)
    losses = -torch.where(own, *agreement).unflatten(1, (many, classes))
    return (losses.sum(1) / max(1, many) * observed).sum(1)


def distance(features: Tensor, y: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """ℓ_KD = ‖s − t̄^y‖² for every student; 0 where the mean of its class is not known."""
    return (features - means[y]).square().sum(1) * known[y]


@dataclass(frozen=True)
class RepresentationLoss:
    """L_CE + λ_KD L_KD + λ_disc L_disc (Eq. 6). What is absent adds nothing, and what is present weighs the same."""

    model: Model
    reduction: str = "code"
    discriminator: str = "classifier"

    def __call__(
        self, output: Output, y: Tensor, mask: Tensor, w: Params, lesson: Any, kd: Tensor, disc: Tensor
    ) -> Tensor:
        """`lesson` holds means [C, d'], known [C], observations [M, C, d'] and observed [C]."""
        many, classes = lesson["observations"].shape[:2]
        teachers = lesson["observations"].flatten(0, 1)
        agreement = (
            critic_agreement(w, output.features, teachers, classes)
            if self.discriminator == "external"
            else log_agreement(output.logits, self.model.head(w, teachers))
        )
        doubt = discriminator(agreement, y, many, lesson["observed"])
        apart = distance(output.features, y, lesson["means"], lesson["known"])
        if self.reduction == "code":
            doubt, apart = doubt / classes, apart / output.features.shape[1]
        losses = F.cross_entropy(output.logits, y, reduction="none") + kd * apart + disc * doubt
        return (losses * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Averager:
    """Adds up features by class; a value, so that equal models of many clients are one computation."""

    model: Model

    def step(self, carry: tuple[Tensor, Tensor], batch: Any, w: Params, pool: Any) -> tuple[Tensor, Tensor]:
        """(class sums, observations) -> the same with one more batch, whose samples count `weight` and `member`."""
        sums, observations = carry
        y = pool["y"][batch["index"]]
        features = self.model(w, pool["x"][batch["index"]]).features
        of_class = (y[:, None] == torch.arange(len(sums), device=y.device)).to(features.dtype)
        sums = sums + (of_class * batch["weight"][:, None]).T @ features
        return sums, observations + torch.einsum("bm,bc,bd->mcd", batch["member"], of_class, features)


def chosen(y: Tensor, keys: Tensor, sizes: Tensor) -> Tensor:
    """Whether a sample is among the first `sizes[c]` of its class c by its key, for each row of `keys` [..., n]."""
    order = keys.argsort(dim=-1, stable=True)
    order = order.gather(-1, y[order].argsort(dim=-1, stable=True))  # by class, and by key within a class
    counts = y.bincount(minlength=len(sizes))
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(y)) - first[y[order]]
    return torch.zeros(keys.shape, dtype=torch.bool).scatter(-1, order, rank < sizes[y[order]])


def draw(values: Tensor, there: Tensor, keys: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """`many` random rows of `values` [P, C, d'] for each class, and for which classes any were drawn [C].

    Rows are taken in the order of `keys` [P, C], and again from the first where fewer than `many` are `there` [P, C].
    """
    available = there.sum(0)
    order = (keys + 2 * ~there).argsort(0)
    rows = order.gather(0, torch.arange(many)[:, None] % available.clamp_min(1)).to(values.device)
    observed = (available.clamp_max(many) > 0).to(values.device)
    return values[rows, torch.arange(len(available), device=values.device)] * observed[:, None], observed
