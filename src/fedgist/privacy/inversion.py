"""Gradient inversion: images whose update is the one that was seen.

cosine: "Inverting Gradients: How easy is it to break privacy in federated learning?" (Geiping et al. 2020), Eq. 4.
dlg: "Deep Leakage from Gradients" (Zhu et al. 2019), Algorithm 1; with recovered labels "iDLG" (Zhao et al. 2020).
Labels: "User-Level Label Leakage from Gradients" (Wainakh et al. 2022), Algorithm 1, whose case of one image is iDLG's.

The attacker knows the model, the weights before, the update, how clients train, the number of images and their range.

Deviations from the papers:
1. The candidates are trained on as a client trains (its steps, momentum and all), and updates are compared, not
   gradients; for one plain SGD step that is the same. Geiping et al. do so for federated averaging (section 6).
2. Candidates start as uniform noise over the range of pixels; the cosine attack clamps them to it in every step.
3. DLG's L-BFGS has a strong Wolfe line search, without which it diverges on nets with ReLU and max pooling.
4. Labels are read off the gradient of the classifier's biases, not of its weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.work import Place, gradient, steps
from fedgist.learning.local_updates import effective_steps
from fedgist.learning.optimisers import Adam
from fedgist.learning.training import Trainer
from fedgist.synthesis.encoding import learning_rates, root

ATTACKS = ("cosine", "dlg")
LABELS = ("recovered", "optimised")

Fit = Callable[[Params], Params]
"""The update of the candidates."""


@dataclass(frozen=True, eq=False)
class Training:
    """How a client trains, as far as everybody knows: `plan` has its batches, but the images are the attacker's."""

    learner: Trainer
    lr: float
    plan: dict[str, Tensor]

    @property
    def count(self) -> int:
        """The number of images that the update depends on."""
        return len(self.plan["index"].unique())

    def as_one_step(self, momentum: float, images: int | None = None) -> "Training":
        """One step on all images (or so many) at once that goes as far as the steps of SGD together, were the gradient
        constant.
        """
        lr, count = self.lr * effective_steps(len(self.plan["index"]), momentum), images or self.count
        return Training(self.learner, lr, {"index": torch.arange(count)[None], "mask": torch.ones(1, count)})

    def update(self, w: Params, x: Tensor, y: Tensor) -> Params:
        """What training on images and labels (numbers or distributions) takes off the weights, over the rate."""
        lr = torch.tensor(self.lr, dtype=torch.float64)
        carry = (w, self.learner.init(w))
        for batch in steps(self.plan, Place(x.device, x.dtype)):
            carry = self.learner.step(carry, batch, {"x": x, "y": y}, lr)
        trained = [name for name in w if name not in self.learner.model.buffers]
        return {name: (w[name] - carry[0][name]) / self.lr for name in trained}


@dataclass(frozen=True)
class Attack:
    """How an update is inverted."""

    kind: str = "cosine"
    labels: str = "recovered"
    iterations: int = 1000
    restarts: int = 1
    lr: float = 0.1
    tv: float = 0.03

    def __call__(
        self, training: Training, w: Params, update: Params, low: Tensor, high: Tensor, rng: Rng
    ) -> "Recovered":
        """The best of all restarts, by how well its update fits; `low` and `high` bound the pixels of each channel."""
        model = training.learner.model
        low, high = low.view(-1, 1, 1), high.view(-1, 1, 1)
        labels = recover_labels(model, update, training.count) if self.labels == "recovered" else None
        found = []
        for i in range(self.restarts):
            start = rng("images", i).uniform(training.count, *model.input_shape).to(low)
            variables = {"x": low + (high - low) * start}
            if labels is None:
                variables["y"] = rng("labels", i).normal(training.count, model.classes).to(low)

            def fit(v: Params) -> Params:
                y = v["y"].softmax(1) if labels is None else labels
                return training.update(w, v["x"], y)

            if self.kind == "cosine":
                best = self._cosine(fit, variables, update, low, high)
            else:
                best = self._dlg(fit, variables, update)
            with torch.no_grad():
                best = tree.map(torch.nan_to_num, best)  # a search that diverged has found nothing, and says so
                x = best["x"].clamp(low, high)
                y = best["y"].argmax(1) if labels is None else labels
                found.append(Recovered(x, y, float(cosine(fit({**best, "x": x}), update))))
        return max(found, key=lambda one: one.cosine if math.isfinite(one.cosine) else -math.inf)

    def _cosine(self, fit: Fit, v: Params, update: Params, low: Tensor, high: Tensor) -> Params:
        """Adam on the sign of the gradient of 1 − cos + TV."""
        adam = Adam()
        state = adam.init(v)

        def loss(at: Params) -> tuple[Tensor, tuple[()]]:
            return 1 - cosine(fit(at), update) + self.tv * total_variation(at["x"]), ()

        with torch.no_grad():
            for lr in learning_rates(self.lr, self.iterations).tolist():
                slope, _ = gradient(loss, v)
                v, state = adam.step(v, tree.map(torch.sign, slope), state, torch.tensor(lr))
                v = {**v, "x": v["x"].clamp(low, high)}
        return v

    def _dlg(self, fit: Fit, v: Params, update: Params) -> Params:
        """L-BFGS on the squared distance of the gradients."""
        v = {name: value.clone().requires_grad_() for name, value in v.items()}
        optimiser = torch.optim.LBFGS(
            list(v.values()), max_iter=self.iterations, max_eval=2 * self.iterations, line_search_fn="strong_wolfe",
            tolerance_grad=0.0, tolerance_change=0.0,
        )  # fmt: skip

        def loss() -> Tensor:
            distance = square(tree.sub(fit(v), update))
            slopes = torch.autograd.grad(distance, list(v.values()))
            for variable, slope in zip(v.values(), slopes, strict=True):
                variable.grad = slope
            return distance

        optimiser.step(loss)
        return {name: value.detach() for name, value in v.items()}


@dataclass(frozen=True, eq=False)
class Recovered:
    """What an attack found."""

    x: Tensor
    y: Tensor
    cosine: float
    """Between the update of what was found and the one that was seen."""


def recover_labels(model: Model, update: Params, count: int) -> Tensor:
    """The labels of `count` images, from an update that is a (sum of) mean gradient(s) of the cross-entropy.

    The classifier's bias of class c has the gradient mean_i(p_ic) − (share of images with label c): what is negative
    is there, and each further image pulls by about the same amount.
    """
    pull = update[f"{model.classifier}.bias"].clone()
    impact = pull.clamp_max(0).sum() * (1 + 1 / model.classes) / count
    found = []
    for label in pull.argsort()[: min(count, int((pull < 0).sum()))].tolist():
        found.append(label)
        pull[label] -= impact
    while len(found) < count:
        label = int(pull.argmin())
        found.append(label)
        pull[label] -= impact
    return torch.tensor(sorted(found), device=pull.device)


def square(update: Params) -> Tensor:
    """The squared norm."""
    return tree.dot(update, update)


def cosine(a: Params, b: Params) -> Tensor:
    """The cosine of the angle between two updates."""
    return tree.dot(a, b) / (root(square(a)) * root(square(b)))


def total_variation(x: Tensor) -> Tensor:
    """The mean absolute difference of neighbours, down and across (as Geiping et al.)."""
    down, across = x[..., 1:, :] - x[..., :-1, :], x[..., 1:] - x[..., :-1]
    return down.abs().mean() + across.abs().mean()
