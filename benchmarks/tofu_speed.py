"""How long an iteration of TOFU's encoder takes for all clients, against the plain loop over clients.

    python benchmarks/tofu_speed.py --device cuda      # LeNet5 on MNIST's shape, 10 clients, 64 images
    python benchmarks/tofu_speed.py --iterations 20    # a CPU

The plain loop encodes one client after the other with torch's autograd, as published codes would; the first figure of
an engine counts compiling and recording.
"""

import argparse
import json

import torch
from timing import wait

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Place, scan
from fedgist.engines import executor
from fedgist.synthesis.encoding import Encoder, learning_rates

SHAPES = {"lenet5": (1, 28, 28), "vgg13": (3, 32, 32)}
WAYS = (("sequential", False), ("stacked", False), ("compiled", False), ("stacked", True), ("compiled", True))
"""Engine, TF32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="lenet5", choices=SHAPES)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked", "compiled"])
    options = parser.parse_args()
    place = Place(torch.device(options.device))
    net = models.build(options.model, SHAPES[options.model], 10)
    encoder, rng = Encoder(net), Rng(0)
    w = place.put(net.init(rng("w")))
    updates = [place.put(net.init(rng("update", i))) for i in range(options.clients)]
    aims = [encoder.aim({name: update[name] for name in encoder.names}) for update in updates]
    plain = None
    for engine, tf32 in WAYS:
        if engine not in options.engines or (tf32 and options.device == "cpu"):
            continue
        runner = executor(engine, options.device, tf32=tf32)

        def encode(iterations: int, runner: object = runner) -> torch.Tensor:
            rates = {"lr": learning_rates(0.1, iterations)}
            starts = [encoder.init(place.put(encoder.start(rng("start", i), options.images))) for i in range(len(aims))]
            scans = [scan(encoder.step, start, rates, w, *aim) for start, aim in zip(starts, aims, strict=True)]
            images = [variables for variables, _ in runner.drive(scans)]
            losses = [encoder.reconstruction_loss(v, w, *aim) for v, aim in zip(images, aims, strict=True)]
            return torch.stack(losses).mean()

        iterations = max(4, options.iterations // 10) if engine == "sequential" else options.iterations
        began = wait(place)
        encode(iterations)
        first = wait(place) - began
        began = wait(place)
        loss = encode(iterations)
        spent = (wait(place) - began) / iterations
        plain = plain or spent
        line = {"model": options.model, "clients": options.clients, "engine": engine, "tf32": tf32}
        line |= {"ms": round(1e3 * spent, 3), "times": round(plain / spent, 1), "first_s": round(first, 1)}
        print(json.dumps(line | {"loss": round(loss.item(), 4), "iterations": iterations}), flush=True)


if __name__ == "__main__":
    main()
