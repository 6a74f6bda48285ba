"""Functional optimisers: frozen values with `init(w) -> state` and `step(w, gradient, state, lr) -> (w, state)`.

They follow torch.optim's formulas. `w` and `gradient` are dicts of tensors with the same keys; `lr` is a float or a
scalar tensor, so that a schedule does not change the computation.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.message import Params
from fedgist.core.tree import Tree
from fedgist.core.work import stacked


class Optimiser(Protocol):
    def init(self, w: Params) -> Tree: ...

    def step(self, w: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]: ...


def add_scaled(a: Params, scale: float | Tensor, b: Params) -> Params:
    """a + scale · b, in one call for all tensors where that is possible: the Python cost counts for small nets."""
    if stacked():
        if isinstance(scale, Tensor):
            return {name: torch.addcmul(a[name], b[name], scale) for name in a}
        return {name: torch.add(a[name], b[name], alpha=scale) for name in a}
    addends = [b[name] for name in a]
    if isinstance(scale, Tensor) and scale.is_cpu:
        scale = scale.item()  # nothing to wait for on a CPU, and one pass over memory instead of two
    if isinstance(scale, Tensor):
        sums = torch._foreach_add(list(a.values()), torch._foreach_mul(addends, scale))
    else:
        sums = torch._foreach_add(list(a.values()), addends, alpha=scale)
    return dict(zip(a, sums, strict=True))


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum: v ← μ v + g + λ w; w ← w − lr v."""

    momentum: float = 0.0
    weight_decay: float = 0.0

    def init(self, w: Params) -> Tree:
        return tree.zeros_like(w) if self.momentum else {}

    def step(self, w: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        if self.weight_decay:
            gradient = add_scaled(gradient, self.weight_decay, w)
        if self.momentum:
            gradient = state = add_scaled(gradient, self.momentum, state)
        return add_scaled(w, -lr, gradient), state


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) with bias correction and L2 weight decay, as torch.optim.Adam."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def init(self, w: Params) -> Tree:
        some = next(iter(w.values()))
        return {
            "m": tree.zeros_like(w),
            "v": tree.zeros_like(w),
            "t": torch.zeros((), dtype=torch.int64, device=some.device),
        }

    def step(self, w: Params, gradient: Params, state: Tree, lr: float | Tensor) -> tuple[Params, Tree]:
        if self.weight_decay:
            gradient = add_scaled(gradient, self.weight_decay, w)
        t = state["t"] + 1
        first = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["m"], gradient)
        second = tree.map(lambda v, g: torch.lerp(v, g * g, 1 - self.beta2), state["v"], gradient)
        # 1 − β₂ᵗ loses four digits to cancellation in float32 at the first step
        bias1, bias2 = (1 - beta ** t.double() for beta in (self.beta1, self.beta2))
        dtype = next(iter(w.values())).dtype
        size, root = (lr / bias1).to(dtype), bias2.sqrt().to(dtype)
        step = tree.map(lambda m, v: m / (v.sqrt() / root + self.epsilon), first, second)
        return add_scaled(w, -size, step), {"m": first, "v": second, "t": t}


def optimiser(name: str, momentum: float, weight_decay: float) -> Optimiser:
    """The optimiser that a configuration names: `sgd` or `adam`."""
    return SGD(momentum, weight_decay) if name == "sgd" else Adam(weight_decay=weight_decay)
