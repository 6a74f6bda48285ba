"""Messages: typed records of tensors and scalars, the only things that travel.

A message is a class declared with `@message`. Each field says what it is on the wire: its dtype, its shape, and whether
it is *additive*, that is, reaches the asker only as a sum over all who answered. What becomes of it there is told in
codec.py.
"""

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, dataclass_transform

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Named tensors; which names and shapes is agreed beforehand by a template (see `Bounds`)."""

Shapes = Mapping[str, tuple[int, ...]]
Bounds = Mapping[str, "int | tuple[int, ...] | Shapes"]
"""What the two ends agree on: the largest value of a named dimension, or the very sizes that a name stands for, as for
inputs of any rank; the shapes of each template of `Params`."""


class Exactly(int):
    """A bound that is the size itself: nothing may be smaller either."""


float64, float32, float16 = torch.float64, torch.float32, torch.float16
int64, int32, int16, uint8 = torch.int64, torch.int32, torch.int16, torch.uint8
DTYPES = {float64: "F64", float32: "F32", float16: "F16", int64: "I64", int32: "I32", int16: "I16", uint8: "U8"}
SCALARS: dict[type, tuple[torch.dtype, ...]] = {float: (float32,), int: (int64,)}


Content = Literal[
    "weights", "update", "gradient", "statistics", "slope", "images", "labels", "logits", "features", "products",
    "centre", "counts", "presence", "size",
]  # fmt: skip
"""What a field holds, for whoever looks at messages without knowing methods, as attacks do; maybe times its `per`:

weights, update, gradient: of a model; an update is weights after less before, a gradient goes the other way
statistics: of BatchNorm; slope: the gradient of inputs that everybody has
images, labels: inputs, and the class of each or a number for each class; logits: what a model says, by input or class
features, products, centre: sums or means of features, sums of their products, and what was subtracted before
counts, presence: how many samples of each class there are, or whether there are any; size: how many in all
"""


class WireError(ValueError):
    """Bytes or values that do not fit the declared message."""


@dataclass(frozen=True)
class Wire:
    """How a field travels."""

    dtypes: tuple[torch.dtype, ...] = (float32,)
    shape: tuple[int | str, ...] | str = ()
    additive: bool = False
    paper: bool = True
    low: float | None = None
    high: float | str | None = None
    below: str | None = None
    per: str | None = None
    holds: Content | None = None

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype in which a tensor travels."""
        return tensor.dtype if tensor.dtype in self.dtypes else self.dtypes[0]


def wire(
    *dtypes: torch.dtype,
    shape: tuple[int | str, ...] | str = (),
    additive: bool = False,
    paper: bool = True,
    low: float | None = None,
    high: float | str | None = None,
    below: str | None = None,
    per: str | None = None,
    holds: Content | None = None,
) -> Any:
    """Declare how a field travels.

    dtypes: what is allowed on the wire; a tensor of another dtype is cast to the first. With float64 among them, a
        receiver gets the field as it came, and a sum of it in float64, rather than in the dtype that it computes in.
    shape: sizes, or names of sizes that the two ends bound; for `Params`, the name of their template.
    additive: the asker sees only the sum over the clients that answered.
    paper: whether the paper counts these numbers when it speaks of message size.
    holds: what it is, for who does not know the method.

    What comes from another machine is believed only if all its numbers are finite and in the range declared here:
    low, high: the smallest and the largest; `high` may name another field, a number, as in high="images".
    below: the named size that whole numbers stay below, as labels below "classes".
    per: the field whose multiple this is, as p·w is of p: how large it is for each of those is compared between sites.
    """
    declared = Wire(dtypes or (float32,), shape, additive, paper, low, high, below, per, holds)
    return field(metadata={"wire": declared})


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(wire,))
def message(cls: type[T]) -> type[T]:
    """Declare a message: a frozen dataclass whose fields are tensors, `Params`, floats and ints."""
    made = dataclass(frozen=True, eq=False)(cls)
    hints = typing.get_type_hints(made)
    schema: dict[str, tuple[Any, Wire]] = {}
    for item in fields(made):  # type: ignore[arg-type]
        kind = hints[item.name]
        model = Wire(shape="model", holds="weights")
        default = Wire(SCALARS[kind]) if kind in SCALARS else model if kind == Params else None
        declared: Wire | None = item.metadata.get("wire", default)
        if declared is None or kind not in (Tensor, Params, float, int):
            raise TypeError(f"{cls.__name__}.{item.name}: declare it as Tensor, Params, float or int, with wire(...)")
        if isinstance(declared.shape, str) != (kind == Params):
            raise TypeError(
                f"{cls.__name__}.{item.name}: Params take the name of a template, all else a tuple of sizes"
            )
        if not set(declared.dtypes) <= set(DTYPES):
            raise TypeError(f"{cls.__name__}.{item.name}: the wire knows {', '.join(DTYPES.values())}")
        schema[item.name] = (kind, declared)
    made.__schema__ = schema  # type: ignore[attr-defined]
    made.__tag__ = f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"  # type: ignore[attr-defined]
    made.__getattr__ = _unseen  # type: ignore[attr-defined]
    return made


def _unseen(msg: Any, name: str) -> typing.NoReturn:
    """Reading what is not there, as a field that the asker cannot see: one sentence at the place of the mistake."""
    kind, schema = type(msg).__name__, schema_of(type(msg))
    if name not in schema:
        raise AttributeError(f"{kind} has no field {name!r}; it has {', '.join(schema) or 'none'}")
    if schema[name][1].additive:
        raise AttributeError(f"{kind}.{name} is additive: only the sum is visible; read it as answers.sum.{name}")
    raise AttributeError(f"{kind}.{name} is seen of each client and not summed; read it as answers[id].{name}")


def partly(cls: type[T], values: Mapping[str, Any]) -> T:
    """A message of which only these fields can be read."""
    made = object.__new__(cls)
    vars(made).update(values)  # past the frozen setattr
    return made


def is_message(cls: object) -> bool:
    return hasattr(cls, "__schema__")


def schema_of(cls: type) -> dict[str, tuple[Any, Wire]]:
    """Field name -> (kind, how it travels)."""
    return cls.__schema__  # type: ignore[attr-defined,no-any-return]


def tag_of(cls: type) -> str:
    """The name of the message on the wire."""
    return cls.__tag__  # type: ignore[attr-defined,no-any-return]


def tensors_in(msg: Any) -> list[Tensor]:
    """All tensors of a message."""
    parts = [value.values() if isinstance(value, dict) else (value,) for value in vars(msg).values()]
    return [value for part in parts for value in part if isinstance(value, Tensor)]


@message
class Done:
    """The empty reply; it costs its header."""
