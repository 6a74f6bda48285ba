"""Equal work of many clients as one call: the default on a GPU, and often the best for small nets on a CPU.

All coroutines are driven to their next request; requests that are the same computation are stacked, run once under
`torch.func.vmap`, and taken apart again. On a GPU the step of a scan, and a call that comes again and again, is
recorded as a CUDA graph. On a CPU a group is cut into chunks for the worker threads, small enough for the caches.
"""

import logging
import math
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import torch

from fedgist.core import tree
from fedgist.core.work import Compute, InRuns, Place, Scan, Work, execute, length
from fedgist.engines.scheduler import Role, drive_together, gpu_arithmetic
from fedgist.engines.stacked.columns import PoolCache
from fedgist.engines.stacked.flat_work import FlatWork, flatten
from fedgist.engines.stacked.graphs import Captured, NotCapturable, capture
from fedgist.engines.stacked.grouping import Group
from fedgist.engines.stacked.programs import Call, Vectorised, first_line, run_compute, run_scan, trace
from fedgist.engines.stacked.workload import numbers_written
from fedgist.engines.threaded import cores, execute_alone

log = logging.getLogger("fedgist")

T = TypeVar("T")

LARGEST_STACK = 16
"""Clients in a stack on a CPU: with more, each is no faster and they fall out of the caches."""
FILLS_A_GPU = 1 << 26
"""Numbers that a client's step writes from which on it keeps a GPU busy: stacked, its convolutions are only slower."""
PROGRAMS = 64
"""Stacked computations whose graphs are kept; the one that was used longest ago makes room."""
SHORTEST_CAPTURE = 4
"""Steps from which on a scan is recorded at once; other work is when it comes for the third time."""
WORTH_TRACING = 64
"""Steps after which a stacked computation is traced: about what that costs."""


@dataclass
class Program:
    """A computation stacked for a number of clients, and how it is run."""

    vectorised: Vectorised
    call: Call
    runs: int = 0
    steps: int = 0
    trace_tried: bool = False
    recordable: bool = True
    recorded: Captured | None = None


