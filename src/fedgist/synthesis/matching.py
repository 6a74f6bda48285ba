"""Distribution matching around a point of weight space. Xiong et al. 2023 (FedDM), Eq. 9; Zhao and Bilen 2023.

The real data enter only through `class_means`.

Deviations from the paper:
1. P_w (Eq. 24) clips N(w_r, 1) to the ball of radius ρ. A Gaussian in d dimensions has a norm of about √d, which is 565
   for the paper's network and 5 for its ρ: the clip always acts, and P_w is uniform on the sphere. So that is drawn.
2. BatchNorm, which the paper does not use, works with its running statistics; these are not perturbed, so that at
   perturbed weights embeddings and gradients may become as large as they like. The paper's rate is then only the
   largest: a step goes at most to where the loss, continued as a line, is zero (Polyak's step, as in SPS_max of Loizou
   et al. 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core.message import Params
from fedgist.core.rng import Rng, uniform
from fedgist.core.task import Model
from fedgist.core.tree import Tree
from fedgist.core.work import gradient, stacked
from fedgist.learning.optimisers import SGD, add_scaled
from fedgist.synthesis.augmentation import Augmentation, Change
from fedgist.synthesis.gaussian import normal


def embed(model: Model, w: Params, x: Tensor) -> Tensor:
    """h_w(x) and z_w(x) side by side: [images, features + classes]."""
    output = model(w, x)
    return torch.cat([output.features.flatten(1), output.logits], 1)


def on_sphere(w: Params, seed: Tensor, radius: float, fixed: frozenset[str] = frozenset()) -> Params:
    """A point drawn uniformly from the sphere around `w`; the tensors named in `fixed` stay as they are.

    A Gaussian vector has no preferred direction, so dividing it by its norm gives the uniform law.
    """
    names = [name for name in w if name not in fixed]
    sizes = [w[name].numel() for name in names]
    direction = normal(seed, (sum(sizes),), w[names[0]].dtype)
    parts = {name: part.view_as(w[name]) for name, part in zip(names, direction.split(sizes), strict=True)}
    return {**w, **add_scaled({name: w[name] for name in names}, radius / direction.norm(), parts)}


PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "float32": (None, None),
    "float16": (torch.float16, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}
"""What real and synthetic images are embedded in; None: in their own type.

