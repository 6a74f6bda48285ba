"""How a group of equal work is run as one: under vmap, traced and compiled, step after step."""

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.tree import Tree
from fedgist.core.work import Place, Scan, stacking
from fedgist.data.inventory import cache_folder
from fedgist.engines.stacked.columns import PoolCache
from fedgist.engines.stacked.grouping import Frame, Group
from fedgist.engines.stacked.rewriting import reuse_carry, simplify

Call = Callable[..., Sequence[Tensor]]
"""A function of the stacked tensors of all clients."""


class NotStackable(Exception):
    """Work that has to be done for one client at a time."""


class NotTraceable(Exception):
    """Work whose plain operations depend on more than the shapes that it is grouped by."""


class Vectorised:
    """A function of one client's trees as a function of the stacked tensors of many.

    A stack of one needs no vmap, unless it is to be traced: torch's own autograd cannot always be. vmap wants a tensor
    to map over, and a call of one client's has none.
    """

    def __init__(self, group: Group, traceable: bool = False):
        self.fn, self.dims = group.fn, group.dims
        self.single = group.size == 1 and not (traceable and any(dim is not None for dim in self.dims))
        self.arguments = group.frame()
        self.carry = Frame(group.first.carry) if isinstance(group.first, Scan) else None
        self.results: Frame | None = None

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            if self.single:
                own = [x if dim is None else x.select(dim, 0) for x, dim in zip(tensors, self.dims, strict=True)]
                return tuple(made[None] for made in self._one(*own))
            with stacking():
                return torch.func.vmap(self._one, in_dims=self.dims)(*tensors)

    def _one(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.fn(*self.arguments.fill(tensors))
        self.results = Frame(result)
        if self.carry is not None and not self.carry.matches(self.results):
            raise NotStackable("the step changes the form of its carry, or a number in it that is not a tensor")
        return tuple(tree.tensors(result))

    def split(self, stacked: Sequence[Tensor], count: int) -> list[Tree]:
        """The results of each client, as rows of what they are stacked in; who keeps one for long copies it."""
        assert self.results is not None
        if not stacked:
            return [self.results.fill([]) for _ in range(count)]
        return [self.results.fill(row) for row in zip(*[_own(tensor).unbind() for tensor in stacked], strict=True)]


def _own(stack: Tensor) -> Tensor:
    """A stack that is nobody's view, so that its rows can be told from it."""
    return stack.clone(memory_format=torch.contiguous_format) if stack._base is not None else stack.contiguous()


def trace(call: Vectorised, group: Group, place: Place, cache: PoolCache, compile: bool = False) -> Call:
    """The same function as the plain operations it consists of: the same numbers without vmap's cost for each of them.

    With `compile`, these are compiled, and what the compiler made is kept for later processes of this user; a trace has
    code of its own, and dynamo counts recompilations for each piece of code. Not to be called while other threads
    compute, because tracing touches `nn.Module` as a whole.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds of imports in some versions of torch

    if compile:  # tracing looks at it already
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    tensors = first_arguments(group, place, cache)
    graph = make_fx(call)(*tensors)
    if pools := group.row_dims:
        with_more_rows = [
            torch.cat([x, x.narrow(pools[i], 0, 1)], pools[i]) if i in pools else x for i, x in enumerate(tensors)
        ]
        if make_fx(call)(*with_more_rows).code != graph.code:
            raise NotTraceable("it does more with a pool than index it")
    graph.graph.eliminate_dead_code()
    if not compile:
        simplify(graph.graph)
    graph.recompile()
    if not compile:
        again = copy.deepcopy(graph)
        reuse_carry(again.graph, len(group.carry))
        again.recompile()
        return Traced(_without_gradients(graph.forward), _without_gradients(again.forward))
    for i, rows in pools.items():  # those of the next clients may be longer
        torch._dynamo.maybe_mark_dynamic(tensors[i], rows)
    run = _without_gradients(torch.compile(graph, dynamic=False))
    run(*tensors)
    return run


@dataclass(frozen=True)
class Traced:
    """The operations of a step; `onwards` writes what it carries where it lay, so that no memory is asked for."""

    first: Call
    onwards: Call

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        return self.first(*tensors)


def _without_gradients(call: Call) -> Call:
    def run(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return call(*tensors)

    return run


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def keep_ended(alive: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """The carry after a step: the old one of the clients that have no more steps."""
    return [torch.where(alive.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(new, old, strict=True)]


def first_arguments(group: Group, place: Place, cache: PoolCache) -> list[Tensor]:
    """What the first call for all clients takes."""
    consts = [cache.get(column, place) for column in group.consts]
    if not group.is_scan:
        return consts
    first = next(group.segments(place))
    return [column.spread(group.size, place) for column in group.carry] + [x[0] for x in first.tensors] + consts


def run_compute(call: Call, group: Group, place: Place, cache: PoolCache) -> Sequence[Tensor]:
    """One call for all clients."""
    return call(*first_arguments(group, place, cache))


def run_scan(call: Call, group: Group, place: Place, cache: PoolCache) -> Sequence[Tensor]:
    """The scans of all clients, step by step; those that are shorter wait for the others with what they have."""
    carry: Sequence[Tensor] = [column.spread(group.size, place) for column in group.carry]
    consts = [cache.get(column, place) for column in group.consts]
    lengths, shortest = torch.tensor(group.lengths, device=place.device), min(group.lengths)
    for segment in group.segments(place):
        for i in range(segment.count):
            t = segment.first + i
            run = call.onwards if isinstance(call, Traced) and 0 < t < shortest else call
            new = run(*carry, *[x[i] for x in segment.tensors], *consts)
            carry = new if t < shortest else keep_ended(lengths > t, new, carry)
    return carry
