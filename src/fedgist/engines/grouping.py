"""Which work of different clients is the same computation, and how its tensors become one stack.

Two requests are the same computation when their functions are equal by value and their arguments agree in structure,
shapes, dtypes and everything that is not a tensor. Clients with different architectures fall apart by themselves.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedgist.core import tree
from fedgist.core.tree import Tree
from fedgist.core.work import CHUNK, Chunks, Compute, Place, Pool, Scan, length

Work = Compute | Scan


@dataclass(frozen=True, eq=False)
class Itself:
    """Stands for an object without a hash: equal to nothing but the same object."""

    what: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.what is other.what

    def __hash__(self) -> int:
        return id(self.what)


def by_value(what: Any) -> Hashable:
    """`what` as a key: functions by what they are bound to, values as themselves, the rest by identity."""
    if inspect.ismethod(what):
        return what.__func__, by_value(what.__self__)
    if isinstance(what, functools.partial):
        given = [(name, by_value(value)) for name, value in sorted(what.keywords.items())]
        return by_value(what.func), tuple(by_value(value) for value in what.args), tuple(given)
    try:
        hash(what)
    except TypeError:
        return Itself(what)
    return what


class Key:
    """All that makes work the same computation: hashed once, because it is long and is looked up many times."""

    def __init__(self, tokens: Sequence[Hashable]):
        self._tokens = tuple(tokens)
        self._hash = hash(self._tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and self._hash == other._hash and self._tokens == other._tokens

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self._tokens)


class Request(NamedTuple):
    """A client's work, flattened once: equal keys mean that one stacked call can do both."""

    work: Work
    key: Key
    carry: list[Tensor]
    xs: list[Tensor]
    """The inputs of a scan's steps; those that are made piece by piece, for the first step only."""
    consts: list[Tensor]
    """What stays the same from step to step; all arguments, where there are no steps."""
    pooled: list[bool]
    """Which of `consts` are reached by indices into their first dimension only."""
    steps: int
    """How many steps a scan has; a single call counts as one."""

    @property
    def rows(self) -> int:
        """The size of its largest pool."""
        return max([x.shape[0] for x in itertools.compress(self.consts, self.pooled)], default=0)


def request(work: Work, place: Place) -> Request:
    carry: list[Tensor] = []
    xs: list[Tensor] = []
    consts: list[Tensor] = []
    pooled: list[bool] = []
    tokens: list[Hashable] = []
    if isinstance(work, Compute):
        tokens.append(by_value(work.fn))
        _flatten(work.args, place, tokens, consts, pooled)
        return Request(work, Key(tokens), carry, xs, consts, pooled, 1)
    made = isinstance(work.xs, Chunks)
    tokens += [by_value(work.step), "made" if made else "given"]
    _flatten(work.carry, place, tokens, carry)
    _flatten(work.xs.make(work.xs.seed, 0, 1) if made else work.xs, place, tokens, xs, rows=True)
    _flatten(work.consts, place, tokens, consts, pooled)
    return Request(work, Key(tokens), carry, xs, consts, pooled, length(work.xs))


def _flatten(
    node: Tree,
    place: Place,
    tokens: list[Hashable],
    tensors: list[Tensor],
    pooled: list[bool] | None = None,
    rows: bool = False,
) -> None:
    """Append the tensors of a tree to `tensors`, in the order of `tree.leaves`, and all else about it to `tokens`.

    With `rows`, and within a `Pool`, the first dimension of the tensors is free. One pass, because it runs for every
    client and every request.
    """
    if isinstance(node, Tensor):
        tensors.append(node)
        if pooled is not None:
            pooled.append(rows)
        dtype = place.dtype if node.is_floating_point() else node.dtype
        tokens += (dtype, node.shape[1:] if rows else node.shape)
    elif isinstance(node, dict):
        rows = rows or isinstance(node, Pool)
        if len(node) >= MANY and (known := _flat(node, place, rows)):
            tokens += known.tokens
            tensors += [node[name] for name in known.names]
            if pooled is not None:
                pooled += [rows] * len(known.names)
            return
        names = sorted(node)
        tokens.append((type(node), *names))
        for name in names:
            _flatten(node[name], place, tokens, tensors, pooled, rows)
    elif isinstance(node, (list, tuple)):
        tokens.append((type(node), len(node)))
        for value in node:
            _flatten(value, place, tokens, tensors, pooled, rows)
    else:
        tokens.append((type(node), by_value(node)))


MANY = 4
"""Tensors from which on it is cheaper to recognise a dict than to look at each of them."""


class _Flat(NamedTuple):
    """What `_flatten` finds in a dict of tensors."""

    names: list[str]
    tokens: list[Hashable]
    alive: list[weakref.ref[Tensor]]


_known: dict[Hashable, _Flat] = {}
"""Dicts of tensors by the identities of these, forgotten when the first dies: its identity may become another's."""


