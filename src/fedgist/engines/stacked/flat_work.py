"""Which work of different clients is the same computation.

Work of two clients is the same computation when the functions are equal by value and the arguments agree in structure,
shapes, dtypes and everything that is not a tensor. Clients with different architectures fall apart by themselves.
"""

import functools
import inspect
import itertools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fedgist.core.tree import Tree
from fedgist.core.work import Chunks, Compute, Place, Pool, Work, length


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


def flatten(work: Work, place: Place) -> FlatWork:
    carry: list[Tensor] = []
    xs: list[Tensor] = []
    consts: list[Tensor] = []
    pooled: list[bool] = []
    tokens: list[Hashable] = []
    if isinstance(work, Compute):
        tokens.append(by_value(work.fn))
        _collect(work.args, place, tokens, consts, pooled)
        return FlatWork(work, Key(tokens), carry, xs, consts, pooled, 1)
    made = isinstance(work.xs, Chunks)
    tokens += [by_value(work.step), "made" if made else "given"]
    _collect(work.carry, place, tokens, carry)
    _collect(work.xs.make(work.xs.seed, 0, 1) if made else work.xs, place, tokens, xs, rows=True)
    _collect(work.consts, place, tokens, consts, pooled)
    return FlatWork(work, Key(tokens), carry, xs, consts, pooled, length(work.xs))


def _collect(
    node: Tree,
    place: Place,
    tokens: list[Hashable],
    tensors: list[Tensor],
    pooled: list[bool] | None = None,
    rows: bool = False,
) -> None:
    """Append the tensors of a tree to `tensors`, in the order of `tree.leaves`, and all else about it to `tokens`.

    With `rows`, and within a `Pool`, the first dimension of the tensors is free. One pass, because it runs for every
    client and every call.
    """
    if isinstance(node, Tensor):
        tensors.append(node)
        if pooled is not None:
            pooled.append(rows)
        dtype = place.dtype if node.is_floating_point() else node.dtype
        tokens += (dtype, node.shape[1:] if rows else node.shape)
    elif isinstance(node, dict):
        rows = rows or isinstance(node, Pool)
        if len(node) >= MANY and not _are_rows(node) and (known := _recognise(node, place, rows)):
            tokens += known.tokens
            tensors += [node[name] for name in known.names]
            if pooled is not None:
                pooled += [rows] * len(known.names)
            return
        names = sorted(node)
        tokens.append((type(node), *names))
        for name in names:
            _collect(node[name], place, tokens, tensors, pooled, rows)
    elif isinstance(node, (list, tuple)):
        tokens.append((type(node), len(node)))
        for value in node:
            _collect(value, place, tokens, tensors, pooled, rows)
    else:
        tokens.append((type(node), by_value(node)))


MANY = 4
"""Tensors from which on it is cheaper to recognise a dict than to look at each of them."""


def _are_rows(node: dict[str, Any]) -> bool:
    """Whether tensors come out of a stack: who computed them asks once more at most, which is not worth remembering."""
    return getattr(next(iter(node.values())), "_base", None) is not None


class _FlatDict(NamedTuple):
    """What `_collect` finds in a dict of tensors."""

    names: list[str]
    tokens: list[Hashable]
    alive: list[weakref.ref[Tensor]]


_known: dict[Hashable, _FlatDict] = {}
"""Dicts of tensors by the identities of these, forgotten when the first dies: its identity may become another's."""


def _recognise(node: dict[str, Any], place: Place, rows: bool) -> _FlatDict | None:
    """A dict of tensors, looked at once: a client's weights come again, the very same, in thousands of exchanges."""
    mark = (type(node), place.dtype, rows, *node, *map(id, node.values()))
    if mark not in _known and all(isinstance(value, Tensor) for value in node.values()):
        names = sorted(node)
        tokens: list[Hashable] = [(type(node), *names)]
        for name in names:
            _collect(node[name], place, tokens, [], rows=rows)
        alive = [weakref.ref(tensor, lambda _: _known.pop(mark, None)) for tensor in node.values()]
        _known[mark] = _FlatDict(names, tokens, alive)
    return _known.get(mark)
