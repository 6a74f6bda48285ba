"""How long the clients' part of an exchange of Co-Dream takes: the gradient of 256 dreams, for all clients.

    python benchmarks/codream_speed.py --device cuda --seeds 3     # LeNet5 with BatchNorm, 4 clients, 3 seeds together
    python benchmarks/codream_speed.py --device cuda --model resnet9 --shape 3 32 32 --tf32
    python benchmarks/codream_speed.py --dreams 64 --exchanges 10 --repeats 5 --cpu-time --usual \
        --engines threaded stacked --out benchmarks/results/codream-cpu.json  # a CPU

Clients of a seed share its dreams and have weights of their own. The error is that of the gradients, relative to the
first engine in float32; the first figure counts compiling and recording. With `--usual` the same is also done as public
code does it: an `nn.Module` a client, hooks at its BatchNorm layers, one client after the other. All ways take turns,
and the shortest counts.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from timing import in_turns, report, wait
from torch import Tensor, nn

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.work import Place, compute
from fedgist.engines import executor
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.inversion import Dreamer, DreamOptions


class Usual:
    """LeNet5 with BatchNorm as anyone would write it, with the regularisers of DeepInversion."""

    def __init__(self, w: Params):
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        ).eval()  # fmt: skip
        names = [name for name in self.net.state_dict() if not name.endswith("num_batches_tracked")]
        self.net.load_state_dict(dict(zip(names, w.values(), strict=True)), strict=False)
        self.net.to(next(iter(w.values())).device)
        self.gaps: list[Tensor] = []
        for part in self.net:
            if isinstance(part, nn.BatchNorm2d):
                part.register_forward_hook(self._compare)

    def gradient(self, dreams: Tensor) -> Tensor:
        """That of the default options."""
        x, self.gaps, options = dreams.clone().requires_grad_(), [], DreamOptions()
        p = self.net(x).softmax(1)
        down, across = x[:, :, 1:] - x[:, :, :-1], x[..., 1:] - x[..., :-1]
        loss = options.entropy * -(p * p.log()).sum(1).mean() + options.statistics * sum(self.gaps)
        loss = loss + options.tv * (down.square().sum() + across.square().sum()) / x.numel() + options.l2 * x.norm()
        loss.backward()
        assert x.grad is not None
        return x.grad

    def _compare(self, part: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        mean, variance = inputs[0].mean([0, 2, 3]), inputs[0].var([0, 2, 3], unbiased=False)
        self.gaps += [torch.norm(part.running_mean - mean), torch.norm(part.running_var - variance)]


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
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--usual", action="store_true", help="beside the usual loop, for LeNet5 and one seed")
    parser.add_argument("--cpu-time", action="store_true", help="of all cores together, not the clock on the wall")
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    place, shape = Place(torch.device(options.device)), tuple(options.shape)
    net, rng = models.build(options.model, shape, 10, norm="batch"), Rng(0)
    space = FreeDreams(options.dreams, shape)
    dreamer = Dreamer(DreamOptions().objective(net), space)
    dreams = [place.put(space.start(rng("dreams", seed))) for seed in range(options.seeds)]
    clients = range(options.clients)
    weights = [[place.put(net.init(rng("w", seed, k))) for k in clients] for seed in range(options.seeds)]
    ways, lines, exact = [], [], None
    for engine in options.engines:
        tf32 = options.tf32 and engine != "sequential"
        runner = executor(engine, options.device, tf32=tf32)

        def exchange(runner: object = runner) -> Tensor:
            roles = [compute(dreamer.gradient, v, w) for v, own in zip(dreams, weights, strict=True) for w in own]
            return torch.stack([gradient["x"] for gradient in runner.drive(roles)])

        began = wait(place)
        for _ in range(4):  # work that is no scan is recorded when it comes for the third time
            gradients = exchange()
        first = wait(place) - began
        exact = gradients if exact is None else exact
        ways.append(exchange)
        line = {"model": options.model, "clients": options.clients, "seeds": options.seeds, "engine": engine}
        lines.append(line | {"tf32": tf32, "first_s": round(first, 1), "error": error(gradients, exact)})
    if options.usual:
        nets = [Usual(w) for w in weights[0]]

        def one_by_one() -> Tensor:
            found = torch.stack([net.gradient(dreams[0]["x"]) for net in nets])
            found.mean(0)
            return found

        ways.append(one_by_one)
        line = {"model": options.model, "clients": options.clients, "seeds": 1, "engine": "usual"}
        lines.append(line | {"error": error(one_by_one(), exact)})
    several = [lambda run=run: [run() for _ in range(options.exchanges)] for run in ways]
    spent = in_turns(several, options.repeats, place, options.cpu_time)
    each = 1e3 / options.exchanges
    report([line | {"ms": round(each * one, 3)} for line, one in zip(lines, spent, strict=True)], options.out)


def error(found: Tensor, exact: Tensor) -> float:
    return round(((found - exact).norm() / exact.norm()).item(), 6)


if __name__ == "__main__":
    main()
