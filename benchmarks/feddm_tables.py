"""The tables of FedDM (Xiong et al. 2023) and its controls; results are kept as they come.

    python benchmarks/feddm_tables.py run mnist --data-dir DIR --device cuda     # Dirichlet 0.1 and 0.01, full settings
    python benchmarks/feddm_tables.py tune cifar10 --data-dir DIR --device cuda  # FedAvg's grid, on a validation split
    python benchmarks/feddm_tables.py run cifar10 --data-dir DIR --device cuda   # Dirichlet 0.5: FedDM, REAL, FedAvg
    python benchmarks/feddm_tables.py run ipc rho --set steps=200 …              # smaller than the paper: `scaled`
    python benchmarks/feddm_tables.py run small                                  # mnist5k, a CPU will do
    python benchmarks/feddm_tables.py show                                       # markdown, paper beside ours
    python benchmarks/feddm_tables.py sizes --data-dir DIR                       # Table 2 for our partitions

A run that is in the result file is not run again, and one that was stopped goes on from its last checkpoint under
`--work`. `--minutes` ends the command cleanly after that time, at the end of a round: give the same command again to go
on. A row with whatever `--set` changes of the paper's settings is `scaled`, but for switches that leave the task alone.
FedAvg runs with the best cell of the paper's grid that `tune` has found; `tune` sets a tenth of every client's samples
apart and never sees the test set.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedgist.core.rng import Rng
from fedgist.data import datasets, partitions
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig, assignments, method_options, resolve
from fedgist.experiments.folder import write_json
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.experiments.progress import Lines

RESULTS = Path(__file__).parent / "results" / "feddm_tables.json"
HARMLESS = {"precision", "tf32", "even", "engine", "eval_every", "checkpoint_every"}
"""Options that change how a run is computed, not what."""
Settings = dict[str, Any]

GROUND = {"partition": "dirichlet-balanced", "clients": 10, "rounds": 20, "model": "convnet"}
MNIST, CIFAR = GROUND | {"dataset": "mnist"}, GROUND | {"dataset": "cifar10"}
SUBSET = GROUND | {"dataset": "cifar100-subset", "ipc": 5}
SMALL = {"profile": "small", "partition": "dirichlet-balanced", "alpha": 0.1}
FEDAVG = {"batch": 256, "momentum": 0.9, "lr": 0.01, "epochs": 10}
GRID = [{"lr": lr, "epochs": epochs} for lr in (0.001, 0.01, 0.1) for epochs in (5, 10, 15, 20)]


@dataclass(frozen=True)
class Row:
    """One setting of one method, and the accuracy that the paper has for it."""

    table: str
    method: str
    settings: Settings
    paper: str = ""

    @property
    def name(self) -> str:
        shown = {key: value for key, value in self.settings.items() if key not in GROUND or value != GROUND[key]}
        return f"{self.table} {self.method} {name_of(shown)}"


def rows() -> Iterator[Row]:
    """All rows, the most important first."""
    for alpha, ours, fedavg in ((0.1, "98.67±0.01", "96.92±0.09"), (0.01, "98.21±0.23", "91.04±0.80")):
        for method, paper in (("feddm", ours), ("real", ""), ("fedavg", fedavg)):
            yield Row("mnist", method, MNIST | {"alpha": alpha}, paper)
    for method, paper in (("feddm", "69.66±0.13"), ("real", "68.66±0.08"), ("fedavg", "")):
        yield Row("cifar10", method, CIFAR | {"alpha": 0.5}, paper)
    for pixels in ("float16", "uint8"):  # float32 is in the table `mnist`
        yield Row("pixels", "feddm", MNIST | {"alpha": 0.01, "pixels": pixels}, "98.21±0.23")
    for alpha, ours, fedavg in ((0.1, "67.38±0.32", "57.32±0.04"), (0.01, "63.82±0.17", "57.32±0.04")):
        yield Row("skewed", "feddm", CIFAR | {"alpha": alpha}, ours)
        yield Row("skewed", "fedavg", CIFAR | {"alpha": alpha}, fedavg)
    for method in ("feddm", "fedavg"):
        yield Row("iid", method, CIFAR | {"alpha": 50.0})
        yield Row("clients", method, CIFAR | {"alpha": 0.5, "clients": 50, "ipc": 3})
        yield Row("resnet18", method, CIFAR | {"alpha": 0.5, "model": "resnet18:norm=instance"})
        yield Row("cifar100", method, SUBSET | {"alpha": 0.5})
    for ipc, paper in ((3, "53.64±0.35"), (5, "62.24±0.04"), (10, "69.62±0.14")):
        yield Row("ipc", "feddm", CIFAR | {"alpha": 0.5, "ipc": ipc}, paper)
    for rho, paper in ((3.0, "69.15±0.09"), (5.0, "69.66±0.13"), (10.0, "69.32±0.24")):
        yield Row("rho", "feddm", CIFAR | {"alpha": 0.5, "rho": rho}, paper)
    yield Row("one-shot", "feddm", MNIST | {"alpha": 0.1, "rounds": 1})
    for method in ("feddm", "real", "fedavg", "independent"):
        yield Row("small", method, SMALL)
    yield Row("small", "feddm", SMALL | {"pixels": "uint8"})


TABLES = list(dict.fromkeys(row.table for row in rows()))


class Deadline(Lines):
    """A line a round, and an end after so many minutes."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    def round(self, row: dict[str, Any]) -> None:
        super().round(row)
        if time.monotonic() > self.end and self.done < self.rounds:
            raise KeyboardInterrupt


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"tuned": {}, "runs": {}}


