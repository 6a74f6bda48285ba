"""The figures and tables of Co-Dream: several seeds driven together, results kept as they come.

    python benchmarks/codream_tables.py run --data-dir DIR --device cuda                     # everything
    python benchmarks/codream_tables.py run figure3 table2 --data-dir DIR --device cuda      # a part of it
    python benchmarks/codream_tables.py run variants mixed --seeds 1                         # small ones, on a CPU
    python benchmarks/codream_tables.py show                                                 # as markdown

A cell that is in the result file is not run again, so a stopped run goes on where it was; --exchanges and --batches
scale a cell down, and then it is kept under another name. On MNIST everything is as in the paper, where the paper says
it: 128 samples in all, 2,000 exchanges of 256 dreams, 50 batches in Figure 4. Where it does not say: 10 batches in
Figures 2 and 3 and Table 2, 4 clients in Figure 4 and Table 2, LeNet5 with BatchNorm, 50 epochs of warm-up. On CIFAR-10
cells are scaled: fewer batches and exchanges, ResNet9 in Figure 4 and Table 2. `variants` is accuracy against bytes on
5,000 digits; `mixed` is a federation of three architectures, each client beside its independent self.
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedgist import engines, methods
from fedgist.core.ledger import Ledger
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.engines.scheduler import Executor
from fedgist.experiments.config import RunConfig, method_options, profile_of, resolve
from fedgist.experiments.inputs import from_dataset

RESULTS = Path(__file__).parent / "results" / "codream_tables.json"

TEACHERS: dict[str, Any] = {"method": "codream", "partition": "stratified", "learners": "server", "fresh_student": True}
TEACHERS |= {"batch": 32, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "clip": 5.0, "distil_steps": 1000}
TEACHERS |= {"dreams": 256, "exchanges": 2000, "rounds": 10, "distil_every": 10, "buffer": 12800}
"""Clients that stay as their warm-up left them, and a student that starts from scratch: Figures 2 to 4 and Table 2."""
MNIST = TEACHERS | {"dataset": "mnist", "model": "lenet5:norm=batch", "limit": 128, "clients": 4, "warm_up": 50}
CIFAR = TEACHERS | {"dataset": "cifar10", "model": "resnet9", "limit": 24000, "clients": 4, "warm_up": 20, "batch": 256}
OPTIMISERS = (
    ("distadam", 1),
    ("fedavg", 5),
    ("distadam", 5),
    ("fedadam", 5),
)
PAPER_TABLE2 = {"mnist": (76.3, 18.26, 79.78, 78.31), "cifar10": (64.4, 59.19, 59.49, 64.39)}
PAPER_TABLE1 = {
    "centralized": (54.3, 66.27, 81.0),
    "independent": (45.8, 54.3, 69.4),
    "fedavg": (53.8, 64.4, 79.6),
    "codream": (57.1, 68.9, 77.5),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "together, 32 bits": {},
    "together, 16 bits": {"bits": 16},
    "together, 8 bits": {"bits": 8},
    "fedadam, 4 exchanges of 5 steps": {"dream_optimiser": "fedadam", "exchanges": 4},
    "fedadam, 4 exchanges of 5 steps, server rate 0.25": {"dream_optimiser": "fedadam", "exchanges": 4}
    | {"server_lr": 0.25},
    "fedavg, 4 exchanges of 5 steps": {"dream_optimiser": "fedavg", "exchanges": 4},
    "class-conditional": {"conditional": True},
    "robust": {"robust": 0.1},
    "adaptive": {"adaptive": 1.0},
    "DeepInversion's total variation": {"tv_form": "norms"},
    "activations before the BatchNorm": {"layer": "norm1", "common_start": True},
    "penultimate activations": {"layer": "classifier", "common_start": True},
    "generator, 4 exchanges of 5 steps": {"generator": True, "noise": 64, "width": 16, "exchanges": 4}
    | {"dream_optimiser": "fedavg", "dream_lr": 0.01},
    "offloaded to the server": {"offload": True},
    "each alone": {"collaborate": False},
}

Cell = tuple[str, str, dict[str, Any], float | None]
"""(experiment, name of the cell, its settings, the paper's accuracy in percent where it prints one)."""


def cells() -> Iterator[Cell]:
    for samples in (128, 512, 2048, 8192, 60000):
        yield "figure2", f"{samples} samples", MNIST | {"clients": 1, "limit": samples}, None
    for clients in (1, 2, 4, 6, 8, 12, 24):
        for together in (True, False):
            changes = {"clients": clients, "collaborate": together}
            yield "figure3", f"{clients} clients, {'together' if together else 'alone'}", MNIST | changes, None
    for together in (True, False):
        name, changes = "together" if together else "alone", {"collaborate": together, "distil_every": 5}
        yield "figure4", name, MNIST | changes | {"rounds": 50}, None
        yield "figure4-cifar10-scaled", name, CIFAR | changes | {"rounds": 20, "exchanges": 500}, None
    for row, (optimiser, fewer) in enumerate(OPTIMISERS):
        name, changes = f"{optimiser}, {2000 // fewer} exchanges", {"dream_optimiser": optimiser, "local_steps": fewer}
        changes["exchanges"] = 2000 // fewer
        yield "table2", name, MNIST | changes, PAPER_TABLE2["mnist"][row]
        yield "table2-cifar10-scaled", name, CIFAR | changes, PAPER_TABLE2["cifar10"][row]
    for column, samples in enumerate((1000, 2000, 3000)):
        for method in PAPER_TABLE1:
            changes = profile_of("codream", "paper") | {"method": method, "limit": 2 * samples, "rounds": 20}
            changes |= {"exchanges": 500, "distil_every": 1, "distil_steps": 200}
            yield "table1-cifar10-scaled", f"{method}, {samples} a client", changes, PAPER_TABLE1[method][column]
    small = profile_of("codream", "small") | {"method": "codream", "exchanges": 20, "rounds": 2, "bits": 32}
    for name, changes in VARIANTS.items():
        yield "variants", name, small | changes, None
    mixed = {"architectures": "lenet5:norm=batch,mlp:norm=batch,resnet9:width=8", "clients": 6, "alpha": 0.5}
    yield "mixed", "codream", small | mixed | {"rounds": 5, "dreams": 128, "clip": 5.0}, None
    # as many steps: 20 epochs of warm-up are about 22 rounds of 20 steps, and 5 rounds follow
    yield "mixed", "independent", mixed | {"method": "independent", "dataset": "mnist5k", "rounds": 27} | {
        "steps": 20, "lr": 0.1, "momentum": 0.9, "clip": 5.0,
    }, None  # fmt: skip


def layer(settings: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the cell's method knows, scaled down where that is asked for."""
    own = method_options(settings["method"])
    known = {k: v for k, v in settings.items() if k in own or k in RunConfig.__dataclass_fields__}
    if options.exchanges and "exchanges" in known:
        known["exchanges"] = min(known["exchanges"], options.exchanges)
    if options.batches and "distil_every" in known:
        known["rounds"] = min(known["rounds"], options.batches)
        known["distil_every"] = min(known["distil_every"], options.batches)
    return known | {"data_dir": options.data_dir, "device": options.device}


def key(cell: Cell, options: argparse.Namespace) -> str:
    scaled = {"exchanges": options.exchanges, "batches": options.batches}
    return " ".join([f"{cell[0]}: {cell[1]}", *(f"({name}<={n})" for name, n in scaled.items() if n)])


def federation(settings: dict[str, Any], seed: int, executor: Executor) -> tuple[LocalEngine, Any]:
    """One seed of a cell, and its test set."""
    config = resolve(settings, {"seed": seed})
    inputs = from_dataset(config)
    method = methods.find(config.method)(config.options, inputs.task)
    engine = LocalEngine(method, inputs.sites, seed=seed, executor=executor, ledger=Ledger(), info=inputs.info)
    return engine, executor.place.put(inputs.test)


def each_client(engine: LocalEngine, test: Any) -> list[float]:
    """The accuracy of every model that a client holds."""
    found = []
    for id, state in sorted(engine.site_states.items()):
        model = engine.method.task.models[engine.info[id]["model"]]
        with torch.no_grad():
            said = torch.cat([model(state["w"], part).logits.argmax(1) for part in test[0].split(1000)])
        found.append(round(float((said == test[1]).float().mean()), 4))
    return found


def run(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """One cell, its seeds round by round together."""
    experiment, _, settings, _ = cell
    settings = layer(settings, options)
    executor = engines.executor(options.engine, options.device, tf32=options.tf32)
    runs = [federation(settings, seed, executor) for seed in range(options.seeds)]
    rounds, often = settings["rounds"], settings.get("distil_every", 1)
    rows: list[list[dict[str, float]]] = [[] for _ in runs]
    seconds = 0.0
    for done in range(1, rounds + 1):
        start = time.perf_counter()
        run_rounds([engine for engine, _ in runs])
        if executor.place.device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - start
        if done % often == 0 or done == rounds:
            for (engine, test), kept in zip(runs, rows, strict=True):
                kept.append({"round": done, **engine.evaluate(test)})
    totals = runs[0][0].ledger.totals()
    found = {
        "settings": settings,
        "seeds": options.seeds,
        "curves": rows,
        "last": [kept[-1]["accuracy"] for kept in rows],
        "max": [max(row["accuracy"] for row in kept) for kept in rows],
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "seconds": round(seconds, 1),
        "engine": executor.name,
        "tf32": options.tf32,
        "device": str(executor.place.device),
    }
    if experiment == "mixed":
        found["each_client"] = [each_client(engine, test) for engine, test in runs]
    return found


def percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.1f}±{100 * statistics.pstdev(values):.1f}"


def show(results: dict[str, Any]) -> None:
    """Every experiment as markdown; the mean and deviation over seeds, in percent; bytes and seconds of one seed."""
    printed = {f"{cell[0]}: {cell[1]}": cell[3] for cell in cells()}
    for experiment in dict.fromkeys(name.split(":")[0] for name in results):
        print(f"\n### {experiment}\n\n| cell | paper | student, last | best | clients | MB up | MB down | seconds |")
        print("|---|---|---|---|---|---|---|---|")
        for name, found in results.items():
            if name.split(":")[0] != experiment:
                continue
            paper = printed.get(name.split(" (")[0])
            clients = [kept[-1].get("accuracy_clients") for kept in found["curves"]]
            columns = [name.split(": ", 1)[1], "" if paper is None else f"{paper:g}"]
            columns += [percent(found["last"]), percent(found["max"])]
            columns += ["" if None in clients else percent(clients)]
            columns += [f"{found[way] / 1e6:,.1f}" for way in ("bytes_up", "bytes_down")]
            print("| " + " | ".join([*columns, f"{found['seconds'] / found['seeds']:.0f}"]) + " |")
        if experiment == "mixed":
            for name, found in results.items():
                if name.startswith("mixed: "):
                    print(f"\n{name.removeprefix('mixed: ')}, each client: {found['each_client']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "show", "list"))
    parser.add_argument("experiments", nargs="*", help="which experiments; all without any")
    parser.add_argument("--only", help="only cells whose name contains this")
    parser.add_argument("--data-dir", help="folder with mnist/ and cifar10/; without it, FEDGIST_DATA")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engine", default="measured")
    parser.add_argument("--tf32", action="store_true", help="round the inputs of products to 10 bits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--exchanges", type=int, help="at most so many exchanges a batch")
    parser.add_argument("--batches", type=int, help="at most so many batches of dreams")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    logging.getLogger("fedgist").setLevel(logging.ERROR)  # that dreaming costs more than FedAvg is known here
    known = dict.fromkeys(cell[0] for cell in cells())
    if unknown := set(options.experiments) - known.keys():
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    results = json.loads(options.out.read_text()) if options.out.is_file() else {}
    if options.action == "show":
        show(results)
        return
    for cell in cells():
        name = key(cell, options)
        if (options.experiments and cell[0] not in options.experiments) or (options.only or "") not in cell[1]:
            continue
        if options.action == "list" or name in results:
            print(name, "done" if name in results else "")
            continue
        results[name] = run(cell, options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draft = options.out.with_suffix(".partial")
        draft.write_text(json.dumps(results, indent=1) + "\n")
        draft.replace(options.out)
        print(name, percent(results[name]["last"]), f"{results[name]['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
