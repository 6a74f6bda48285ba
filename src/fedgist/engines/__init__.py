"""Engines: who runs the coroutines of a method, and how its work is done."""

import torch

from fedgist.core.errors import unknown
from fedgist.core.work import Place
from fedgist.engines.scheduler import Executor
from fedgist.engines.sequential import Sequential
from fedgist.engines.threaded import Threaded

EXECUTORS = {"sequential": Sequential, "threaded": Threaded}


def executor(name: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.float32) -> Executor:
    """The executor of that name; `auto` is threaded on a CPU."""
    if name not in ("auto", *EXECUTORS):
        raise unknown("engine", name, ("auto", *EXECUTORS))
    return EXECUTORS["threaded" if name == "auto" else name](Place(torch.device(device), dtype))
