"""Which work of different clients is the same computation.

Work of two clients is the same computation when the functions are equal by value and the arguments agree in structure,
shapes, dtypes and everything that is not a tensor. Clients with different architectures fall apart by themselves.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedgist.core.tree import Tree
from fedgist.core.work import Chunks, Compute, Place, Pool, Scan, length

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


class FlatWork(NamedTuple):
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


class Forms:
    """The forms of work that were met lately: clients' work is of few of them, so that all but its tensors is looked at
    once, and not for every client and every call."""

    def __init__(self, place: Place):
        self._place = place
        self._known: list[Form] = []

    def flatten(self, work: Work) -> FlatWork:
        kind = _kind(work)
        for form in self._known:
            if form.kind == kind and (flat := form.take(work)) is not None:
                return flat
        form = Form(kind, work, self._place)
        self._known = [form, *self._known[: MOST_FORMS - 1]]
        flat = form.take(work)
        assert flat is not None
        return flat


MOST_FORMS = 16
"""Forms that are remembered: to look through them costs less than to make one."""

Take = Callable[[Tree, list[Tensor]], bool]
"""Appends the tensors of a tree to a list, in the order of `tree.leaves`; False if it has another form."""


class Form:
    """A client's work without its tensors."""

    def __init__(self, kind: Hashable, work: Work, place: Place):
        self.kind = kind
        tokens: list[Hashable] = [kind]
        self._pooled: list[bool] = []
        carry, xs, consts = _arguments(work)
        self._takers = (
            _taker(carry, place, tokens, []),
            _taker(xs, place, tokens, [], rows=True),
            _taker(consts, place, tokens, self._pooled),
        )
        self._key = Key(tokens)

    def take(self, work: Work) -> FlatWork | None:
        """The work flattened, if it has this form, all dtypes included; another form may have the same key."""
        carry: list[Tensor] = []
        xs: list[Tensor] = []
        consts: list[Tensor] = []
        for take, part, found in zip(self._takers, _arguments(work), (carry, xs, consts), strict=True):
            if not take(part, found):
                return None
        steps = length(work.xs) if isinstance(work, Scan) else 1
        return FlatWork(work, self._key, carry, xs, consts, self._pooled, steps)


def _kind(work: Work) -> Hashable:
    """The function, and what it is for."""
    if isinstance(work, Compute):
        return Compute, by_value(work.fn)
    return Chunks if isinstance(work.xs, Chunks) else Scan, by_value(work.step)


def _arguments(work: Work) -> tuple[Tree, Tree, Tree]:
    """What is carried, the inputs of the first step or of all, and what stays the same."""
    if isinstance(work, Compute):
        return (), (), work.args
    xs = work.xs
    return work.carry, xs.make(xs.seed, 0, 1) if isinstance(xs, Chunks) else xs, work.consts


def _taker(node: Tree, place: Place, tokens: list[Hashable], pooled: list[bool], rows: bool = False) -> Take:
    """Takes the tensors of trees that are like this one, all else about which is appended to `tokens`.

    With `rows`, and within a `Pool`, the first dimension of the tensors is free.
    """
    kind = type(node)
    if isinstance(node, Tensor):
        dtype, shape = node.dtype, node.shape[1:] if rows else node.shape
        tokens += (place.dtype if node.is_floating_point() else dtype, shape)
        pooled.append(rows)

        def take(other: Tree, found: list[Tensor]) -> bool:
            found.append(other)
            alike = isinstance(other, Tensor) and other.dtype == dtype
            return alike and (other.shape[1:] if rows else other.shape) == shape

    elif isinstance(node, dict):
        rows, names, keys = rows or isinstance(node, Pool), sorted(node), frozenset(node)
        tokens.append((kind, *names))
        parts = [_taker(node[name], place, tokens, pooled, rows) for name in names]
        tensors = [node[name] for name in names if isinstance(node[name], Tensor)]
        dtypes, shapes = [x.dtype for x in tensors], [x.shape[1:] if rows else x.shape for x in tensors]

        def take(other: Tree, found: list[Tensor]) -> bool:
            if type(other) is not kind or other.keys() != keys:
                return False
            if len(dtypes) < len(names):
                return all(part(other[name], found) for name, part in zip(names, parts, strict=True))
            leaves = [other[name] for name in names]  # all at once: most of what clients hold are dicts of tensors
            found += leaves
            alike = [x.dtype for x in leaves if isinstance(x, Tensor)] == dtypes
            return alike and [x.shape[1:] if rows else x.shape for x in leaves] == shapes

    elif isinstance(node, (list, tuple)):
        tokens.append((kind, len(node)))
        takers = [_taker(value, place, tokens, pooled, rows) for value in node]

        def take(other: Tree, found: list[Tensor]) -> bool:
            alike = type(other) is kind and len(other) == len(takers)
            return alike and all(part(value, found) for value, part in zip(other, takers, strict=True))

    else:
        value = by_value(node)
        tokens.append((kind, value))

        def take(other: Tree, found: list[Tensor]) -> bool:
            return other is node or (type(other) is kind and by_value(other) == value)

    return take
