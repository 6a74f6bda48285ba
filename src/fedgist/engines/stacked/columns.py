"""How the tensors of many clients become one stack, and how long it is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedgist.core.rows import find_stack
from fedgist.core.work import Place


class Column(NamedTuple):
    """One tensor of each client of a stack; a tensor that is the same object for all of them stays one."""

    tensors: Sequence[Tensor]
    pooled: bool
    """Whether the first dimension is reached by indices only, so that it may be padded."""

    @property
    def shared(self) -> bool:
        return len(self.tensors) == 1

    @property
    def dim(self) -> int | None:
        """The dimension of the clients, as `vmap` wants it."""
        return None if self.shared else 0

    @property
    def rows(self) -> int:
        """The first dimension of the longest tensor."""
        return max(tensor.shape[0] for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        first = self.tensors[0].shape
        one = (self.rows, *first[1:]) if self.pooled else tuple(first)
        return one if self.shared else (len(self.tensors), *one)

    def stacked(self, place: Place) -> Tensor:
        """The tensors as one, where it is needed: moved after stacking, so that small ones travel in one go."""
        first = self.tensors[0]
        if self.shared:
            made = first
        elif self.pooled and len({tensor.shape[0] for tensor in self.tensors}) > 1:
            made = first.new_zeros(self.shape)
            self._fill(made)
        elif (stack := find_stack(self.tensors)) is not None:
            made = stack
        elif all(tensor.device == first.device for tensor in self.tensors):
            made = torch.stack(list(self.tensors))
        else:
            made = torch.stack([place.put(tensor) for tensor in self.tensors])
        return send(made, place)

    def spread(self, clients: int, place: Place) -> Tensor:
        """The stack with a dimension of the clients, also where they share what is in it."""
        made = self.stacked(place)
        return made.expand(clients, *made.shape).contiguous() if self.shared else made

    def write(self, into: Tensor, place: Place) -> None:
        """Fill a buffer, whose pooled dimension may be longer: what lies behind the rows is never looked at."""
        if self.pooled and not self.shared:
            self._fill(into)
        else:
            (into[: self.rows] if self.pooled else into).copy_(self.stacked(place))

    def _fill(self, into: Tensor) -> None:
        for row, tensor in zip(into, self.tensors, strict=True):
            row[: tensor.shape[0]].copy_(tensor)


def send(stack: Tensor, place: Place) -> Tensor:
    """The stack where it is needed; a GPU takes it while it still computes, for which pageable memory would wait."""
    if place.device.type != "cuda" or not stack.is_cpu:
        return place.put(stack)
    return Place(dtype=place.dtype).put(stack).pin_memory().to(place.device, non_blocking=True)


def collect_columns(rows: Sequence[Sequence[Tensor]], pooled: Sequence[bool] | None = None) -> list[Column]:
    """The tensors of several clients, position by position."""
    found = []
    for i, tensors in enumerate(zip(*rows, strict=True)):
        first = tensors[0]
        same = all(tensor is first for tensor in tensors)
        found.append(Column((first,) if same else tensors, pooled is not None and pooled[i]))
    return found


class PoolCache:
    """Stacked pools, kept while their clients' tensors live: the data sets are stacked once, not once a round.

    A tensor is in at most one stack, the last it was asked for in, so the stacks together are no larger than the data
    and their padding, however the clients of a round are sampled.
    """

    def __init__(self) -> None:
        self._stacks: Any = WeakTensorKeyDictionary()

    def get(self, column: Column, place: Place) -> Tensor:
        if column.shared or not column.pooled:
            return column.stacked(place)
        marks = [(id(tensor), tensor._version) for tensor in column.tensors]
        held = [self._stacks.get(tensor) for tensor in column.tensors]
        stack = held[0]
        if stack is None or stack.marks != marks or any(other is not stack for other in held):
            stack = _Stack(marks, column.stacked(place))
            for tensor in column.tensors:
                self._stacks[tensor] = stack
        return stack.tensor


@dataclass(frozen=True, eq=False)
class _Stack:
    marks: list[tuple[int, int]]
    """Which tensors, in which state: a tensor that somebody wrote into is stacked anew."""
    tensor: Tensor
