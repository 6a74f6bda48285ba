"""Clients side by side in worker threads, one intra-op thread each: the default on a CPU.

Two intra-op threads on a small net are slower than one, and torch releases Python's lock while it computes, so threads
over clients use the cores that threads inside an operation cannot. Who works alone, as a server that evaluates, has
them for runs of rows.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from fedgist.core.work import Compute, InRuns, Place, Work, execute
from fedgist.engines.scheduler import Role, drive_one, gpu_arithmetic


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def begin(device: torch.device) -> None:
    """What a worker thread does first."""
    torch.set_num_threads(1)  # a property of the calling thread: the main thread keeps its own
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # gives the thread the device's context, for want of which cuBLAS would warn


def execute_alone(work: Work, place: Place, pool: ThreadPoolExecutor) -> Any:
    """The only work there is: all threads of a pool take runs of its rows, if it comes in these, to the same bits."""
    if not (isinstance(work, Compute) and isinstance(work.fn, InRuns)):
        return execute(work, place)
    parts = [Compute(work.fn.part, run) for run in work.fn.cut(*place.put(work.args))]
    futures = [pool.submit(execute, part, place) for part in parts]
    try:  # who waits works, too, from the end: it may itself be the only thread of the pool
        own = {i: execute(parts[i], place) for i in reversed(range(len(parts))) if futures[i].cancel()}
        return work.fn.total([own[i] if i in own else futures[i].result() for i in range(len(parts))])
    finally:
        wait([future for future in futures if not future.cancel()])


class Threaded:
    name = "threaded"

    def __init__(self, place: Place = Place(), workers: int | None = None):
        self.place = place
        self.workers = workers or cores()
        self._pool = ThreadPoolExecutor(self.workers, "fedgist", initializer=begin, initargs=(place.device,))

    def drive(self, roles: Sequence[Role]) -> list[Any]:
        alone = len(roles) == 1 and self.place.device.type == "cpu"
        do = partial(execute_alone, pool=self._pool) if alone else execute
        with gpu_arithmetic(self.place):
            futures = [self._pool.submit(drive_one, role, self.place, do) for role in roles]
            try:
                return [future.result() for future in futures]
            finally:
                for role, future in zip(roles, futures, strict=True):
                    if future.cancel():
                        role.close()
                wait(futures)  # after an error too: nobody works on a client's behalf once this returns
