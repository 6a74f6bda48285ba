"""How long a matching step of FedDM takes for a client, and how far a cheaper precision is from float32.

    python benchmarks/feddm_speed.py --device cuda                      # CIFAR-10's shape, 9 classes of 256 real images
    python benchmarks/feddm_speed.py --device cuda --augmented          # the same with siamese augmentation
    python benchmarks/feddm_speed.py --clients 4 --width 32 --classes 5 --batch 32 --steps 5 --repeats 5 --cpu-time \
        --usual --engines threaded stacked --out benchmarks/results/feddm-cpu.json  # small enough for a CPU

The engines run scans of such steps as a round does. The error is that of the image gradient of one step, relative to
plain float32 (no TF32) at the same weights; the first figure counts compiling and recording. With `--usual` the same
steps are also done as public code does them: an `nn.Module`, class by class, `torch.optim` on the images. All ways take
turns, and the shortest counts.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from timing import in_turns, report, wait
from torch import Tensor, nn

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.work import Chunks, Place, Pool, scan
from fedgist.engines import executor
from fedgist.learning.optimisers import SGD
from fedgist.synthesis.augmentation import KINDS, Augmentation
from fedgist.synthesis.matching import ClassBatches, Matcher, on_sphere, shares

IPC, SHAPE, RHO, LR = 10, (3, 32, 32), 5.0, 1.0
WAYS = (
    ("sequential", False, "float32"),
    ("threaded", False, "float32"),
    ("stacked", False, "float32"),
    ("stacked", True, "float32"),
    ("stacked", True, "float16"),
    ("compiled", True, "float32"),
    ("compiled", True, "bfloat16"),
)
"""Engine, TF32, precision."""


class Usual:
    """The same as public code does it: random nets as modules, real and synthetic images class by class."""

    def __init__(self, w: Params, pools: Sequence[Pool], starts: Sequence[Tensor], batches: ClassBatches):
        width, self.w, self.pools, self.starts, self.batches = len(w["conv1.bias"]), w, pools, starts, batches
        layers: list[nn.Module] = []
        for i in range(3):
            conv = nn.Conv2d(width if i else SHAPE[0], width, 3, padding=1)
            layers += [conv, nn.GroupNorm(width, width), nn.ReLU(), nn.AvgPool2d(2)]
        self.features = nn.Sequential(*layers, nn.Flatten()).to(starts[0].device)
        self.classifier = nn.Linear(width * 16, 10).to(starts[0].device)
        self.parameters = [*self.features.parameters(), *self.classifier.parameters()]
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def match(self, steps: int, seeded: bool = False) -> Tensor:
        """How far all clients' images are from their start; `seeded` at the weights and batches that fedgist draws."""
        moved = []
        for pool, start in zip(self.pools, self.starts, strict=True):
            images = start.clone().requires_grad_()
            optimiser = torch.optim.SGD([images], lr=LR)
            for t in range(steps):
                drawn = self.batches.make(0, t, 1) if seeded else None
                around = self._around() if drawn is None else on_sphere(self.w, drawn["weights"][0], RHO).values()
                for parameter, value in zip(self.parameters, around, strict=True):
                    parameter.copy_(value)
                loss: Tensor | float = 0.0
                for c, own in enumerate(self.batches.members):
                    chosen = own[torch.randperm(len(own))[: self.batches.batch]]
                    if drawn is not None:
                        chosen = drawn["real"][0].unflatten(0, (-1, self.batches.batch))[c]
                    real = self._embed(pool["x"][chosen]).mean(0)
                    loss = loss + (real - self._embed(images[c * IPC : (c + 1) * IPC]).mean(0)).square().sum()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            moved.append(images.detach() - start)
        return torch.stack(moved)

    def _embed(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return torch.cat([features, self.classifier(features)], 1)

    def _around(self) -> list[Tensor]:
        noise = [torch.randn_like(value) for value in self.w.values()]
        length = torch.stack([part.square().sum() for part in noise]).sum().sqrt()
        return [value + RHO / length * part for value, part in zip(self.w.values(), noise, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=1, help="stacked, with equally many classes")
    parser.add_argument("--classes", type=int, default=9)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--augmented", action="store_true", help="siamese augmentation, of all kinds")
    parser.add_argument("--usual", action="store_true", help="beside the usual loop, without augmentation")
    parser.add_argument("--cpu-time", action="store_true", help="of all cores together, not the clock on the wall")
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked", "compiled"])
    parser.add_argument("--out", type=Path)
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
    ways: list[Callable[[int], Tensor]] = []
    lines, exact = [], None
    for engine, tf32, precision in WAYS:
        if engine not in options.engines or (tf32 and options.device == "cpu"):
            continue
        matcher = Matcher(net, RHO, SGD(), LR, precision=precision)
        runner = executor(engine, options.device, tf32=tf32)

        def match(steps: int, matcher: Matcher = matcher, runner: object = runner) -> Tensor:
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
        ways.append(match)
        line = {"engine": engine, "precision": "tf32" if tf32 and precision == "float32" else precision}
        lines.append(line | {"first_s": round(first, 1), "error": error(gradient, exact)})
    if options.usual:
        usual = Usual(w, pools, starts, batches)
        ways.append(usual.match)
        lines.append({"engine": "usual", "precision": "float32", "error": error(usual.match(1, seeded=True), exact)})
    spent = in_turns([lambda run=run: run(options.steps) for run in ways], options.repeats, place, options.cpu_time)
    each = 1e3 / options.steps / options.clients
    report([line | {"ms": round(each * one, 3)} for line, one in zip(lines, spent, strict=True)], options.out)


def error(found: Tensor, exact: Tensor) -> float:
    return round(((found - exact).norm() / exact.norm()).item(), 6)


if __name__ == "__main__":
    main()
