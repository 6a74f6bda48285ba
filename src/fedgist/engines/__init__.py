"""Engines: who runs the coroutines of a method here, and how its work is done; may touch methods and below."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.work import Place
from fedgist.engines.scheduler import Executor
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked
from fedgist.engines.threaded import Threaded

EXECUTORS = ("sequential", "threaded", "stacked")
NAMES = (*EXECUTORS, "compiled")
DEVICE = re.compile("cpu|cuda(?::(0|[1-9][0-9]*))?")  # torch.device knows many more, and takes cuda:256 for cuda:0


def find_device(name: str) -> torch.device:
    """The device of that name, if it is here; `auto` is the GPU, where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (named := DEVICE.fullmatch(name)) is None:
        raise FedgistError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if name != "cpu":
        if not torch.cuda.is_available():
            raise FedgistError(f"device {name} was asked for, but torch finds no GPU here; use --device cpu")
        if int(named[1] or 0) >= (count := torch.cuda.device_count()):
            raise FedgistError(
                f"device {name} was asked for, but the last GPU that torch finds here is cuda:{count - 1}"
            )
    return torch.device(name)


def check_name(name: str, known: Collection[str] = NAMES) -> None:
    """Whether there is such an engine."""
    if name not in known:
        raise unknown("engine", name, known)


@contextmanager
def one_thread(name: str, device: str) -> Iterator[None]:
    """One thread inside an operation where clients have threads of their own, also for what is done between them.

    That is thousands of small operations for many clients, and two threads that wait for each other at each, on cores
    that others use too, take ten times as long as one.
    """
    before = torch.get_num_threads()
    try:
        if name != "sequential" and device == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def executor(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    *,
    tf32: bool = False,
    workers: str | None = None,
) -> Executor:
    """The executor of that name; with `workers`, one in each of so many processes, or on a cluster."""
    check_name(name)
    place = Place(find_device(device), dtype, tf32)
    if workers is None:
        return at(name, place)
    from fedgist.engines.spread import Spread

    return Spread(name, place, workers)


def at(name: str, place: Place, threads: int | None = None) -> Executor:
    """The executor of that name in a place; `compiled` is `stacked` with compiled steps."""
    if name == "sequential":
        return Sequential(place)
    if name == "threaded":
        return Threaded(place, threads)
    return Stacked(place, threads, compile=name == "compiled")
