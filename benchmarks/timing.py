"""What the benchmarks of single steps share."""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from fedgist.core.work import Place


def wait(place: Place, cpu_time: bool = False) -> float:
    """The time when the device has done all its work; with `cpu_time` what this process had of all cores together."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.process_time() if cpu_time else time.perf_counter()


def in_turns(ways: Iterable[Callable[[], Any]], repeats: int, place: Place, cpu_time: bool) -> list[float]:
    """The shortest time of each of them."""
    ways = list(ways)
    best = [float("inf")] * len(ways)
    for _ in range(repeats):
        for i, run in enumerate(ways):
            began = wait(place, cpu_time)
            run()
            best[i] = min(best[i], wait(place, cpu_time) - began)
    return best


def report(lines: list[dict[str, Any]], out: Path | None) -> None:
    """Print what was found, how many times faster than the usual loop where that ran, and keep it."""
    usual = next((line["ms"] for line in lines if line["engine"] == "usual"), None)
    for line in lines:
        line |= {} if usual is None else {"times_faster": round(usual / line["ms"], 2)}
        print(json.dumps(line), flush=True)
    if out:
        about = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "machine": platform.machine()}
        out.write_text(json.dumps(about | {"threads": torch.get_num_threads(), "results": lines}, indent=2) + "\n")
