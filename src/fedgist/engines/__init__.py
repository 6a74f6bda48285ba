"""Engines: who runs the coroutines of a method, and how its work is done."""

import re
from collections.abc import Mapping

import torch

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.work import Place
from fedgist.engines.scheduler import Executor
from fedgist.engines.sequential import Sequential
from fedgist.engines.stacked import Stacked
from fedgist.engines.threaded import Threaded

EXECUTORS = {"sequential": Sequential, "threaded": Threaded, "stacked": Stacked}
NAMES = (*EXECUTORS, "compiled", "measured")
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
    place = Place(find_device(device), dtype, tf32)
    if name == "measured":
        return Stacked(place, measure=True, picked=picked)
    if name == "compiled":
        return Stacked(place, compile=True)
    return EXECUTORS[name](place)
