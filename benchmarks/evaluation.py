"""How long cores take to evaluate a model, beside the usual loop: images a second.

    python benchmarks/evaluation.py --threads 1 2 --images 4000 --out benchmarks/results/evaluation-cpu.json

The usual loop is an `nn.Module` in evaluation mode without gradients, 200 images at a time, as many as fedgist takes,
and torch's threads inside its operations, where fedgist's take batches. Both have the same weights and as many threads,
and take turns, of which the shortest counts.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

import torch
from engines import CLASSES, SHAPE, module
from timing import in_turns, report
from torch import Tensor, nn

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.work import Place, compute
from fedgist.engines import at
from fedgist.engines.scheduler import Executor
from fedgist.learning.evaluation import BATCH, Tally


def usual(net: nn.Module, x: Tensor, y: Tensor) -> int:
    """How many images a module has right."""
    net.eval()
    with torch.no_grad():
        parts = zip(x.split(BATCH["cpu"]), y.split(BATCH["cpu"]), strict=True)
        return int(sum((net(a).argmax(1) == b).sum() for a, b in parts))


def ours(engine: Executor, model: Model, w: Params, x: Tensor, y: Tensor) -> int:
    """The same by fedgist, which counts by class and confidence, too."""
    (tally,) = engine.drive([compute(Tally(model), w, x, y)])
    return int(tally["right"].sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet5", "convnet"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    x, y = Rng(0)("x").normal(options.images, *SHAPE), torch.arange(options.images) % CLASSES
    lines = []
    for name, threads in itertools.product(options.models, options.threads):
        torch.set_num_threads(threads)
        engine = at("threaded", Place(), threads)
        model, net = models.build(name, SHAPE, CLASSES), module(name)
        w = dict(zip(model.shapes, (value.detach() for value in net.parameters()), strict=True))
        ways = partial(ours, engine, model, w, x, y), partial(usual, net, x, y)
        assert ways[0]() == ways[1]()
        spent = in_turns(ways, options.repeats, Place(), cpu_time=False)
        both = {"fedgist": round(options.images / spent[0]), "usual": round(options.images / spent[1])}
        lines.append(
            {
                "model": name,
                "engine": engine.name,
                "cores": threads,
                **both,
                "times_faster": round(spent[1] / spent[0], 2),
            }
        )
    report(lines, options.out)


if __name__ == "__main__":
    main()
