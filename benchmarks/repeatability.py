"""Whether training on a GPU repeats itself, and what that costs: ResNets through cuDNN in TF32, side by side.

    python benchmarks/repeatability.py --device cuda

The same steps are trained three times by the engine as it is, and with convolutions that may add their gradients up in
any order. Apart: how far the first and the last of these end from each other, relative to the length of the weights.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from timing import wait

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Pool, scan
from fedgist.engines import scheduler
from fedgist.engines.stacked import Stacked, executor
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer

SHAPE, CLASSES, SAMPLES, BATCH = (3, 32, 32), 10, 2000, 256


@contextmanager
def in_any_order(place: Place) -> Iterator[None]:
    with scheduler.gpu_arithmetic(place):  # which puts back what was there before
        torch.backends.cudnn.deterministic = False
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["resnet9", "resnet18"])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    place, rng = Place(torch.device(options.device), tf32=True), Rng(0)
    pool = place.put(Pool(x=rng("x").normal(SAMPLES, *SHAPE), y=rng("y").integers(CLASSES, SAMPLES)))
    plan = {"index": rng("plan").integers(SAMPLES, options.steps, BATCH), "mask": torch.ones(options.steps, BATCH)}
    for name in options.models:
        net = models.build(name, SHAPE, CLASSES, width=options.width)
        trainer, w = Trainer(net, SGD(momentum=0.9)), place.put(net.init(rng("w", name)))
        for order, arithmetic in (("fixed", scheduler.gpu_arithmetic), ("any", in_any_order)):
            with mock.patch.object(executor, "gpu_arithmetic", arithmetic):
                runner, ends, seconds = Stacked(place), [], 0.0
                for _ in range(3):
                    began = wait(place)
                    ((end, _),) = runner.drive(
                        [scan(trainer.step, (w, trainer.init(w)), plan, pool, torch.tensor(0.1))]
                    )
                    seconds = wait(place) - began
                    ends.append(end)
            apart = (tree.norm(tree.sub(ends[0], ends[-1])) / tree.norm(ends[0])).item()
            line = {"model": name, "order": order, "ms": round(1e3 * seconds / options.steps, 3)}
            print(json.dumps(line | {"ends": len({storage.digest(end) for end in ends}), "apart": round(apart, 4)}))


if __name__ == "__main__":
    main()