A float16 has as many digits as TF32. Synthetic images keep their own type, because small gradients would vanish in it,
and so do all images on a CPU, which is slow with it.
"""


def class_means(embeddings: Tensor, shares: Tensor) -> Tensor:
    """[classes, m] means of [images, m] embeddings: all that leaves the real data.

    `shares` [classes, images] holds 1/|B_c| where an image belongs to a class.
    """
    return shares @ embeddings


def matching_loss(real: Tensor, synthetic: Tensor) -> Tensor:
    """Eq. 9, summed over classes: ‖Δ[h; z]‖² is ‖Δh‖² + ‖Δz‖²."""
    return (real - synthetic).square().sum()


def shares(taken: Sequence[int], width: Sequence[int]) -> Tensor:
    """The averaging matrix of consecutive groups of images: of group c, the first taken[c] of width[c] count."""
    rows = torch.zeros(len(width), sum(width), dtype=torch.float64)
    start = 0
    for row, count, size in zip(rows, taken, width, strict=True):
        row[start : start + count] = 1 / max(1, count)
        start += size
    return rows


@dataclass(frozen=True, eq=False)
class ClassBatches:
    """Which real images and which weights each step sees: `batch` samples of every class, all where it has fewer.

    `members` holds the positions of each class's samples, `n` is how many samples there are in all. With `even`, every
    class gets `batch` places, so that clients with equally many classes have equal shapes; `shares` tells which count.
    With an `augmentation`, each step has a change for its images, real and synthetic.
    """

    members: Sequence[Tensor]
    n: int
    batch: int
    even: bool = False
    augmentation: Augmentation | None = None

    @property
    def taken(self) -> list[int]:
        return [min(self.batch, len(own)) for own in self.members]

    @property
    def shares(self) -> Tensor:
        return shares(self.taken, [self.batch] * len(self.members) if self.even else self.taken)

    def make(self, seed: int, first: int, count: int) -> Tree:
        """The inputs of steps first … first + count − 1: batches drawn without replacement, changes, and seeds."""

        def seeds(name: str) -> Tensor:
            drawn = [Rng(seed, name, t).seed for t in range(first, first + count)]
            return torch.tensor(drawn, device=self.members[0].device)

        keys = torch.vmap(lambda one: uniform(one, (self.n,)))(seeds("batch"))
        change = {"change": self.augmentation.draw(seeds("augmentation"))} if self.augmentation else {}
        real = torch.cat([self._draw(keys, own) for own in self.members], 1)
        return {"real": real, "weights": seeds("weights"), "noise": seeds("noise"), **change}

    def _draw(self, keys: Tensor, own: Tensor) -> Tensor:
        # stable: equal keys are in the same order on every device
        drawn = own[keys[:, own].argsort(dim=1, stable=True)[:, : self.batch]]
        missing = self.batch - drawn.shape[1] if self.even else 0
        return torch.cat([drawn, drawn[:, :1].expand(-1, missing)], 1)


@dataclass(frozen=True)
class PaperNoise:
    """Lines 15 and 16 of Algorithm 2 (Xiong et al. 2023), as printed: the gradient of each class is clipped as a whole,
    and gets noise of deviation σC/|B_c|. This is no differential privacy: single records are not clipped.
    """

    sigma: float
    clip: float

    def __call__(self, grads: Tensor, shares: Tensor, seed: Tensor) -> Tensor:
        """`shares` [classes, images] are those of the real batches, whose largest number in a row is 1/|B_c|."""
        by_class = grads.reshape(len(shares), -1)
        lengths = torch.linalg.vector_norm(by_class, dim=1, keepdim=True)
        clipped = by_class / (lengths / self.clip).clamp_min(1.0)
        deviation = self.sigma * self.clip * shares.amax(1, keepdim=True).to(grads)
        return (clipped + deviation * normal(seed, tuple(by_class.shape), grads.dtype)).view_as(grads)


@dataclass(frozen=True)
class Matcher:
    """Moves synthetic images so that their class means match the real ones. A value, like a `Trainer`."""

    model: Model
    rho: float
    optimiser: SGD
    lr: float
    precision: str = "float32"
    noise: "PaperNoise | None" = None

    def init(self, images: Tensor) -> Tree:
        """What the scan carries: the images and the optimiser's state."""
        return {"x": images}, self.optimiser.init({"x": images})

    def step(
        self, carry: Tree, drawn: Tree, pool: Tree, w: Params, real: Tensor, own: Tensor, box: Tensor | None = None
    ) -> Tree:
        """One step of Algorithm 1, lines 12 to 15; `real` and `own` are the shares of real and synthetic images.

        With a `box` [2, channels, 1, 1] of lowest and highest pixels, images that leave it are put back.
        """
        images, state = carry
        of_real, of_own = PRECISIONS[self.precision]
        around = on_sphere(w, drawn["weights"], self.rho, self.model.buffers)
        change = Change(drawn["change"], images["x"]) if "change" in drawn else None
        target = class_means(self._embed(around, pool["x"][drawn["real"]], change, of_real), real)

        def loss(images: Params) -> tuple[Tensor, tuple[()]]:
            return matching_loss(target, own @ self._embed(around, images["x"], change, of_own)), ()

        grads, (value, _) = gradient(loss, images)
        if self.noise is not None:
            grads = {"x": self.noise(grads["x"], real, drawn["noise"])}
        if self.model.buffers:
            furthest = value / (self.lr * grads["x"].square().sum()).clamp_min(1e-30)
            grads = {"x": grads["x"] * furthest.clamp_max(1.0)}
        moved, state = self.optimiser.step(images, grads, state, self.lr)
        return moved if box is None else {"x": moved["x"].clamp(box[0], box[1])}, state

    def _embed(self, w: Params, x: Tensor, change: Change | None, computed_in: torch.dtype | None) -> Tensor:
        """The embeddings of the changed images, in the images' own type."""
        x, own = x if change is None else change(x), x.dtype
        if computed_in is not None and (x.is_cuda or computed_in != torch.float16):
            w, x = _rounded(w, computed_in), x.to(computed_in)
        return embed(self.model, w, x).to(own)


def _rounded(w: Params, dtype: torch.dtype) -> Params:
    """The weights in another type, in one call for all tensors where that is possible."""
    if stacked():
        return {name: tensor.to(dtype) for name, tensor in w.items()}
    made = {name: torch.empty_like(tensor, dtype=dtype) for name, tensor in w.items()}
    torch._foreach_copy_(list(made.values()), list(w.values()))
    return made
