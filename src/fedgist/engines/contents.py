"""A packed reply as numbers that can be changed, whatever the method: what its fields hold, for each one of what they
are multiples of, and where zero is."""

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedgist.core.codec import Leaves
from fedgist.core.message import Content, Wire, schema_of

LEARNED: tuple[Content, ...] = (
    "weights", "update", "gradient", "slope", "logits", "features", "products",
)  # fmt: skip
"""What is made of a client's data, but for images."""
MIDDLE = 128
"""Where bytes have their zero."""


@dataclass
class Heard:
    """The weights of the last request: where a client's model began, by the names of its tensors."""

    weights: Leaves = field(default_factory=dict)

    def take(self, request: type, leaves: Leaves) -> None:
        holding = {name for name, (_, declared) in schema_of(request).items() if declared.holds == "weights"}
        found = {name.partition("/")[2]: leaf for name, leaf in leaves.items() if name.split("/")[0] in holding}
        self.weights = found or self.weights


def named(reply: type, leaves: Leaves, contents: Collection[Content]) -> dict[str, Wire]:
    """The leaves that hold something of the kind, and how they travel."""
    wanted = {name: wire for name, (_, wire) in schema_of(reply).items() if wire.holds in contents}
    return {name: wanted[name.split("/")[0]] for name in leaves if name.split("/")[0] in wanted}


def unit(leaves: Leaves, wire: Wire, leaf: Tensor) -> Tensor:
    """What a leaf is a multiple of, in a shape that divides it: a number, or one for each class; 1 where nothing is."""
    per = leaves.get(wire.per) if wire.per else None
    if per is None or not leaf.is_floating_point():
        return torch.ones((), dtype=torch.float64, device=leaf.device)
    per = per.double().to(leaf.device)
    if per.dim() == 0:
        return per
    shape = wire.shape if isinstance(wire.shape, tuple) else ()
    if "classes" not in shape:
        return per.sum()
    axis = shape.index("classes")
    return per.view(*[-1 if i == axis else 1 for i in range(leaf.dim())])


def zero(name: str, leaf: Tensor, wire: Wire, leaves: Leaves, heard: Heard) -> Tensor:
    """What the leaf of a client would be that has learned nothing."""
    if leaf.dtype == torch.uint8:
        return torch.full_like(leaf, MIDDLE, dtype=torch.float64)
    if wire.holds == "weights" and (before := heard.weights.get(name.partition("/")[2])) is not None:
        return before.double().to(leaf.device) * unit(leaves, wire, leaf)
    return torch.zeros_like(leaf, dtype=torch.float64)


def as_sent(values: Tensor, leaf: Tensor) -> Tensor:
    """Values in the dtype of the leaf that they take the place of."""
    if leaf.dtype == torch.uint8:
        values = values.round().clamp(0, 255)
    return values.to(leaf.dtype)