def _flat(node: dict[str, Any], place: Place, rows: bool) -> _Flat | None:
    """A dict of tensors, looked at once: a client's weights come again, the very same, in thousands of exchanges."""
    mark = (type(node), place.dtype, rows, *node, *map(id, node.values()))
    if mark not in _known and all(isinstance(value, Tensor) for value in node.values()):
        names = sorted(node)
        tokens: list[Hashable] = [(type(node), *names)]
        for name in names:
            _flatten(node[name], place, tokens, [], rows=rows)
        alive = [weakref.ref(tensor, lambda _: _known.pop(mark, None)) for tensor in node.values()]
        _known[mark] = _Flat(names, tokens, alive)
    return _known.get(mark)


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
        self.form = tree.rebuild(whole, rest)
        self._kind = tree.structure(whole), [(type(leaf), by_value(leaf)) for leaf in rest]

    def fill(self, tensors: Sequence[Tensor]) -> Tree:
        return tree.map(lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf, self.form)

    def like(self, other: "Frame") -> bool:
        """Whether two trees differ in their tensors at most."""
        return self._kind == other._kind


def tensors_of(what: Tree) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(what) if isinstance(leaf, Tensor)]


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
        elif all(tensor.device == first.device for tensor in self.tensors):
            made = torch.stack(list(self.tensors))
        else:
            made = torch.stack([place.put(tensor) for tensor in self.tensors])
        return place.put(made)

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


def columns(rows: Sequence[Sequence[Tensor]], pooled: Sequence[bool] | None = None) -> list[Column]:
    """The tensors of several clients, position by position."""
    found = []
    for i, tensors in enumerate(zip(*rows, strict=True)):
        first = tensors[0]
        same = all(tensor is first for tensor in tensors)
        found.append(Column((first,) if same else tensors, pooled is not None and pooled[i]))
    return found


class Resident:
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

    def __len__(self) -> int:
        return len({id(stack) for stack in self._stacks.values()})


@dataclass(frozen=True, eq=False)
class _Stack:
    marks: list[tuple[int, int]]
    """Which tensors, in which state: a tensor that somebody wrote into is stacked anew."""
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Segment:
    """The inputs of some steps of a scan, of all clients: tensors [step, client, …], or [step, …] where shared."""

    first: int
    count: int
    tensors: list[Tensor]


@dataclass(frozen=True, eq=False)
class Group:
    """Requests that are the same computation, as one."""

    requests: Sequence[Request]

    @property
    def size(self) -> int:
        return len(self.requests)

    @property
    def key(self) -> Key:
        return self.requests[0].key

    @property
    def first(self) -> Work:
        """One client's work."""
        return self.requests[0].work

    @property
    def fn(self) -> Callable[..., Any]:
        return self.first.fn if isinstance(self.first, Compute) else self.first.step

    @property
    def name(self) -> str:
        """What a log calls this work."""
        return getattr(self.fn, "__qualname__", repr(self.fn))

    @property
    def is_scan(self) -> bool:
        return isinstance(self.first, Scan)

    @property
    def lengths(self) -> list[int]:
        """How many steps each client has."""
        return [request.steps for request in self.requests]

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @functools.cached_property
    def carry(self) -> list[Column]:
        return columns([request.carry for request in self.requests])

    @functools.cached_property
    def xs(self) -> list[Column]:
        """The inputs of a scan's steps, unless they are made piece by piece."""
        return [] if self._made else columns([request.xs for request in self.requests])

    @functools.cached_property
    def consts(self) -> list[Column]:
        return columns([request.consts for request in self.requests], self.requests[0].pooled)

    @functools.cached_property
    def step_dims(self) -> list[int | None]:
        """The dimension of the clients in each input of a step."""
        return [0] * len(self.requests[0].xs) if self._made else [column.dim for column in self.xs]

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
        whole = [place.put(x.tensors[0]) if x.shared else _by_step(x.tensors, last, place) for x in self.xs]
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
        for work in [request.work for request in self.requests]:
            assert isinstance(work, Scan)
            left = min(count, work.xs.length - first)
            made.append(tensors_of(work.xs.make(work.xs.seed, first, left)) if left > 0 else [])
        ended = [x[:0] for x in next(filter(None, made))]
        return [_by_step(tensors, count, place) for tensors in zip(*(one or ended for one in made), strict=True)]


def _by_step(tensors: Sequence[Tensor], count: int, place: Place) -> Tensor:
    """The inputs of all clients, steps first."""
    if all(tensor.shape[0] == count for tensor in tensors):
        made = torch.stack(list(tensors), 1)
    else:
        made = tensors[0].new_zeros(count, len(tensors), *tensors[0].shape[1:])
        for i, tensor in enumerate(tensors):
            made[: tensor.shape[0], i] = tensor
    return place.put(made)
