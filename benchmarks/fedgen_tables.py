"""The tables of FedGen (Zhu et al. 2021) on MNIST: several seeds driven together, results kept as they come.

    python benchmarks/fedgen_tables.py run --data-dir DIR --engine stacked --device cuda   # everything, 110 cells
    python benchmarks/fedgen_tables.py run table1 --alphas 0.1 --seeds 1 --eval-every 5    # a part of it, on a CPU
    python benchmarks/fedgen_tables.py time                                                # Table 3
    python benchmarks/fedgen_tables.py show                                                # markdown, paper beside ours

A cell that is in the result file is not run again, so a stopped run goes on where it was. Seeds share the split, as in
the paper. 2,000 training images are set apart for FedDF in all cells; `ratio` makes up for them, so that the clients
hold 15,000 as in the released code. FedEnsemble's run is FedAvg's, judged twice, so the two are one cell. Sweeps leave
out the settings of Table 1 (noise 32 and hidden 256, B_G = 32, 10 active users, 20 local steps), which are there.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedgist import engines, methods
from fedgist.core.ledger import Ledger
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.engines.scheduler import Executor
from fedgist.experiments.config import RunConfig, method_options, profile_of, resolve
from fedgist.experiments.inputs import from_dataset

RESULTS = Path(__file__).parent / "results" / "fedgen_tables.json"
BASE = profile_of("fedgen", "paper") | {"proxy": "2000", "ratio": 0.51725}
METHODS: dict[str, dict[str, Any]] = {
    "fedensemble": {},
    "fedprox": {"mu": 1.0, "weight_decay": 0.001},
    "feddistill": {"memory": "run", "common_start": True},
    "feddistill+": {"memory": "run"},
    "feddf": {},
    "fedgen": {},
}
PAPER = {  # Table 1 and Table 4, MNIST: FedAvg, FedProx, FedEnsemble, FedDistill, FedDistill+, FedDFusion, FedGen
    ("table1", 0.05): "87.70±2.07 87.49±2.05 88.85±0.68 70.56±1.24 86.70±2.27 90.02±0.96 91.30±0.74",
    ("table1", 0.1): "90.16±0.59 90.10±0.39 90.78±0.39 64.11±1.36 90.28±0.89 91.11±0.43 93.03±0.32",
    ("table1", 1.0): "93.84±0.25 93.83±0.29 93.91±0.28 79.88±0.66 94.73±0.15 93.37±0.40 95.52±0.07",
    ("table4", 0.05): "59.67±0.76 - - - 58.83±0.62 59.62±0.84 63.60±0.63",
    ("table4", 0.1): "58.39±0.74 - - - 56.25±0.98 58.38±0.81 65.42±0.29",
    ("table4", 1.0): "74.49±0.57 - - - 74.24±0.60 74.51±0.55 79.72±0.52",
    ("table4", 10.0): "86.35±0.60 - - - 86.89±0.26 86.28±0.69 87.92±0.46",
}
COLUMNS = ("fedavg", "fedprox", "fedensemble", "feddistill", "feddistill+", "feddf", "fedgen")
Cell = tuple[str, str, dict[str, Any]]
"""The table, the method, and what the cell changes."""


def cells() -> Iterator[Cell]:
    """All cells, the most important first."""
    for alpha in (0.1, 0.05, 1.0):
        for name in METHODS:
            yield "table1", name, {"alpha": alpha}
        yield "table1", "fedgen", {"alpha": alpha, "loss": "paper"}
        yield "table1", "fedgen", {"alpha": alpha, "label_weights": "uniform"}
    for alpha in (0.05, 0.1, 1.0, 10.0):
        for name in ("fedavg", "feddistill+", "feddf", "fedgen"):
            yield "table4", name, {"alpha": alpha, "share": "head"}
    for alpha in (0.05, 0.1, 1.0):
        for name in METHODS:
            yield "fashion", name, {"alpha": alpha, "dataset": "fashion-mnist"}
    for noise, hidden in ((64, 256), (32, 128), (16, 128), (32, 64)):
        yield "table2", "fedgen", {"alpha": 0.1, "noise_size": noise, "hidden": hidden}
    for generated in (8, 16, 64, 128):
        yield "figure7", "fedgen", {"alpha": 0.1, "generated": generated}
    for alpha in (0.05, 0.1, 1.0):
        for name in METHODS:
            yield "figure5d", name, {"alpha": alpha, "model": "mlp"}
    for active in (4, 16, 18):
        for name in METHODS:
            yield "figure5b", name, {"alpha": 0.1, "active": active}
    for name in METHODS:
        yield "steps", name, {"alpha": 1.0, "steps": 40}
    for distil_steps in (100, 0):  # without distillation each prototype is the FedAvg of its own clients
        yield "prototypes", "feddf", {"alpha": 0.1, "architectures": "cnn,mlp", "distil_steps": distil_steps}


def key(cell: Cell) -> str:
    table, name, changes = cell
    return " ".join([table, name, *(f"{option}={value}" for option, value in changes.items())])


def layer(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """All settings of a cell that its method knows."""
    _, name, changes = cell
    given = BASE | METHODS.get(name, {}) | {"rounds": options.rounds, "data_dir": options.data_dir}
    if options.dataset:
        given |= {"dataset": options.dataset}
    own = method_options(name)
    known = {k: v for k, v in (given | changes).items() if k in own or k in RunConfig.__dataclass_fields__}
    return known | {"method": name, "device": options.device}


def federation(cell: Cell, seed: int, executor: Executor, options: argparse.Namespace) -> tuple[LocalEngine, Any]:
    """One seed of a cell, and its test set."""
    config = resolve(layer(cell, options), {"seed": seed})
    inputs = from_dataset(config)
    method = methods.find(config.method)(config.options, inputs.task)
    engine = LocalEngine(method, inputs.sites, seed=seed, executor=executor, ledger=Ledger(), info=inputs.info)
    return engine, executor.place.put(inputs.test)


def run(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One cell, its seeds round by round together: the last and the five best evaluations of each metric and seed."""
    executor = engines.executor(options.engine, options.device)
    runs = [federation(cell, seed, executor, options) for seed in range(options.seeds)]
    rows: list[list[dict[str, float]]] = [[] for _ in runs]
    seconds = 0.0
    for done in range(1, options.rounds + 1):
        start = time.perf_counter()
        run_rounds([engine for engine, _ in runs])
        if executor.place.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if done % options.eval_every == 0 or done == options.rounds:
            for (engine, test), kept in zip(runs, rows, strict=True):
                kept.append(engine.evaluate(test))
    metrics = {
        metric: {
            "last": [kept[-1][metric] for kept in rows],
            "best5": [sorted(row[metric] for row in kept)[-5:] for kept in rows],
            "curve": [[round(row[metric], 4) for row in kept[:: -max(1, len(kept) // 20)]][::-1] for kept in rows],
        }
        for metric in rows[0][0]
    }
    about = {"rounds": options.rounds, "seeds": options.seeds, "eval_every": options.eval_every}
    where = {"engine": executor.name, "device": str(executor.place.device), "seconds": round(seconds, 2)}
    return {**about, **where, **asdict(runs[0][0].ledger.totals()), "metrics": metrics}


def local_update_ms(generated: int | None, options: argparse.Namespace, repeats: int = 50) -> list[float]:
    """Wall milliseconds of one user's round of 20 local steps (Table 3), one at a time; None is FedAvg."""
    name, changes = ("fedavg", {}) if generated is None else ("fedgen", {"generated": generated, "generator_steps": 0})
    executor = engines.executor("sequential", options.device)
    engine, _ = federation(("table3", name, {"alpha": 0.1, "active": 1, **changes}), 0, executor, options)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine.run_round()
        if executor.place.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return times[5:]


def summary(values: Sequence[Any]) -> str:
    """Mean ± deviation in percent; the five best of all seeds are pooled, as the released code does."""
    flat = [100 * v for value in values for v in (value if isinstance(value, list) else [value])]
    return f"{statistics.fmean(flat):.2f}±{statistics.pstdev(flat):.2f}"


def show(results: dict[str, Any]) -> None:
    """Every table as markdown: as published (best five), strict (best five), strict (last round), and seconds."""
    for table in dict.fromkeys(cell[0] for cell in cells() if key(cell) in results):
        print(f"\n### {table}\n\n| cell | paper | as published | strict, best five | strict, last | seconds |")
        print("|---|---|---|---|---|---|")
        for cell in cells():
            if cell[0] == table and key(cell) in results:
                for line in lines(cell, results[key(cell)]):
                    print("| " + " | ".join(line) + " |")
    if "table3" in results:
        print("\n### table3\n\n| B_G | milliseconds of 20 local steps |\n|---|---|")
        for name, (mean, deviation) in results["table3"].items():
            print(f"| {name} | {mean:.2f}±{deviation:.2f} |")


def lines(cell: Cell, found: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of one cell: its method, and what else a run judged (FedAvg beside FedEnsemble, each prototype)."""
    table, name, changes = cell
    metrics, setting = found["metrics"], ", ".join(f"{option} {value}" for option, value in changes.items())
    printed = PAPER.get((table, changes["alpha"]), "").split() if set(changes) <= {"alpha", "share"} else []
    for metric, values in metrics.items():
        if metric.endswith("_published"):
            continue
        judged = metric.removeprefix("accuracy").removeprefix("_") or name
        published = metrics.get(metric + "_published")
        yield [
            f"{judged}, {setting}",
            printed[COLUMNS.index(judged)] if printed else "",
            summary(published["best5"]) if published else "",
            summary(values["best5"]),
            summary(values["last"]),
            f"{found['seconds']:.0f}",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "show", "list", "time"))
    parser.add_argument("tables", nargs="*", help="which tables; all without any")
    parser.add_argument("--methods", nargs="*", help="which methods; all without any")
    parser.add_argument("--alphas", nargs="*", type=float, help="which concentrations; all without any")
    parser.add_argument("--data-dir", help="folder with mnist/ and fashion-mnist/; without it, FEDGIST_DATA")
    parser.add_argument("--dataset", help="another data set in the place of mnist")
    parser.add_argument("--engine", default="measured")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.action == "show":
        show(results)
        return
    if options.action == "time":
        times = {str(size or "FedAvg"): local_update_ms(size, options) for size in (None, 8, 16, 32, 64, 128)}
        results["table3"] = {name: (statistics.fmean(each), statistics.stdev(each)) for name, each in times.items()}
        write(options.out, results)
        return
    for cell in cells():
        wanted = (not options.tables or cell[0] in options.tables) and (
            not options.methods or cell[1] in options.methods
        )
        if wanted and (not options.alphas or cell[2]["alpha"] in options.alphas) and key(cell) not in results:
            print(key(cell), end="", flush=True)
            if options.action == "run":
                results[key(cell)] = found = run(cell, options)
                write(options.out, results)
                best = {metric: summary(values["best5"]) for metric, values in found["metrics"].items()}
                print(f"  {best}  {found['seconds']:.0f} s", end="")
            print(flush=True)


def write(path: Path, results: dict[str, Any]) -> None:
    """The result file appears whole or stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(results, indent=1))
    draft.replace(path)


if __name__ == "__main__":
    main()
