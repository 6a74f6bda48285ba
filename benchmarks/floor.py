"""How far each hot loop is from what the machine could do: its operations and bytes against measured rates.

    python benchmarks/floor.py --small                                                        # a CPU
    python benchmarks/floor.py --device cuda --out benchmarks/results/floor-cuda.json

For each loop: what one step of all clients must compute (products and convolutions, counted by torch's FLOP counter on
one client's step, gradients included) and must move (what the step carries, read and written once; the samples of the
batch, and what all steps share, read once; intermediate results count nothing). The floor is the larger of the two
times that follow from the rates of one large product, one large convolution and one large copy on this machine, in
float32 without TF32. Time ÷ floor is how many times longer the engine takes.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import wait
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedgist import models
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.task import Model
from fedgist.core.work import Chunks, Compute, Place, Pool, Scan, compute, execute, scan
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.scheduler import gpu_arithmetic
from fedgist.features import Fourier, Scattering
from fedgist.features.moments import Moments
from fedgist.learning.distillation import Distiller, GuidedTrainer
from fedgist.learning.optimisers import SGD, Adam
from fedgist.learning.training import Trainer
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.encoding import Encoder, learning_rates
from fedgist.synthesis.generators import Generator, GeneratorTrainer
from fedgist.synthesis.inversion import Dreamer, DreamOptions
from fedgist.synthesis.matching import ClassBatches, Matcher, shares

Role = Coroutine[Any, Any, Any]
CLASSES, GREY, COLOUR = 10, (1, 28, 28), (3, 32, 32)
RNG, LR = Rng(0), torch.tensor(0.05, dtype=torch.float64)


@dataclass(frozen=True)
class Loop:
    """Equal work of some clients; `work(steps, place)` is that of all of them, in loops of so many steps."""

    name: str
    clients: int
    steps: int
    work: Callable[[int, Place], list[Role]]


def own_data(clients: int, shape: tuple[int, ...], place: Place, n: int = 320) -> list[ClientData]:
    made = [
        ClientData(RNG("x", i).normal(n, *shape), RNG("y", i).integers(CLASSES, n), CLASSES) for i in range(clients)
    ]
    return [one.to(place.device) for one in made]


def local_sgd(name: str, shape: tuple[int, ...], clients: int, steps: int, batch: int) -> Loop:
    model = models.build(name, shape, CLASSES)
    trainer = Trainer(model, SGD(0.9))

    def work(steps: int, place: Place) -> list[Role]:
        w = place.put(model.init(RNG("w")))
        data = own_data(clients, shape, place)
        plans = [one.steps(RNG("plan", i), steps, batch) for i, one in enumerate(data)]
        carry = w, trainer.init(w)
        return [scan(trainer.step, carry, plan, one.pool, LR) for one, plan in zip(data, plans, strict=True)]

    return Loop(f"local SGD, {name}, batch {batch}", clients, steps, work)


def matching(clients: int, steps: int, width: int, batch: int) -> Loop:
    net, ipc = models.build("convnet", COLOUR, CLASSES, width=width), 10
    matcher = Matcher(net, 5.0, SGD(), 1.0)

    def work(steps: int, place: Place) -> list[Role]:
        y = torch.arange(CLASSES).repeat_interleave(2 * batch)
        members = place.put([(y == c).nonzero().flatten() for c in range(CLASSES)])
        batches, own = ClassBatches(members, len(y), batch), shares([ipc] * CLASSES, [ipc] * CLASSES)
        pools = [place.put(Pool(x=RNG("x", i).normal(len(y), *COLOUR), y=y)) for i in range(clients)]
        w, plan = place.put(net.init(RNG("w"))), Chunks(batches.make, 0, steps)
        starts = [pool["x"][: CLASSES * ipc].clone() for pool in pools]
        return [
            scan(matcher.step, matcher.init(x), plan, pool, w, batches.shares, own)
            for x, pool in zip(starts, pools, strict=True)
        ]

    return Loop(f"FedDM's matching, {CLASSES} classes of {batch}", clients, steps, work)


def dreaming(clients: int, dreams: int) -> Loop:
    net, space = models.build("lenet5", GREY, CLASSES, norm="batch"), FreeDreams(dreams, GREY)
    dreamer = Dreamer(DreamOptions().objective(net), space)
    weights = [net.init(RNG("w", i)) for i in range(clients)]
    start = space.start(RNG("dreams"))

    def work(steps: int, place: Place) -> list[Role]:
        v = place.put(start)
        return [compute(dreamer.gradient, v, place.put(w)) for w in weights]

    return Loop(f"Co-Dream's exchange, lenet5, {dreams} dreams", clients, 1, work)


def encoding(clients: int, steps: int, images: int) -> Loop:
    net = models.build("lenet5", GREY, CLASSES)
    encoder = Encoder(net)

    def work(steps: int, place: Place) -> list[Role]:
        w, rates = place.put(net.init(RNG("w"))), {"lr": learning_rates(0.1, steps)}
        updates = [place.put(net.init(RNG("update", i))) for i in range(clients)]
        aims = [encoder.aim({name: update[name] for name in encoder.names}) for update in updates]
        starts = [encoder.init(place.put(encoder.start(RNG("start", i), images))) for i in range(clients)]
        return [scan(encoder.step, start, rates, w, *aim) for start, aim in zip(starts, aims, strict=True)]

    return Loop(f"TOFU's encoder, lenet5, {images} images", clients, steps, work)


def head(model: Model, w: dict[str, Tensor], latent: str) -> dict[str, Tensor]:
    return {name: w[name] for name in model.names_from(latent)}


def generator(users: int, steps: int, batch: int) -> Loop:
    model = models.build("cnn", GREY, CLASSES)
    latent = model.classifier
    made = Generator(CLASSES, model.layer_shapes[latent])
    trainer = GeneratorTrainer(made, model, latent, Adam())

    def work(steps: int, place: Place) -> list[Role]:
        w = place.put(made.init(RNG("g")))
        heads = place.put(tree.stack([head(model, model.init(RNG("w", i)), latent) for i in range(users)]))
        weights = place.put(torch.full((users, CLASSES), 1 / users))
        xs = {"y": RNG("y").integers(CLASSES, steps, batch), "noise": RNG("n").normal(steps, batch, made.noise)}
        return [scan(trainer.step, (w, trainer.init(w)), xs, heads, weights, LR)]

    return Loop(f"FedGen's generator, heads of {users}", 1, steps, work)


def guided(clients: int, steps: int, batch: int) -> Loop:
    model = models.build("cnn", GREY, CLASSES)
    latent = model.classifier
    trainer = GuidedTrainer(Trainer(model, SGD()), latent)

    def work(steps: int, place: Place) -> list[Role]:
        w, one = place.put(model.init(RNG("w"))), torch.tensor(1.0)
        size, roles = model.layer_shapes[latent], []
        for i, data in enumerate(own_data(clients, GREY, place)):
            lessons = {
                "z": RNG("z", i).normal(steps, batch, *size),
                "label": RNG("l", i).integers(CLASSES, steps, batch),
            }
            plan = data.steps(RNG("plan", i), steps, batch) | lessons | {"on": torch.ones(steps)}
            roles.append(scan(trainer.step, (w, trainer.init(w)), plan, data.pool, LR, one, one))
        return roles

    return Loop(f"FedGen's users, cnn, batch {batch}", clients, steps, work)


def distilling(clients: int, steps: int, batch: int) -> Loop:
    model = models.build("lenet5", GREY, CLASSES)
    distiller = Distiller(Trainer(model, SGD(0.9)))

    def work(steps: int, place: Place) -> list[Role]:
        w, roles = place.put(model.init(RNG("w"))), []
        for i, data in enumerate(own_data(clients, GREY, place)):
            taught = Pool(x=data.x, logits=place.put(RNG("t", i).normal(data.n, CLASSES)))
            plan = data.steps(RNG("plan", i), steps, batch)
            roles.append(scan(distiller.step, (w, distiller.init(w)), plan, taught, LR))
        return roles

    return Loop(f"distillation, lenet5, batch {batch}", clients, steps, work)


def moments(clients: int, part: str, samples: int, size: int) -> Loop:
    scattering = Scattering(COLOUR, (0.0,) * 3, (1.0,) * 3)
    features = Fourier(scattering, size, 0.5)
    sums = Moments(features, CLASSES, 1.0)

    def work(steps: int, place: Place) -> list[Role]:
        w = place.put(features.weights(RNG("map")))
        mean = place.put(torch.zeros(features.size))
        roles = []
        for i, data in enumerate(own_data(clients, COLOUR, place, samples)):
            plan = data.epochs(RNG("plan", i), 1, min(samples, 256))
            more = (mean,) if part == "second" else ()
            roles.append(compute(getattr(sums, part), plan, data.pool, w, *more))
        return roles

    what = "features" if part == "first" else "features and products"
    return Loop(f"gist's {what}, {samples} samples", clients, 1, work)


def loops(small: bool) -> list[Loop]:
    few, many = (2, 8) if small else (10, 100)
    steps, batch = (4, 32) if small else (20, 32)
    return [
        local_sgd("mlp", GREY, many, steps, batch),
        local_sgd("lenet5", GREY, many, steps, batch),
        local_sgd("convnet", GREY, few if small else many, steps, batch),
        local_sgd("resnet18", COLOUR, 1 if small else few, 2 if small else steps, batch),
        matching(1 if small else few, 2 if small else steps, 32 if small else 128, 16 if small else 256),
        dreaming(4, 32 if small else 256),
        encoding(few, steps, 16 if small else 64),
        generator(20, steps, batch),
        guided(20, steps, batch),
        distilling(few, steps, 32 if small else 256),
        moments(few, "first", 128 if small else 1024, 256 if small else 2048),
        moments(few, "second", 128 if small else 1024, 256 if small else 2048),
    ]


def seconds(run: Callable[[], Any], place: Place, repeats: int = 3) -> float:
    """The median over a few turns, after one that is not counted."""
    run()
    spent = []
    for _ in range(repeats):
        began = wait(place)
        run()
        spent.append(wait(place) - began)
    return statistics.median(spent)


def rates(place: Place, small: bool) -> dict[str, float]:
    """FLOPs a second of a product and of a convolution, and bytes a second of a copy (read and written)."""
    side, images, numbers = (1024, 16, 1 << 24) if small else (8192, 512, 1 << 28)
    a, b = (torch.randn(side, side, device=place.device) for _ in range(2))
    x, w = torch.randn(images, 128, 16, 16, device=place.device), torch.randn(128, 128, 3, 3, device=place.device)
    from_, to = (torch.zeros(numbers, device=place.device) for _ in range(2))
    with gpu_arithmetic(place):
        return {
            "matmul": 2 * side**3 / seconds(lambda: a @ b, place),
            "convolution": 2 * images * 16 * 16 * 128 * 128 * 9
            / seconds(lambda: torch.nn.functional.conv2d(x, w, padding=1), place),
            "copy": 2 * 4 * numbers / seconds(lambda: to.copy_(from_), place),
        }  # fmt: skip


def size_of(what: Any, seen: set[int]) -> int:
    """Bytes of the tensors in a tree that were not seen yet: what clients share is read once."""
    found = [leaf for leaf in tree.leaves(what) if isinstance(leaf, Tensor) and id(leaf) not in seen]
    seen.update(map(id, found))
    return sum(leaf.numel() * leaf.element_size() for leaf in found)


def first_step(work: Compute | Scan) -> tuple[Compute, int]:
    """One step as a single call, and the samples that it takes out of a pool; all, where it indexes none."""
    if isinstance(work, Compute):
        return work, sum(len(pool) for arg in work.args if isinstance(arg, Pool) for pool in list(arg.values())[:1])
    xs = work.xs.make(work.xs.seed, 0, 1) if isinstance(work.xs, Chunks) else work.xs
    x = tree.index(xs, 0)
    taken = x["index"].numel() if isinstance(x, dict) and "index" in x else 0
    return Compute(work.step, (work.carry, x, *work.consts)), taken


def must(loop: Loop) -> tuple[dict[str, int], int]:
    """The FLOPs (of products, of convolutions) and the bytes of one step of all clients."""
    roles = loop.work(1, Place())
    works = [role.send(None) for role in roles]
    for role in roles:
        role.close()
    step, _ = first_step(works[0])
    with FlopCounterMode(display=False) as counter:
        result = execute(step, Place())
    flops = {"products": 0, "convolutions": 0}
    for operation, count in counter.get_flop_counts()["Global"].items():
        flops["convolutions" if "conv" in str(operation) else "products"] += count * loop.clients
    seen: set[int] = set()
    moved = loop.clients * size_of(result, set())
    for work in works:
        call, taken = first_step(work)
        for argument in call.args:
            if isinstance(argument, Pool):
                rows = taken or len(next(iter(argument.values())))
                moved += sum(rows * tensor[0].numel() * tensor.element_size() for tensor in argument.values())
            else:
                moved += size_of(argument, seen)
        if isinstance(work, Scan):  # a carry that all begin with is each client's own after the first step
            moved += size_of(work.carry, set()) if work is not works[0] else 0
    return flops, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true", help="small enough for a CPU")
    parser.add_argument("--engines", nargs="+", default=["stacked"])
    parser.add_argument("--only", default="", help="loops whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    place = Place(torch.device(options.device))
    speed = rates(place, options.small)
    cuda = options.device == "cuda"
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "rates": {name: f"{value:.3g}" for name, value in speed.items()},
        "loops": {},
    }
    print(f"{report['device']}: {report['rates']}\n")
    titles = " | ".join(f"{engine}, ms (÷ floor)" for engine in options.engines)
    print(f"| loop | clients | GFLOP a step | MB a step | floor, ms | {titles} |")
    print("|---|---|---|---|---|" + "---|" * len(options.engines))
    for loop in [loop for loop in loops(options.small) if options.only in loop.name]:
        flops, moved = must(loop)
        computing = flops["products"] / speed["matmul"] + flops["convolutions"] / speed["convolution"]
        floor = max(computing, moved / speed["copy"])
        row: dict[str, Any] = {"clients": loop.clients, "gflop": sum(flops.values()) / 1e9, "mb": moved / 1e6}
        row |= {"floor_ms": 1e3 * floor, "bound by": "compute" if computing > moved / speed["copy"] else "memory"}
        cells = []
        for engine in options.engines:
            runner = executor(engine, options.device)
            asked = [repeatable(role) for role in loop.work(loop.steps, place)]

            def again(runner: Any = runner, asked: list[Callable[[], Role]] = asked) -> None:
                runner.drive([ask() for ask in asked])

            for _ in range(3 if loop.steps == 1 else 0):  # a single call is recorded when it comes for the third time
                again()
            spent = seconds(again, place) / loop.steps
            row[engine] = {"ms": 1e3 * spent, "times floor": spent / floor}
            cells.append(f"{1e3 * spent:.3g} ({spent / floor:.3g})")
            del runner, asked, again
            if cuda:
                torch.cuda.empty_cache()
        report["loops"][loop.name] = row
        numbers = " | ".join(f"{row[name]:.3g}" for name in ("gflop", "mb", "floor_ms"))
        print(f"| {loop.name} | {loop.clients} | {numbers} | {' | '.join(cells)} |", flush=True)
        if options.out:
            options.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")


def repeatable(role: Role) -> Callable[[], Role]:
    """The same request as often as it is wanted."""
    work = role.send(None)
    role.close()
    if isinstance(work, Compute):
        return lambda: compute(work.fn, *work.args)
    return lambda: scan(work.step, work.carry, work.xs, *work.consts)


if __name__ == "__main__":
    main()
