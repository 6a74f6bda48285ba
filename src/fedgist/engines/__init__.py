"""Engines: who runs the coroutines of a method, and how its work is done."""

from collections.abc import Mapping

import torch

from fedgist.core.errors import unknown
from fedgist.core.work import Place
from fedgist.engines.scheduler import Executor
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked
from fedgist.engines.threaded import Threaded

EXECUTORS = {"sequential": Sequential, "threaded": Threaded, "stacked": Stacked}
NAMES = (*EXECUTORS, "compiled", "measured")


def executor(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    picked: Mapping[str, str] | None = None,
    tf32: bool = False,
) -> Executor:
    """The executor of that name; `compiled` is `stacked` with compiled steps.

    `measured` stacks on a GPU; on a CPU it times for each computation whether stacks or single clients are faster, or
    follows what an earlier run `picked`.
    """
    if name not in NAMES:
        raise unknown("engine", name, NAMES)
    place = Place(torch.device(device), dtype, tf32)
    if name == "measured":
        return Stacked(place, measure=True, picked=picked)
    if name == "compiled":
        return Stacked(place, compile=True)
    return EXECUTORS[name](place)
