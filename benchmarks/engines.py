"""Engine against engine and against the usual loop, in one process, as ratios.

    python benchmarks/engines.py --clients 50 --out benchmarks/results/engines-cpu.json
    python benchmarks/engines.py --device cuda --clients 100 --out benchmarks/results/engines-cuda.json

Two things are timed. A *round* of FedAvg: for the usual loop that is DataLoader, load_state_dict, a new torch.optim for
each client, and the average of the state dicts; for an engine it is everything that it does, messages and ledger
included. And the *training* in it alone: batches drawn beforehand and data on the device for both, so that the loop is
spared its DataLoader and the engine its messages. All ways take turns, the slow ones fewer, and a ratio is that of
medians, or of the shortest turns with `--best`, because machines are noisy. Where others compute on the same cores,
`--cpu-time` counts the time that this process had one: on so many quiet cores, engines with that many workers take the
share of it.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedgist import methods, models
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.core.work import scan
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.families.local_training import trainer
from fedgist.options import build

SHAPE, CLASSES = (1, 28, 28), 10


def module(name: str) -> nn.Module:
    """The same nets as anyone would write them."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    if name == "lenet5":
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip
    layers: list[nn.Module] = []
    for i in range(3):
        conv = nn.Conv2d(1 if i == 0 else 128, 128, 3, padding=3 if i == 0 else 1)
        layers += [conv, nn.GroupNorm(128, 128), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 10))