def keep(kind: str, key: str, value: Any) -> None:
    kept = load()
    kept[kind][key] = value
    write_json(RESULTS, kept)


def ground(settings: Settings) -> str:
    """What a tuned baseline was tuned on."""
    return name_of({key: settings.get(key) for key in ("dataset", "alpha", "clients", "model")})


def configure(row: Row, seed: int, options: argparse.Namespace, **more: Any) -> RunConfig:
    settings: Settings = {"data_dir": options.data_dir, "device": options.device, "seed": seed} | row.settings
    if row.method == "fedavg" and "profile" not in settings:
        settings = FEDAVG | settings | load()["tuned"].get(ground(row.settings), {}).get("best", {})
    settings |= assignments(options.set) | more
    profile = settings.pop("profile", None)
    known = method_options(row.method).keys() | RunConfig.__dataclass_fields__.keys()
    return resolve({"method": row.method} | {k: v for k, v in settings.items() if k in known}, profile=profile)


def label(row: Row, options: argparse.Namespace) -> str:
    changed = [pair for pair in sorted(options.set) if pair.split("=")[0].strip() not in HARMLESS]
    scaled = "scaled " if changed or row.settings.get("profile") else ""
    return f"{scaled}{row.name} {' '.join(changed)}".strip()


def run(row: Row, seed: int, options: argparse.Namespace) -> None:
    key = f"{label(row, options)} seed={seed}"
    if key in load()["runs"]:
        return
    config = configure(row, seed, options)
    inputs = from_dataset(runner.prepare(config))
    result = runner.run(config, options.work / key.replace(" ", "_"), True, inputs, Deadline(options.left()))
    assert result.folder is not None
    found = {
        "accuracies": [round(100 * line["accuracy"], 2) for line in result.metrics if "accuracy" in line],
        "paper_accuracy": row.paper,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "paper_numbers_up_a_round": json.loads((result.folder / "result.json").read_text())["paper_up"]
        // (4 * config.rounds),
        "seconds": result.seconds,
        "settings": {option: getattr(config.options, option) for option in method_options(row.method)},
        "environment": runner.environment(runner.prepare(config).device),
        "command": f"python benchmarks/feddm_tables.py run '{row.table}' --seeds {options.seeds}"
        + "".join(f" --set {pair}" for pair in options.set),
    }
    keep("runs", key, found)


