"""How many images a second go through the feature maps of gist.

    python benchmarks/gist_features.py [--device cuda] [--out benchmarks/results/gist_features.json]

Made-up images, in batches of 256. Beside the clock on the wall, which other work on the machine slows down, stands the
process's own: images a second of one core, to be multiplied by the cores that are free. The load says how many wanted
to run meanwhile.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedgist.core.rng import Rng
from fedgist.features import FeatureMap, Fourier, Scattering

BATCH, SECONDS = 256, 3.0
GREY, COLOUR = (1, 28, 28), (3, 32, 32)


def scattering(shape: tuple[int, int, int], grid: int = 4) -> Scattering:
    return Scattering(shape, (0.0,) * shape[0], (1.0,) * shape[0], grid=grid)


MAPS: dict[str, tuple[tuple[int, int, int], FeatureMap]] = {
    "scattering, 28×28 grey": (GREY, scattering(GREY)),
    "scattering, 28×28 grey, grid 5": (GREY, scattering(GREY, 5)),
    "scattering, 32×32 colour (the default)": (COLOUR, scattering(COLOUR)),
    "2,048 Fourier features of it": (COLOUR, Fourier(scattering(COLOUR), 2048, 0.5)),
}


def rates(work: Callable[[], Any], device: str) -> dict[str, float]:
    """Images a second, by both clocks."""

    def clocks() -> tuple[float, float]:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    work()
    wall, own = clocks()
    done = 0
    while clocks()[0] - wall < SECONDS:
        work()
        done += BATCH
    now_wall, now_own = clocks()
    return {"images_per_second": round(done / (now_wall - wall)), "per_core_second": round(done / (now_own - own))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = {}
    for name, (shape, features) in MAPS.items():
        x = Rng(0).uniform(BATCH, *shape).to(chosen.device)
        w = {key: tensor.to(x) for key, tensor in features.weights(Rng(1)).items()}
        with torch.no_grad():
            found[name] = {"features": features.size, **rates(lambda f=features, w=w, x=x: f(w, x), chosen.device)}
        print(name, found[name], flush=True)
    machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "device": chosen.device}
    about = {**machine, "threads": torch.get_num_threads(), "load": [round(one, 1) for one in os.getloadavg()]}
    if chosen.out:
        chosen.out.write_text(json.dumps({**about, "maps": found}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(about)


if __name__ == "__main__":
    main()
