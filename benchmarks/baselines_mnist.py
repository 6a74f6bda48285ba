"""Weight baselines on MNIST, Dirichlet 0.1: is each at least as good as FedAvg after 20 rounds, learning rates tuned?

Learning rates are chosen on images held out from the training set, each candidate over a few seeds that are not used
again; the chosen ones then train on the whole training set and meet the test set once a seed. Every finished run is in
the result file, so that a killed benchmark goes on where it was. All candidates of a method that are still to do are
driven together, so that a stacked engine may compute them as one.

    python benchmarks/baselines_mnist.py --data-dir DIR --device cuda
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist import engines, methods, models
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data import datasets, partitions
from fedgist.data.client_data import ClientData
from fedgist.data.datasets import Dataset
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.experiments.provenance import environment
from fedgist.options import build

CLIENT_RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
GRIDS: dict[str, dict[str, Sequence[float]]] = {
    "fedavg": {"lr": CLIENT_RATES},
    "fednova": {"lr": CLIENT_RATES},
    "scaffold": {"lr": CLIENT_RATES},
    "fedadam": {"lr": CLIENT_RATES, "server_lr": (0.003, 0.01, 0.03, 0.1)},
    "fedyogi": {"lr": CLIENT_RATES, "server_lr": (0.003, 0.01, 0.03, 0.1)},
    "fedadagrad": {"lr": CLIENT_RATES, "server_lr": (0.01, 0.03, 0.1, 0.3)},
}
TUNING_SEED = 1000
"""The first seed of the tuning runs; those of the test runs start at 0."""


@dataclass(frozen=True)
class Run:
    """One run: a method, its learning rates, a seed, and which images judge it."""

    judged_on: str
    method: str
    rates: tuple[tuple[str, float], ...]
    seed: int

    @property
    def key(self) -> str:
        return f"{self.judged_on} {self.method} {' '.join(f'{k}={v:g}' for k, v in self.rates)} seed={self.seed}"


class Results:
    """The runs that are done, in a file that is always whole."""

    def __init__(self, path: Path, setting: dict[str, Any], about: dict[str, Any]):
        self.path = path
        self.content: dict[str, Any] = {"setting": setting, "about": about, "accuracy": {}}
        if path.is_file():
            before = json.loads(path.read_text())
            if before["setting"] != setting:
                raise SystemExit(f"{path} holds results of another setting; name another file with --out")
            self.content["accuracy"] = before["accuracy"]

    def add(self, found: dict[str, float]) -> None:
        self.content["accuracy"].update(found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".partial")
        draft.write_text(json.dumps(self.content, indent=1) + "\n")
        draft.replace(self.path)

    def __contains__(self, run: Run) -> bool:
        return run.key in self.content["accuracy"]

    def __getitem__(self, run: Run) -> float:
        return float(self.content["accuracy"][run.key])


class Bench:
    """The data on its device, and federations made of it."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        train, self.test = datasets.load(args.dataset, args.data_dir, limit=args.limit)
        order = Rng(0)("validation").permutation(len(train))
        self.splits = {
            "validation": (train.take(order[args.validation :]), train.take(order[: args.validation])),
            "test": (train, self.test),
        }
        net = models.build(args.model, train.shape, train.classes)
        self.task = Task(train.shape, train.classes, train.low, train.high, {args.model: net}, args.model)
        self.executor = engines.executor(args.engine, args.device)
        self.sites: dict[tuple[str, int], dict[str, ClientData]] = {}

    def clients(self, train: Dataset, which: tuple[str, int]) -> dict[str, ClientData]:
        """The same clients for all runs of a seed, so that their data is on the device once."""
        if which not in self.sites:
            rng = Rng(which[1])("partition")
            parts = partitions.split(train.y, self.args.clients, rng, "dirichlet", alpha=self.args.alpha)
            shares = [train.take(part) for part in parts]
            self.sites[which] = {
                f"{i:03d}": ClientData(share.x, share.y, train.classes).to(self.args.device)
                for i, share in enumerate(shares)
            }
        return self.sites[which]

    def federation(self, run: Run) -> LocalEngine:
        method = methods.find(run.method)
        local = {"epochs": self.args.epochs, "batch": self.args.batch, "momentum": self.args.momentum}
        config = build(method.Config, {**local, **dict(run.rates)})
        sites = self.clients(self.splits[run.judged_on][0], (run.judged_on, run.seed))
        return LocalEngine(method(config, self.task), sites, seed=run.seed, executor=self.executor)

    def run_together(self, runs: Sequence[Run]) -> dict[str, float]:
        """The accuracies of several runs, driven together."""
        federations = [self.federation(run) for run in runs]
        for _ in range(self.args.rounds):
            run_rounds(federations)
        judges = [self.splits[run.judged_on][1] for run in runs]
        return {
            run.key: federation.evaluate((judge.x, judge.y))["accuracy"]
            for run, federation, judge in zip(runs, federations, judges, strict=True)
        }