def held_out(inputs: Inputs, seed: int) -> Inputs:
    """The same federation with a tenth of every client's samples as the test set."""
    sites, parts = {}, []
    for id, data in inputs.sites.items():
        order = Rng(seed)("validation", id).permutation(data.n).to(data.y.device)
        parts.append(order[: data.n // 10])
        sites[id] = replace(data, x=data.x[order[data.n // 10 :]], y=data.y[order[data.n // 10 :]])
    apart = [(inputs.sites[id].x[part], inputs.sites[id].y[part]) for id, part in zip(sites, parts, strict=True)]
    test = torch.cat([x for x, _ in apart]), torch.cat([y for _, y in apart])
    return replace(inputs, sites={id: replace(data, test=test) for id, data in sites.items()}, test=test)


def tune(row: Row, options: argparse.Namespace) -> None:
    """FedAvg on the paper's grid, one seed, judged on what was set apart."""
    on = ground(row.settings)
    known = load()["tuned"].get(on, {"grid": {}})
    for cell in GRID:
        if name_of(cell) in known["grid"]:
            continue
        config = configure(row, 0, options, **cell)
        inputs = held_out(from_dataset(runner.prepare(config)), 0)
        folder = options.work / f"tune {on} {name_of(cell)}".replace(" ", "_")
        result = runner.run(config, folder, True, inputs, Deadline(options.left()))
        known["grid"][name_of(cell)] = round(100 * result.accuracy, 2)
        known["best"] = max(GRID, key=lambda cell: known["grid"].get(name_of(cell), 0.0))
        keep("tuned", on, known)


def name_of(cell: Settings) -> str:
    return " ".join(f"{key}={value}" for key, value in cell.items())


def sizes(options: argparse.Namespace) -> None:
    """The numbers sent up in a round by Table 2's rule, for seeds 0 to 2, beside the paper's."""
    paper = {("mnist", 0.5): 635040, ("mnist", 0.1): 368480, ("mnist", 0.01): 109760}
    paper |= {("cifar10", 0.5): 2672640, ("cifar10", 0.1): 1351680, ("cifar10", 0.01): 460800}
    print("| data | alpha | ours, seeds 0, 1, 2 | paper |\n|---|---|---|---|")
    for dataset in ("mnist", "cifar10"):
        train, _ = datasets.load(dataset, options.data_dir)
        for alpha in (0.5, 0.1, 0.01):
            found = []
            for seed in range(3):
                rng = Rng(seed)("partition")
                parts = partitions.split(train.y, 10, rng, "dirichlet-balanced", alpha=alpha, min_size=10)
                pairs = (partitions.label_counts(train.y, parts, train.classes) >= 10).sum()
                found.append(pairs * 10 * train.x[0].numel())
            ours = ", ".join(f"{count:,}" for count in found)
            print(f"| {dataset} | {alpha} | {ours} | {paper[dataset, alpha]:,} |", flush=True)


def show() -> None:
    kept = load()
    print("| run | seeds | ours | paper | numbers up a round | seconds |\n|---|---|---|---|---|---|")
    groups: dict[str, list[Any]] = {}
    for key, found in kept["runs"].items():
        groups.setdefault(key.rsplit(" seed=", 1)[0], []).append(found)
    for name, found in groups.items():
        last = [one["accuracies"][-1] for one in found]
        spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
        numbers = statistics.mean(one["paper_numbers_up_a_round"] for one in found)
        seconds = statistics.mean(one["seconds"] for one in found)
        ours = f"{statistics.mean(last):.2f}{spread}"
        print(f"| {name} | {len(last)} | {ours} | {found[0]['paper_accuracy']} | {numbers:,.0f} | {seconds:.0f} |")
    for on, tuned in kept["tuned"].items():
        print(f"\nFedAvg, {on}, on a validation split: {tuned['grid']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "tune", "show", "sizes"))
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--only", help="only rows whose name contains this")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--minutes", type=float, default=9.0, help="end cleanly after this time")
    parser.add_argument("--work", type=Path, default=Path("runs/feddm"), help="where unfinished runs are kept")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    options.left = lambda: (end - time.monotonic()) / 60
    if options.what in ("show", "sizes"):
        return show() if options.what == "show" else sizes(options)
    for table in options.tables:
        if table not in TABLES:
            parser.error(f"there is no table {table}: choose from {', '.join(TABLES)}")
    chosen = [row for row in rows() if row.table in options.tables and (options.only or "") in row.name]
    try:
        for row in chosen:
            if options.what == "tune" and row.method == "fedavg":
                tune(row, options)
            for seed in range(options.seeds if options.what == "run" else 0):
                run(row, seed, options)
    except runner.Interrupted as stopped:
        raise SystemExit(f"{stopped.kept}; give the same command again to go on") from None


if __name__ == "__main__":
    main()
