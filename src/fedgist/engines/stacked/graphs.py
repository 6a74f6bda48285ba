"""CUDA graphs: the device's work of a stacked step, recorded once and replayed without the host.

A replay starts no kernel from Python, which is most of the time of a small net's step, and computes bit for bit what
the step computes when it is run operation by operation.
"""

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fedgist.core.work import CHUNK, Place
from fedgist.engines.stacked.columns import Column
from fedgist.engines.stacked.grouping import Group
from fedgist.engines.stacked.programs import Call, keep_ended


class NotCapturable(Exception):
    """A step that cannot be recorded."""


class Captured(Protocol):
    """A group's work, recorded for stacks of one size."""

    def fits(self, group: Group) -> bool:
        """Whether the group's pools are no longer than the recorded ones."""

    def run(self, group: Group) -> Sequence[Tensor]:
        """The stacked results, which are the caller's."""


class Buffer:
    """A tensor at a fixed address, which remembers what lies in it."""

    def __init__(self, column: Column, place: Place):
        self.place, self.pooled = place, column.pooled
        self.tensor = place.put(column.tensors[0].new_empty(0)).new_zeros(column.shape)
        self._holds: list[tuple[weakref.ref[Tensor], int]] = []

    def fits(self, column: Column) -> bool:
        return not self.pooled or column.rows <= self.tensor.shape[0 if column.shared else 1]

    def load(self, column: Column) -> None:
        """Fill the buffer, unless the same tensors fill it already: data sets stay from round to round."""
        held = len(self._holds) == len(column.tensors) and all(
            known() is tensor and version == tensor._version
            for (known, version), tensor in zip(self._holds, column.tensors, strict=True)
        )
        if not held:
            column.write(self.tensor, self.place)
            self._holds = [(weakref.ref(tensor), tensor._version) for tensor in column.tensors]


def warm_up(body: Callable[[], Any]) -> None:
    """Run `body` twice, as libraries choose their kernels at first use."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        body()
        body()
    current.wait_stream(aside)


def record(body: Callable[[], Any], memory: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What `body` would start on the device, and its result; nothing is computed."""
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # work that only hands on what it got
        with torch.cuda.graph(graph, pool=memory):
            result = body()
    return graph, result


UNROLLED = 8
"""Steps in one graph: between two graphs the device waits, and what a scan carries is copied back."""


class CapturedScan:
    """A scan of a fixed number of clients: one graph for some steps, one for a single step where they do not come out
    even; the number of the step lives on the device.
    """

    def __init__(self, call: Call, group: Group, place: Place, memory: Any):
        self._call, self._place, self._ragged = call, place, group.ragged
        self._carry = [torch.empty_like(column.spread(group.size, place)) for column in group.carry]
        self._consts = [Buffer(column, place) for column in group.consts]
        self._xs = []
        for x, dim in zip(place.put(group.members[0].xs), group.step_dims, strict=True):
            clients = () if dim is None else (group.size,)
            self._xs.append(x.new_zeros(CHUNK, *clients, *x.shape[1:]))
        self._lengths = torch.zeros(group.size, dtype=torch.int64, device=place.device)
        self._step = torch.zeros((), dtype=torch.int64, device=place.device)
        self._row = torch.zeros(1, dtype=torch.int64, device=place.device)
        self._load(group)
        self._memory = memory
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        warm_up(functools.partial(self._steps, 1))
        for steps, _ in _pieces(max(group.lengths)):
            self._graph(steps)

    def fits(self, group: Group) -> bool:
        return all(buffer.fits(column) for buffer, column in zip(self._consts, group.consts, strict=True))

    def run(self, group: Group) -> Sequence[Tensor]:
        self._load(group)
        for segment in group.segments(self._place):
            for buffer, x in zip(self._xs, segment.tensors, strict=True):
                buffer[: segment.count].copy_(x)
            self._row.zero_()
            for steps, times in _pieces(segment.count):
                graph = self._graph(steps)
                for _ in range(times):
                    graph.replay()
        return [tensor.clone() for tensor in self._carry]

    def _load(self, group: Group) -> None:
        for tensor, column in zip(self._carry, group.carry, strict=True):
            tensor.copy_(column.stacked(self._place))
        for buffer, column in zip(self._consts, group.consts, strict=True):
            buffer.load(column)
        if self._ragged:  # else nobody reads them, and a copy from the host waits for the device
            self._lengths.copy_(torch.tensor(group.lengths))
        self._step.zero_()
        self._row.zero_()

    def _graph(self, steps: int) -> torch.cuda.CUDAGraph:
        if steps not in self._graphs:
            self._graphs[steps], _ = record(functools.partial(self._steps, steps), self._memory)
        return self._graphs[steps]

    def _steps(self, count: int) -> None:
        """So many steps, from what is carried and back into it."""
        consts, carry = [buffer.tensor for buffer in self._consts], self._carry
        for _ in range(count):
            xs = [x.index_select(0, self._row).squeeze(0) for x in self._xs]
            new: Sequence[Tensor] = self._call(*carry, *xs, *consts)
            for old, made in zip(carry, new, strict=True):
                if (old.shape, old.dtype) != (made.shape, made.dtype):
                    raise NotCapturable("the step changes the shape or the dtype of its carry")
            if self._ragged:
                new = keep_ended(self._lengths > self._step, new, carry)
                self._step.add_(1)
            self._row.add_(1)
            carry = [made.contiguous() for made in new]  # as the first step finds it: the same kernels, the same bits
        own = {tensor.data_ptr() for tensor in self._carry}
        carry = [made.clone() if made.data_ptr() in own else made for made in carry]  # a step may swap what it carries
        torch._foreach_copy_(self._carry, carry)  # one kernel for all


def _pieces(count: int) -> list[tuple[int, int]]:
    """The graphs that so many steps take, by their own steps, and how often each is replayed."""
    many, rest = divmod(count, UNROLLED)
    return [(steps, times) for steps, times in ((UNROLLED, many), (1, rest)) if times]


class CapturedCompute:
    """A call that is repeated over many exchanges."""

    def __init__(self, call: Call, group: Group, place: Place, memory: Any):
        self._inputs = [Buffer(column, place) for column in group.consts]
        self._load(group)

        def body() -> Sequence[Tensor]:
            return call(*[buffer.tensor for buffer in self._inputs])

        warm_up(body)
        self._graph, self._outputs = record(body, memory)

    def fits(self, group: Group) -> bool:
        return all(buffer.fits(column) for buffer, column in zip(self._inputs, group.consts, strict=True))

    def run(self, group: Group) -> Sequence[Tensor]:
        self._load(group)
        self._graph.replay()
        return [tensor.clone() for tensor in self._outputs]

    def _load(self, group: Group) -> None:
        for buffer, column in zip(self._inputs, group.consts, strict=True):
            buffer.load(column)


def capture(call: Call, group: Group, place: Place, memory: Any) -> Captured:
    return (CapturedScan if group.is_scan else CapturedCompute)(call, group, place, memory)
