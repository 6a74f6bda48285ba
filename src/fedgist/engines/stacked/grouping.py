"""Work that is the same computation as one: what its function takes, with all clients in it."""

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.tree import Tree
from fedgist.core.work import CHUNK, Chunks, Compute, Place, Scan, Work
from fedgist.engines.stacked.columns import Column, collect_columns, send
from fedgist.engines.stacked.flat_work import FlatWork, Key, by_value


@dataclass(frozen=True)
class Slot:
    """Where a tensor belongs."""

    index: int


class Frame:
    """A tree without its tensors: all else in it, and where they belong."""

    def __init__(self, whole: Tree):
        leaves = tree.leaves(whole)
        count = iter(range(len(leaves)))
        rest = [Slot(next(count)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.fill = _filler(tree.rebuild(whole, rest))
        """The tree with these tensors in it."""
        self._kind = tree.structure(whole), [(type(leaf), by_value(leaf)) for leaf in rest]

    def matches(self, other: "Frame") -> bool:
        """Whether two trees differ in their tensors at most."""
        return self._kind == other._kind


def _filler(form: Tree) -> Callable[[Sequence[Tensor]], Tree]:
    """A function that fills a form, made once, because it runs for every client and every call."""
    if isinstance(form, Slot):
        return operator.itemgetter(form.index)
    if isinstance(form, dict):
        kind, names = type(form), tuple(form)
        if len(names) > 1 and all(isinstance(value, Slot) for value in form.values()):
            pick = operator.itemgetter(*(value.index for value in form.values()))
            return lambda tensors: kind(zip(names, pick(tensors), strict=True))
        parts = [(name, _filler(value)) for name, value in form.items()]
        return lambda tensors: kind((name, part(tensors)) for name, part in parts)
    if isinstance(form, (list, tuple)):
        sequence, fillers = type(form), [_filler(value) for value in form]
        return lambda tensors: sequence([filler(tensors) for filler in fillers])
    return lambda tensors: form


@dataclass(frozen=True, eq=False)
class Segment:
    """The inputs of some steps of a scan, of all clients: tensors [step, client, …], or [step, …] where shared."""

    first: int
    count: int
    tensors: list[Tensor]


@dataclass(frozen=True, eq=False)
class Group:
    """Work of several clients that is the same computation, as one."""

    members: Sequence[FlatWork]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def key(self) -> Key:
        return self.members[0].key

    @property
    def first(self) -> Work:
        """One client's work."""
        return self.members[0].work

    @property
    def fn(self) -> Callable[..., Any]:
        return self.first.fn if isinstance(self.first, Compute) else self.first.step

    @property
    def name(self) -> str:
        """What a log calls this work."""
        named = getattr(self.fn, "func", self.fn)  # of a partial
        return getattr(named, "__qualname__", type(named).__qualname__)

    @property
    def is_scan(self) -> bool:
        return isinstance(self.first, Scan)

    @property
    def lengths(self) -> list[int]:
        """How many steps each client has."""
        return [one.steps for one in self.members]

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @functools.cached_property
    def carry(self) -> list[Column]:
        return collect_columns([one.carry for one in self.members])

    @functools.cached_property
    def xs(self) -> list[Column]:
        """The inputs of a scan's steps, unless they are made piece by piece."""
        return [] if self._made else collect_columns([one.xs for one in self.members])

    @functools.cached_property
    def consts(self) -> list[Column]:
        return collect_columns([one.consts for one in self.members], self.members[0].pooled)

    @functools.cached_property
    def step_dims(self) -> list[int | None]:
        """The dimension of the clients in each input of a step."""
        return [0] * len(self.members[0].xs) if self._made else [column.dim for column in self.xs]

    @functools.cached_property
    def dims(self) -> tuple[int | None, ...]:
        """The dimension of the clients in each tensor that the function takes."""
        return (*([0] * len(self.carry)), *self.step_dims, *(column.dim for column in self.consts))

    @property
    def row_dims(self) -> dict[int, int]:
        """Which tensors that the function takes are pools, and which of their dimensions varies."""
        before = len(self.carry) + len(self.step_dims)
        return {before + i: 0 if pool.shared else 1 for i, pool in enumerate(self.consts) if pool.pooled}

    @property
    def identical(self) -> bool:
        """Whether all clients ask for the very same thing, so that it need be done only once."""
        return not self._made and all(column.shared for column in (*self.carry, *self.xs, *self.consts))

    def frame(self) -> Frame:
        """The arguments of one client's call."""
        if isinstance(self.first, Compute):
            return Frame(self.first.args)
        xs = self.first.xs
        return Frame((self.first.carry, xs.make(xs.seed, 0, 1) if isinstance(xs, Chunks) else xs, *self.first.consts))

    def segments(self, place: Place) -> Iterator[Segment]:
        """The inputs of the scan, `CHUNK` steps at a time; a client that has fewer is filled up with zeros."""
        last = max(self.lengths)
        whole = [place.put(x.tensors[0]) if x.shared else _stack_steps(x.tensors, last, place) for x in self.xs]
        for first in range(0, last, CHUNK):
            count = min(CHUNK, last - first)
            piece = [x[first : first + count] for x in whole] if whole else self._make(first, count, place)
            yield Segment(first, count, piece)

    @property
    def _made(self) -> bool:
        return isinstance(self.first, Scan) and isinstance(self.first.xs, Chunks)

    def _make(self, first: int, count: int, place: Place) -> list[Tensor]:
        """Steps first … first + count − 1 of inputs that are made piece by piece."""
        made = []
        for work in [one.work for one in self.members]:
            assert isinstance(work, Scan)
            left = min(count, work.xs.length - first)
            made.append(tree.tensors(work.xs.make(work.xs.seed, first, left)) if left > 0 else [])
        ended = [x[:0] for x in next(filter(None, made))]
        return [_stack_steps(tensors, count, place) for tensors in zip(*(one or ended for one in made), strict=True)]


def _stack_steps(tensors: Sequence[Tensor], count: int, place: Place) -> Tensor:
    """The inputs of all clients, steps first."""
    if all(tensor.shape[0] == count for tensor in tensors):
        made = torch.stack(list(tensors), 1)
    else:
        made = tensors[0].new_zeros(count, len(tensors), *tensors[0].shape[1:])
        for i, tensor in enumerate(tensors):
            made[: tensor.shape[0], i] = tensor
    return send(made, place)
