"""How long a matching step of FedDM takes for a client, and how far a cheaper precision is from float32.

    python benchmarks/feddm_speed.py --device cuda                      # CIFAR-10's shape, 9 classes of 256 real images
    python benchmarks/feddm_speed.py --device cuda --augmented          # the same with siamese augmentation
    python benchmarks/feddm_speed.py --width 16 --classes 2 --batch 32  # small enough for a CPU

The engines run scans of such steps as a round does. The error is that of the image gradient of one step, relative to
plain float32 (no TF32) at the same weights; the first figure counts compiling and recording.
"""

import argparse
import json

import torch
from timing import wait

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Chunks, Place, Pool, scan
from fedgist.engines import executor
from fedgist.learning.optimisers import SGD
from fedgist.synthesis.augmentation import KINDS, Augmentation
from fedgist.synthesis.matching import ClassBatches, Matcher, shares

IPC, SHAPE = 10, (3, 32, 32)
WAYS = (
    ("sequential", False, "float32"),
    ("stacked", False, "float32"),
    ("stacked", True, "float32"),
    ("stacked", True, "float16"),
    ("compiled", True, "float32"),
    ("compiled", True, "bfloat16"),
)
"""Engine, TF32, precision."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=1, help="stacked, with equally many classes")
    parser.add_argument("--classes", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--augmented", action="store_true", help="siamese augmentation, of all kinds")
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked", "compiled"])
    options = parser.parse_args()
    place = Place(torch.device(options.device))
    net, rng = models.build("convnet", SHAPE, 10, width=options.width), Rng(0)
    y = torch.arange(options.classes).repeat_interleave(2 * options.batch)
    members = place.put([(y == c).nonzero().flatten() for c in range(options.classes)])
    changes = Augmentation(KINDS, SHAPE[1:]) if options.augmented else None
    batches = ClassBatches(members, len(y), options.batch, augmentation=changes)
    own = shares([IPC] * options.classes, [IPC] * options.classes)
    pools = [place.put(Pool(x=rng("x", i).normal(len(y), *SHAPE), y=y)) for i in range(options.clients)]
    w = place.put(net.init(rng("w")))
    starts = [pool["x"][:: 2 * options.batch // IPC][: options.classes * IPC].clone() for pool in pools]
    exact = None
    for engine, tf32, precision in WAYS:
        if engine not in options.engines:
            continue
        matcher = Matcher(net, 5.0, SGD(), 1.0, precision=precision)
        runner = executor(engine, options.device, tf32=tf32)

        def match(steps: int, matcher: Matcher = matcher, runner: object = runner) -> torch.Tensor:
            """How far all clients' images are from their start after so many steps."""
            plan = Chunks(batches.make, 0, steps)
            clients = zip(starts, pools, strict=True)
            scans = [scan(matcher.step, matcher.init(x), plan, pool, w, batches.shares, own) for x, pool in clients]
            return torch.stack([images["x"] for images, _ in runner.drive(scans)]) - torch.stack(starts)

        began = wait(place)
        gradient = match(1)
        match(options.steps)  # compiles, records
        first = wait(place) - began
        exact = gradient if exact is None else exact
        began = wait(place)
        match(options.steps)
        spent = (wait(place) - began) / options.steps / options.clients
        line = {"engine": engine, "precision": "tf32" if tf32 and precision == "float32" else precision}
        line |= {"ms": round(1e3 * spent, 3), "first_s": round(first, 1)}
        line |= {"error": round(((gradient - exact).norm() / exact.norm()).item(), 6)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
