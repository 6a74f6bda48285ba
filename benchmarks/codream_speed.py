"""How long the clients' part of an exchange of Co-Dream takes: the gradient of 256 dreams, for all clients.

    python benchmarks/codream_speed.py --device cuda --seeds 3     # LeNet5 with BatchNorm, 4 clients, 3 seeds together
    python benchmarks/codream_speed.py --device cuda --model resnet9 --shape 3 32 32 --tf32
    python benchmarks/codream_speed.py --dreams 32 --exchanges 5   # a CPU

Clients of a seed share its dreams and have weights of their own. The error is that of the gradients, relative to the
sequential engine in float32; the first figure counts compiling and recording.
"""

import argparse
import json

import torch
from timing import wait

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.work import Place, compute
from fedgist.engines import executor
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.inversion import Dreamer, DreamOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="lenet5", help="with BatchNorm")
    parser.add_argument("--shape", type=int, nargs=3, default=[1, 28, 28])
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--dreams", type=int, default=256)
    parser.add_argument("--exchanges", type=int, default=100)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked"])
    options = parser.parse_args()
    place, shape = Place(torch.device(options.device)), tuple(options.shape)
    net, rng = models.build(options.model, shape, 10, norm="batch"), Rng(0)
    space = FreeDreams(options.dreams, shape)
    dreamer = Dreamer(DreamOptions().objective(net), space)
    dreams = [place.put(space.start(rng("dreams", seed))) for seed in range(options.seeds)]
    clients = range(options.clients)
    weights = [[place.put(net.init(rng("w", seed, k))) for k in clients] for seed in range(options.seeds)]
    exact = None
    for engine in options.engines:
        tf32 = options.tf32 and engine != "sequential"
        runner = executor(engine, options.device, tf32=tf32)

        def exchange(runner: object = runner) -> torch.Tensor:
            roles = [compute(dreamer.gradient, v, w) for v, own in zip(dreams, weights, strict=True) for w in own]
            return torch.stack([gradient["x"] for gradient in runner.drive(roles)])

        began = wait(place)
        for _ in range(4):  # work that is no scan is recorded when it comes for the third time
            gradients = exchange()
        first = wait(place) - began
        exact = gradients if exact is None else exact
        began = wait(place)
        for _ in range(options.exchanges):
            exchange()
        spent = (wait(place) - began) / options.exchanges
        line = {"model": options.model, "clients": options.clients, "seeds": options.seeds, "engine": engine}
        line |= {"tf32": tf32, "ms": round(1e3 * spent, 3), "first_s": round(first, 1)}
        print(json.dumps(line | {"error": round(((gradients - exact).norm() / exact.norm()).item(), 6)}), flush=True)


if __name__ == "__main__":
    main()
