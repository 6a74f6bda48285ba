"""What the benchmarks of single steps share."""

import time

import torch

from fedgist.core.work import Place


def wait(place: Place) -> float:
    """The time when the device has done all its work."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