def candidates(method: str, judged_on: str, seeds: Sequence[int]) -> dict[tuple[tuple[str, float], ...], list[Run]]:
    """Every choice of learning rates of a method, with its runs."""
    grid = GRIDS[method]
    choices = [tuple(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    return {rates: [Run(judged_on, method, rates, seed) for seed in seeds] for rates in choices}


def run_missing(bench: Bench, results: Results, runs: Sequence[Run]) -> None:
    """Do the runs that are not done yet."""
    missing = [run for run in runs if run not in results]
    for first in range(0, len(missing), bench.args.together):
        group = missing[first : first + bench.args.together]
        start = time.perf_counter()
        results.add(bench.run_together(group))
        seconds = time.perf_counter() - start
        print(f"{group[0].key} … {len(group)} runs, {seconds:.0f} s", file=sys.stderr, flush=True)


def choose(results: Results, method: str, found: dict[tuple[tuple[str, float], ...], list[Run]]) -> Any:
    """The learning rates of the best mean validation accuracy; prints the grid as a Markdown table."""
    means = {rates: statistics.fmean(results[run] for run in runs) for rates, runs in found.items()}
    best = max(means, key=lambda rates: means[rates])
    grid = GRIDS[method]
    columns = grid.get("server_lr", (None,))
    print(f"\n{method}\n")
    print("| client lr | " + " | ".join("accuracy" if c is None else f"server lr {c:g}" for c in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for lr in grid["lr"]:
        rows = [tuple([("lr", lr)] + ([] if c is None else [("server_lr", c)])) for c in columns]
        cells = [f"**{means[row]:.2%}**" if row == best else f"{means[row]:.2%}" for row in rows]
        print(f"| {lr:g} | {' | '.join(cells)} |")
    for name, value in best:
        if value in (min(grid[name]), max(grid[name])):
            print(f"\nThe best {name}, {value:g}, is at the edge of the grid.")
    return best


def report(results: Results, chosen: dict[str, list[Run]]) -> None:
    """Test accuracies, and how far each method is from FedAvg on the same partitions, as a Markdown table."""
    print("\n| method | learning rates | test accuracy | minus FedAvg, by seed | holds |\n|---|---|---|---|---|")
    reference = [results[run] for run in chosen["fedavg"]] if "fedavg" in chosen else None
    for method, runs in chosen.items():
        accuracies = [results[run] for run in runs]
        rates = ", ".join(f"{name} {value:g}" for name, value in runs[0].rates)
        row = [method, rates, f"{statistics.fmean(accuracies):.2%} ± {spread(accuracies):.2%}"]
        if reference is None or method == "fedavg":
            row += ["", ""]
        else:
            gains = [ours - theirs for ours, theirs in zip(accuracies, reference, strict=True)]
            # A match: below FedAvg by no more than the standard error of the mean difference.
            holds = statistics.fmean(gains) >= -spread(gains) / len(gains) ** 0.5
            row += [", ".join(f"{gain:+.2%}" for gain in gains), "yes" if holds else "no"]
        print(f"| {' | '.join(row)} |")


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(GRIDS), choices=GRIDS)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--limit", type=int, default=None, help="use only so many training images")
    parser.add_argument("--validation", type=int, default=5000, help="training images held out to tune on")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=3, help="test runs of each method")
    parser.add_argument("--tuning-seeds", type=int, default=3, help="validation runs of each candidate")
    parser.add_argument("--engine", default="stacked")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--together", type=int, default=12, help="runs driven together")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/baselines_mnist.json"))
    return parser.parse_args()


NOT_A_SETTING = ("methods", "seeds", "tuning_seeds", "engine", "device", "together", "out", "data_dir")
"""Arguments that decide which runs are made, where and how, but not what comes out of one."""


def main() -> None:
    args = arguments()
    setting = {key: value for key, value in vars(args).items() if key not in NOT_A_SETTING}
    command = "python " + " ".join(arg for arg in sys.argv if args.data_dir is None or arg != args.data_dir)
    results = Results(args.out, setting, {"command": command, "environment": environment(args.device)})
    bench = Bench(args)
    chosen: dict[str, list[Run]] = {}
    tuning = range(TUNING_SEED, TUNING_SEED + args.tuning_seeds)
    print(f"Validation accuracy after {args.rounds} rounds, the mean of {args.tuning_seeds} seeds:")
    for method in args.methods:
        found = candidates(method, "validation", tuning)
        run_missing(bench, results, [run for runs in found.values() for run in runs])
        best = choose(results, method, found)
        chosen[method] = [Run("test", method, best, seed) for seed in range(args.seeds)]
    bench.sites.clear()
    run_missing(bench, results, [run for runs in chosen.values() for run in runs])
    report(results, chosen)


if __name__ == "__main__":
    main()