class Stacked:
    """Stacks all that can be stacked; with `compile`, each step is compiled first, which pays in long runs only."""

    def __init__(self, place: Place = Place(), workers: int | None = None, *, compile: bool = False):
        self.name = "compiled" if compile else "stacked"
        self.place, self.workers = place, workers or cores()
        self.on_gpu = place.device.type == "cuda"
        self._compile = compile
        self._graph_memory: Any = None
        self._threads = ThreadPoolExecutor(self.workers, "fedgist", initializer=torch.set_num_threads, initargs=(1,))
        self._pools = PoolCache()
        self._lock = threading.Lock()
        self._unstackable: set[Hashable] = set()
        self._large: dict[Hashable, bool] = {}  # whether a client's step fills the GPU
        self._fitting: dict[Hashable, int] = {}  # how many clients fit on the GPU together, where not all did
        self._programs: dict[Hashable, Program] = {}

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        with gpu_arithmetic(self.place):
            return drive_together(roles, self._execute)

    # Who works together

    def _execute(self, works: Mapping[int, Work]) -> dict[int, Any]:
        """The results of all work."""
        groups: dict[Hashable, list[tuple[int, FlatWork]]] = {}
        outcomes: dict[int, Any] = {}
        for i, work in works.items():
            if isinstance(work, Scan) and length(work.xs) == 0:
                outcomes[i] = self.place.put(work.carry)
            elif isinstance(work, Compute) and work.alone:
                outcomes[i] = execute(work, self.place)
            else:
                flat = flatten(work, self.place)
                groups.setdefault(flat.key, []).append((i, flat))
        chunks: list[list[tuple[int, FlatWork]]] = []
        for members in groups.values():
            members.sort(key=lambda one: (one[1].steps, one[1].rows))  # less to wait for, less to pad
            chunks += split_evenly(members, self._count_stacks([flat for _, flat in members]))
        results = self._run_all([Group([flat for _, flat in chunk]) for chunk in chunks])
        for chunk, result in zip(chunks, results, strict=True):
            outcomes.update(zip([i for i, _ in chunk], result, strict=True))
        return outcomes

    def _count_stacks(self, members: list[FlatWork]) -> int:
        """How many stacks a group is cut into; a stack of one is a client on its own."""
        count, key = len(members), members[0].key
        if key in self._unstackable or count == 1:
            return count
        if self.on_gpu:
            if key not in self._large:
                self._large[key] = numbers_written(members[0].work, self.place) >= FILLS_A_GPU
            return count if self._large[key] else math.ceil(count / self._fitting.get(key, count))
        return self.workers * math.ceil(count / (self.workers * LARGEST_STACK))  # equally many for each worker

    def _run_all(self, groups: Sequence[Group]) -> list[list[Any]]:
        """The results of all: by the worker threads, or one after the other on a GPU."""
        for group in groups:
            if self._runs_as_stack(group):
                self._prepare(group)
        if self.on_gpu:  # the largest first: where clients run alone, a graph that holds it holds the others
            return [self._run(group) for group in reversed(groups)][::-1]
        if len(groups) == 1 and groups[0].size == 1 and isinstance(groups[0].fn, InRuns):
            return [[execute_alone(groups[0].first, self.place, self._threads)]]
        futures = [self._threads.submit(self._run, group) for group in groups]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)  # after an error too: nobody works on a client's behalf once this returns

    # How it is done

    def _runs_as_stack(self, group: Group) -> bool:
        """Whether a group runs as a stack: that of one client only on a GPU, where what comes again is recorded."""
        often = self._large.get(group.key, False) or (group.is_scan and group.lengths[0] >= SHORTEST_CAPTURE)
        return (group.size > 1 or (self.on_gpu and often)) and group.key not in self._unstackable

    def _run(self, group: Group) -> list[Any]:
        """The results of equal work; what cannot be stacked is done for one client after the other."""
        if not self._runs_as_stack(group):
            return [execute(one.work, self.place) for one in group.members]
        if group.size > 1 and group.identical:
            once = execute(group.first, self.place)
            return [once, *(tree.map(_copy_leaf, once) for _ in range(1, group.size))]
        half = math.ceil(group.size / 2)
        try:
            return self._run_stack(group)
        except torch.cuda.OutOfMemoryError:
            if group.size == 1:
                raise
            log.info("%s: %d clients do not fit on the GPU together, going on with %d", group.name, group.size, half)
        except Exception as error:
            # An error of the work itself is raised here.
            results = [execute(one.work, self.place) for one in group.members]
            with self._lock:
                if group.key not in self._unstackable:
                    log.warning("%s cannot be stacked and runs client by client: %s", group.name, first_line(error))
                self._unstackable.add(group.key)
            return results
        # Outside of the handler: its traceback would keep the memory.
        for program in self._programs.values():
            program.recorded = None
        torch.cuda.empty_cache()
        self._fitting[group.key] = half
        return self._run(Group(group.members[:half])) + self._run(Group(group.members[half:]))

    def _run_stack(self, group: Group) -> list[Any]:
        program = self._find_program(group)
        recorded = self._record(program, group) if self.on_gpu else None
        if recorded is not None:
            return program.vectorised.split(recorded.run(group), group.size)
        run = run_scan if group.is_scan else run_compute
        return program.vectorised.split(run(program.call, group, self.place, self._pools), group.size)

    def _find_program(self, group: Group) -> Program:
        form = group.key, group.size, group.dims, group.ragged
        with self._lock:
            program = self._programs.pop(form, None)
            if program is None:
                vectorised = Vectorised(group, traceable=self._compile)
                program = Program(vectorised, vectorised)
                if len(self._programs) == PROGRAMS:
                    self._programs.pop(next(iter(self._programs)))
            self._programs[form] = program  # at the end, so that the first is the one used longest ago
        return program

    def _prepare(self, group: Group) -> None:
        """Replace vmap by the operations it comes to, once that pays; on a GPU, which replays them, only to compile."""
        program = self._find_program(group)
        program.runs, program.steps = program.runs + 1, program.steps + max(group.lengths)
        often = group.is_scan or program.runs >= 3
        worth = often if self._compile else not self.on_gpu and program.steps >= WORTH_TRACING
        if program.trace_tried or not worth or (group.size > 1 and group.identical):
            return
        program.trace_tried = True
        try:
            pools = PoolCache() if self.on_gpu else self._pools  # a graph has its own
            began = time.perf_counter()
            program.call = trace(program.vectorised, group, self.place, pools, self._compile)
            if self._compile:
                log.info("%s: compiled in %.1f s", group.name, time.perf_counter() - began)
        except torch.cuda.OutOfMemoryError:
            program.trace_tried = False  # the stack will be halved
        except Exception as error:
            level = logging.WARNING if self._compile else logging.DEBUG
            log.log(
                level, "%s cannot be %s: %s", group.name, "compiled" if self._compile else "traced", first_line(error)
            )

    def _record(self, program: Program, group: Group) -> Captured | None:
        """The program as a CUDA graph, where that pays and is possible."""
        if not program.recordable or not (max(group.lengths) >= SHORTEST_CAPTURE or program.runs >= 3):
            return None
        if program.recorded is None or not program.recorded.fits(group):
            program.recorded = None  # its memory may be needed
            if not any(other.recorded for other in self._programs.values()):
                self._graph_memory = torch.cuda.graph_pool_handle()  # the last one ended with the last of its graphs
            try:
                program.recorded = capture(program.call, group, self.place, self._graph_memory)
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, NotCapturable) as error:
                program.recordable = False
                log.warning("%s cannot be recorded as a CUDA graph: %s", group.name, first_line(error))
        return program.recorded


def split_evenly(members: list[T], parts: int) -> list[list[T]]:
    """At most `parts` runs of almost equal length."""
    size, more = divmod(len(members), parts)
    ends = [size * i + min(i, more) for i in range(parts + 1)]
    return [members[a:b] for a, b in pairwise(ends) if b > a]


def _copy_leaf(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
