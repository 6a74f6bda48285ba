"""What the benchmarks of single steps share."""

import time

import torch

from fedgist.core.work import Place


def wait(place: Place) -> float:
    """The time when all that was asked for is done."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
