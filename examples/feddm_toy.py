"""FedDM's idea in one dimension: 20 synthetic points carry a loss further than its tangent (Xiong et al. 2023, Fig. 1).

Run it with: python examples/feddm_toy.py [plot.svg]
"""

import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.learning.optimisers import SGD
from fedgist.models import Output
from fedgist.synthesis.matching import ClassBatches, Matcher, shares


@dataclass(frozen=True)
class OneWeight:
    """ŷ = sigmoid(w x): the feature of a point is the point, its logit w x."""

    buffers = frozenset[str]()

    def __call__(self, w: dict[str, Tensor], x: Tensor) -> Output:
        return Output(x, w["w"] * x, {})


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Eq. 12 at many weights at once."""
    return F.binary_cross_entropy_with_logits(w[:, None] * x.T, y.T.expand(len(w), -1), reduction="none").mean(1)


def curves(seed: int = 0, init: str = "real", steps: int = 100) -> dict[str, Tensor]:
    """The weights, and at each of them the loss, its surrogate and its tangent at w = 0."""
    rng = Rng(seed)
    x = rng("x").normal(100, 1).double()
    y = torch.where(rng("p").uniform(100, 1) >= 0.1, x >= 0, x < 0).double()  # Eq. 11: a tenth of the labels is wrong
    classes = [(y[:, 0] == c).nonzero().flatten() for c in (0, 1)]
    picked = [own[rng("pick", c).permutation(len(own))[:10]] for c, own in enumerate(classes)]
    points = x[torch.cat(picked)] if init == "real" else rng("points").normal(20, 1).double()
    labels = torch.tensor([0.0, 1.0]).repeat_interleave(10)[:, None].double()

    batches = ClassBatches(classes, n=100, batch=100)
    matcher = Matcher(OneWeight(), rho=5.0, optimiser=SGD(0.5), lr=0.05)
    here, own = {"w": torch.zeros(1).double()}, shares([10, 10], [10, 10])
    carry, plan = matcher.init(points), batches.make(rng("steps").seed, 0, steps)
    with torch.no_grad():
        for t in range(steps):
            carry = matcher.step(carry, tree.index(plan, t), {"x": x}, here, batches.shares, own)

    w = torch.linspace(-5, 5, 201).double()
    slope = ((0.5 - y) * x).mean()  # the derivative of Eq. 12 at 0, where sigmoid is a half
    tangent = loss(here["w"], x, y) + slope * w
    return {"w": w, "loss": loss(w, x, y), "surrogate": loss(w, carry[0]["x"], labels), "tangent": tangent}


def distance(found: dict[str, Tensor], name: str) -> float:
    """Root mean square over the weights from −5 to 5."""
    return (found[name] - found["loss"]).square().mean().sqrt().item()


def main(plot: str = "feddm_toy.svg") -> None:
    found = curves()
    print(*(f"{name}: {distance(found, name):.3f} away from the loss" for name in ("surrogate", "tangent")), sep="\n")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib") from None
    axes = (figure := Figure(figsize=(6, 4))).add_subplot(xlabel="w", ylabel="loss")
    for name, style in (("loss", "-"), ("surrogate", "--"), ("tangent", ":")):
        axes.plot(found["w"], found[name], style, label=name)
    axes.legend()
    figure.savefig(plot)


if __name__ == "__main__":
    main(*sys.argv[1:2])
