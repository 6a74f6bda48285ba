"""Work: what a role hands to its engine instead of doing it itself.

`await compute(fn, *args)` and `await scan(step, carry, xs, *consts)` run pure functions of tensors. The coroutine
that awaits them is suspended, so whoever drives it decides how the work is done: alone, on a thread, or stacked with
the same work of many clients.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedgist.core import tree
from fedgist.core.tree import Tree

R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Compute:
    """One call of a pure function."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    alone: bool = False
    """Never stacked with the work of others, so that whoever asks for it on this device gets the same bits."""


@dataclass(frozen=True, eq=False)
class Scan:
    """A loop `for x in xs: carry = step(carry, x, *consts)`."""

    step: Callable[..., Any]
    carry: Tree
    xs: "Tree | Chunks"
    consts: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Chunks:
    """The inputs of a long scan, made piece by piece: `make(seed, first, count)` gives steps first … first+count-1.

    `make` is pure, and its result does not depend on how the range is cut.
    """

    make: Callable[[int, int, int], Tree]
    seed: int
    length: int


Work = Compute | Scan


class InRuns(ABC):
    """A pure function of samples, the sum of `part` over runs of them, which an engine may do side by side.

    How many make a run depends on the kind of device alone, and so does, to the last bit, what they add up to.
    """

    rows_on: ClassVar[Mapping[str, int]]

    @abstractmethod
    def part(self, w: Any, x: Tensor, y: Tensor) -> Tree:
        """What some samples add."""

    def cut(self, w: Any, x: Tensor, y: Tensor) -> list[tuple[Any, Tensor, Tensor]]:
        """The arguments of `part` for each run."""
        size = self.rows_on[x.device.type]
        return [(w, *run) for run in zip(x.split(size), y.split(size), strict=True)]

    def __call__(self, w: Any, x: Tensor, y: Tensor) -> Tree:
        return self.total([self.part(*run) for run in self.cut(w, x, y)])

    @staticmethod
    def total(parts: Sequence[Tree]) -> Tree:
        return tree.map(lambda leaf: leaf.sum(0), tree.stack(parts))


class Pool(dict[str, Tensor]):
    """Tensors that a computation reaches only through indices into their first dimension.

    An engine that stacks clients of different sizes may therefore pad that dimension.
    """


class Suspend:
    """Hands a request to whoever drives the coroutine and evaluates to what the driver sends back."""

    def __init__(self, request: Any):
        self.request = request

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self.request)


async def compute(fn: Callable[..., R], *args: object, alone: bool = False) -> R:
    """Run the pure function `fn` on `args`; `alone` where server and clients must agree on the result bit for bit."""
    result: R = await Suspend(Compute(fn, args, alone))
    return result


async def scan(step: Callable[..., T], carry: T, xs: "Tree | Chunks", *consts: object) -> T:
    """Fold the pure function `step(carry, x, *consts) -> carry` over the first dimension of `xs`.

    `consts` (a data pool, the weights of the round) are shared between steps, never copied.
    """
    end: T = await Suspend(Scan(step, carry, xs, consts))
    return end


CHUNK = 64
"""How many steps of `Chunks` are made at a time."""


def length(xs: "Tree | Chunks") -> int:
    """The number of steps of a scan."""
    if isinstance(xs, Chunks):
        return xs.length
    some = xs
    while not isinstance(some, Tensor):  # every leaf has as many
        some = next(iter(some.values() if isinstance(some, dict) else some))
    return some.shape[0]


@dataclass(frozen=True)
class Place:
    """Where an engine computes, in which floating dtype, and whether a GPU may round the inputs of products to TF32."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    tf32: bool = False

    def put(self, what: T) -> T:
        """Bring every tensor here; nothing is copied that is here already."""

        def move(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(self.device, self.dtype if leaf.is_floating_point() else leaf.dtype)

        return tree.map(move, what)


def steps(xs: "Tree | Chunks", place: Place) -> Iterator[Tree]:
    """The inputs of a scan, one step after the other, where they are needed."""
    if isinstance(xs, Chunks):
        for first in range(0, xs.length, CHUNK):
            yield from steps(xs.make(xs.seed, first, min(CHUNK, xs.length - first)), place)
    else:
        here = place.put(xs)
        for i in range(length(xs)):
            yield tree.index(here, i)


def execute(work: Work, place: Place) -> Any:
    """Do the work here and now, for one client: the definition that every engine must equal."""
    with torch.no_grad():
        if isinstance(work, Compute):
            return work.fn(*place.put(work.args))
        carry, consts = place.put(work.carry), place.put(work.consts)
        for x in steps(work.xs, place):
            carry = work.step(carry, x, *consts)
        return carry


@cache
def triton_is_there() -> bool:
    """Whether kernels of our own can be compiled for a GPU."""
    return find_spec("triton") is not None


_local = threading.local()


def stacked() -> bool:
    """Whether the code that asks is running for many clients at once, under vmap."""
    return getattr(_local, "stacked", False)


@contextmanager
def stacking() -> Iterator[None]:
    """An engine sets this around a vmapped call."""
    before, _local.stacked = stacked(), True
    try:
        yield
    finally:
        _local.stacked = before


def gradient(fn: Callable[[T], tuple[Tensor, R]], at: T) -> tuple[T, tuple[Tensor, R]]:
    """The gradient of `fn(at) -> (loss, extra)`, and what `fn` returned; `extra` is a tree of tensors, perhaps empty.

    May be nested for higher derivatives.

    Under vmap this is `torch.func.grad`; alone it is `torch.autograd.grad`, which costs a third less for small nets.
    """
    if stacked():
        grads, (loss, extra) = torch.func.grad_and_value(fn, has_aux=True)(at)
        return grads, (loss, extra)
    nested = torch.is_grad_enabled()  # work runs without gradients, so somebody outside is differentiating
    with torch.enable_grad():
        variables = tree.map(lambda t: t if nested and t.requires_grad else t.detach().requires_grad_(), at)
        loss, extra = fn(variables)
        inputs = tree.leaves(variables)
        found = torch.autograd.grad(loss, inputs, create_graph=nested, materialize_grads=True)
    if not nested:
        loss, extra = loss.detach(), tree.map(lambda t: t.detach() if isinstance(t, Tensor) else t, extra)
    return tree.rebuild(at, found), (loss, extra)
