"""How long a matching step of FedDM takes, and how far a cheaper precision is from float32.

    python benchmarks/feddm_speed.py --device cuda                      # CIFAR-10's shape, 9 classes of 256 real images
    python benchmarks/feddm_speed.py --width 16 --classes 2 --batch 32  # small enough for a CPU

The error is that of the image gradient of one step, relative to plain float32 (no TF32) at the same weights.
"""

import argparse
import json
import time
from dataclasses import replace

import torch

from fedgist import models
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Pool
from fedgist.engines.scheduler import float32_arithmetic
from fedgist.learning.optimisers import SGD
from fedgist.synthesis.matching import ClassBatches, Matcher, shares

IPC = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--classes", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    place = Place(torch.device(options.device))
    net, rng, shape = models.build("convnet", (3, 32, 32), 10, width=options.width), Rng(0), (3, 32, 32)
    y = torch.arange(options.classes).repeat_interleave(2 * options.batch)
    batches = ClassBatches([(y == c).nonzero().flatten() for c in range(options.classes)], len(y), options.batch)
    own = shares([IPC] * options.classes, [IPC] * options.classes)
    given = Pool(x=rng("x").normal(len(y), *shape), y=y), net.init(rng("w")), batches.shares, own
    pool, w, real, own = place.put(given)
    plan = place.put(batches.make(0, 0, options.steps))
    images = pool["x"][:: 2 * options.batch // IPC][: options.classes * IPC].clone()
    exact = None
    for tf32, precision in ((False, "float32"), (True, "float32"), (True, "bfloat16")):
        for compile in (False,) if options.no_compile else (False, True):
            matcher = Matcher(net, 5.0, SGD(), 1.0, precision=precision, compile=compile)

            def step(t: int, matcher: Matcher = matcher) -> torch.Tensor:
                carry = matcher.init(images)
                return matcher.step(carry, tree.index(plan, t), pool, w, real, own)[0]["x"] - images

            with torch.no_grad(), float32_arithmetic(replace(place, tf32=tf32)):
                gradient = step(0)  # compiles
                exact = gradient if exact is None else exact
                start = wait(place)
                for t in range(options.steps):
                    step(t)
                milliseconds = (wait(place) - start) / options.steps * 1000
            error = ((gradient - exact).norm() / exact.norm()).item()
            name = "tf32" if tf32 and precision == "float32" else precision
            found = {"precision": name, "compiled": compile, "ms": round(milliseconds, 3), "error": round(error, 6)}
            print(json.dumps(found), flush=True)


def wait(place: Place) -> float:
    """The time when all that was asked for is done."""
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