class Usual:
    """FedAvg as it is usually written."""

    def __init__(self, name: str, sites: list[ClientData], settings: argparse.Namespace):
        self.settings, self.device = settings, settings.device
        self.net = module(name).to(self.device)
        self.start = {key: value.clone() for key, value in self.net.state_dict().items()}
        self.sites = sites
        self.sets = [TensorDataset(site.x, site.y) for site in sites]
        self.resident = [(site.x.to(self.device), site.y.to(self.device)) for site in sites]
        steps, batch = settings.steps, settings.batch
        self.plans = [site.steps(Rng(i), steps, batch)["index"].to(self.device) for i, site in enumerate(sites)]

    def round(self, clients: int | None = None) -> None:
        """One round; `clients` limits it, for a warm-up."""
        uploads = []
        for data in self.sets[:clients]:
            loss, optimiser = self._begin()
            for _ in range(self.settings.epochs):
                for x, y in DataLoader(data, batch_size=self.settings.batch, shuffle=True):
                    self._step(loss, optimiser, x.to(self.device), y.to(self.device))
            uploads.append({key: value.clone() for key, value in self.net.state_dict().items()})
        {key: torch.stack([upload[key] for upload in uploads]).mean(0) for key in self.start}

    def training(self, clients: int | None = None) -> None:
        """The training alone."""
        for (x, y), plan in list(zip(self.resident, self.plans, strict=True))[:clients]:
            loss, optimiser = self._begin()
            for index in plan:
                self._step(loss, optimiser, x[index], y[index])

    def _begin(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.net.load_state_dict(self.start)
        return nn.CrossEntropyLoss(), torch.optim.SGD(
            self.net.parameters(), lr=self.settings.lr, momentum=self.settings.momentum
        )

    def _step(self, loss: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        optimiser.zero_grad()
        loss(self.net(x), y).backward()
        optimiser.step()


class Engine:
    """FedAvg on one of fedgist's engines."""

    def __init__(self, engine: str, name: str, sites: list[ClientData], settings: argparse.Namespace):
        self.model = models.build(name, SHAPE, CLASSES)
        method = methods.find("fedavg")
        names = ("steps", "batch", "lr", "momentum")
        config = build(method.Config, {key: getattr(settings, key) for key in names})
        task = Task(SHAPE, CLASSES, (0.0,), (1.0,), {name: self.model}, name)
        kind, _, tf32 = engine.partition("+")
        self.executor: Any = executor(kind, settings.device, tf32=bool(tf32))
        self.engine = LocalEngine(
            method(config, task), {f"{i:03d}": site for i, site in enumerate(sites)}, seed=0, executor=self.executor
        )
        self.learner, self.lr = trainer(config, self.model), torch.tensor(config.lr)
        data = list(self.engine.data.values())
        self.pools = [site.pool for site in data]
        self.plans = [site.steps(Rng(i), config.steps, config.batch) for i, site in enumerate(data)]

    def round(self, clients: int | None = None) -> None:
        self.engine.run_round()

    def training(self, clients: int | None = None) -> None:
        w = self.engine.state["w"]
        carry, step, lr = (w, self.learner.init(w)), self.learner.step, self.lr
        given = zip(self.plans, self.pools, strict=True)
        self.executor.drive([scan(step, carry, plan, pool, lr) for plan, pool in given])


def timed(run: Callable[..., None], settings: argparse.Namespace, *args: Any) -> float:
    clock = time.process_time if settings.cpu_time else time.perf_counter
    if settings.device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    run(*args)
    if settings.device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def compare(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """All ways with one model: part -> way -> milliseconds and how many times faster than the usual loop."""
    rng = Rng(0)
    count = settings.steps * settings.batch // settings.epochs
    sites = [
        ClientData(rng("x", i).normal(count, *SHAPE), rng("y", i).integers(CLASSES, count), CLASSES)
        for i in range(settings.clients)
    ]
    ways: dict[str, Any] = {"usual": Usual(name, sites, settings)}
    ways |= {engine: Engine(engine, name, sites, settings) for engine in settings.engines}
    found: dict[str, Any] = {}
    for part in settings.parts:
        # The first time is not counted: it compiles and records. The usual loop warms up with two clients.
        first = {way: timed(getattr(runner, part), settings, 2) for way, runner in ways.items()}
        turns: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(settings.repeats):
            for way, runner in ways.items():
                if way in ("usual", "sequential") and turn >= settings.slow_repeats:
                    continue
                turns[way].append(timed(getattr(runner, part), settings))
        taken = {way: (min if settings.best else statistics.median)(spent) for way, spent in turns.items()}
        found[part] = {
            way: {
                "ms": round(1e3 * one, 2),
                "first_ms": round(1e3 * first[way], 2),
                "times_faster": round(taken["usual"] / one, 2),
            }
            for way, one in taken.items()
        }
    return found


def show(name: str, found: dict[str, Any], parts: list[str]) -> None:
    print(f"\n{name:<15}" + "".join(f"{part:>12}{'':>10}{'(first)':>12}" for part in parts))
    for way in found[parts[0]]:
        cells = [found[part][way] for part in parts]
        print(
            f"{way:<15}"
            + "".join(f"{c['ms']:>9.1f} ms{c['times_faster']:>9.2f}×{c['first_ms']:>9.0f} ms" for c in cells)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", nargs="+", choices=("mlp", "lenet5", "convnet"))
    parser.add_argument("--engines", nargs="+", help="by name; stacked+tf32 and compiled+tf32 may use TF32")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2, help="passes in which the usual loop makes these steps")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--slow-repeats", type=int, default=2, help="turns of the usual loop and the sequential engine")
    parser.add_argument("--best", action="store_true", help="the shortest turn instead of the median")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of all cores together, instead of the clock on the wall"
    )
    parser.add_argument("--parts", nargs="+", default=["round", "training"], choices=("round", "training"))
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args()
    cuda = settings.device == "cuda"
    settings.models = settings.models or (["mlp", "lenet5", "convnet"] if cuda else ["mlp", "lenet5"])
    default = ["stacked", "stacked+tf32", "compiled+tf32"] if cuda else ["threaded", "stacked"]
    settings.engines = settings.engines or ["sequential", *default]
    torch.manual_seed(0)  # the usual loop draws from the global generator
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "cores": os.cpu_count(),
        "threads of the usual loop": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "settings": {key: value for key, value in vars(settings).items() if key != "out"},
        "results": {},
    }
    for name in settings.models:
        report["results"][name] = compare(name, settings)
        show(name, report["results"][name], settings.parts)
        if settings.out:
            settings.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
