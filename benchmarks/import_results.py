"""Brings results of the table scripts in this folder into docs/results, where `fedgist reproduce` keeps its own.

    python benchmarks/import_results.py && fedgist reproduce --page docs/reproduction.md

A result belongs to every cell of a preset whose run has the very same configuration; results that no cell asks for are
named at the end.
"""

import argparse
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import codream_tables
import feddm_tables
import fedgen_tables
import repshare_cells
import repshare_studies
import repshare_table1
import tofu_tables

from fedgist.core.config import options
from fedgist.experiments import config as configs
from fedgist.experiments import presets, reproduction
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.reproduction import Found

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parents[1] / "docs" / "results"
GPU = {"device": "NVIDIA H200", "cores": 16, "libraries": {"torch": "2.11.0+cu130"}}
CPU = {"device": "cpu", "cores": 2, "libraries": {"torch": "2.13.0+cpu"}}
IGNORED = (*presets.HOW, "eval_every", "tf32")


@dataclasses.dataclass(frozen=True)
class Old:
    """One cell of an old file: seeds, each with its rows, and what it cost."""

    name: str
    config: RunConfig
    rows: dict[str, list[dict[str, Any]]]
    results: list[dict[str, Any]]
    command: str
    machine: dict[str, Any]


def key(config: RunConfig) -> str:
    usual = {name: options(RunConfig)[name].default for name in IGNORED if name in options(RunConfig)}
    return configs.dump(dataclasses.replace(config, **usual))


def read(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.is_file() else {}


@cache
def commit(file: str) -> str | None:
    """The commit that brought the result file as it is."""
    names = {"tofu": "tofu_tables.json", "tuned": "feddm_tables.json"}
    path = RESULTS / names.get(file, file)
    path = path if path.is_file() else RESULTS / "tofu_small.json"
    said = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", path.name], cwd=RESULTS, capture_output=True, text=True
    )
    return said.stdout.strip() or None


def repshare() -> Iterator[Old]:
    cells = {
        f"{dataset}, N={clients}, {row}": repshare_cells.cell(dataset, clients, row)
        for dataset in repshare_cells.TASKS
        for row in repshare_cells.ROWS
        for clients in (repshare_table1.CLIENTS if row != "CL" else (10,))
    }
    cells |= {
        f"{study}: {name}": layer for study, make in repshare_studies.STUDIES.items() for name, layer in make().items()
    }
    files = {
        "repshare_table1_mnist.json": "repshare_table1.py --seeds 5 --together 5 --engine stacked --device cuda",
        "repshare_table1_fashion.json": "repshare_table1.py --dataset fashion-mnist --engine stacked --device cuda",
        "repshare_table1_cifar10.json": "repshare_table1.py --dataset cifar10 --engine stacked --device cuda",
        "repshare_studies.json": "repshare_studies.py STUDY --engine stacked --device cuda",
    }
    for file, command in files.items():
        for name, seeds in read(file).items():
            config = resolve(cells[name])
            rows = {str(r["seed"]): [{"round": config.rounds, **r}] for r in seeds}
            yield Old(f"{file}: {name}", config, rows, seeds, f"python benchmarks/{command}", GPU)


def fedgen() -> Iterator[Old]:
    where = argparse.Namespace(rounds=200, data_dir=None, dataset=None, device="cpu")
    kept = read("fedgen_tables.json")
    for cell in fedgen_tables.cells():
        found = kept.get(fedgen_tables.key(cell))
        if found is None:
            continue
        config = resolve(fedgen_tables.layer(cell, where))
        rows: dict[str, list[dict[str, Any]]] = {}
        for seed in range(found["seeds"]):
            columns = {
                metric: best_then_last(v["best5"][seed], v["last"][seed]) for metric, v in found["metrics"].items()
            }
            rows[str(seed)] = [
                {"round": i, **dict(zip(columns, values, strict=True))}
                for i, values in enumerate(zip(*columns.values(), strict=True))
            ]
        sizes = {way: found[way] for way in ("bytes_up", "bytes_down")}
        results = [{**sizes, "seconds": found["seconds"] / found["seeds"], "rounds": found["rounds"]}] * found["seeds"]
        command = "python benchmarks/fedgen_tables.py run --engine stacked --device cuda --data-dir DIR"
        yield Old(f"fedgen_tables.json: {fedgen_tables.key(cell)}", config, rows, results, command, GPU)


def best_then_last(best: list[float], last: float) -> list[float]:
    """The five best evaluations and the last one, the last at the end and not twice."""
    others = list(best)
    if last in others:
        others.remove(last)
    else:
        others = others[-5:]
    return [*([min(best)] * (5 - len(others))), *others, last]


def codream() -> Iterator[Old]:
    kept = read("codream_tables.json")
    where = argparse.Namespace(exchanges=None, batches=None, data_dir=None, device="cpu")
    for cell in codream_tables.cells():
        found = kept.get(f"{cell[0]}: {cell[1]}")
        if found is not None:
            config = resolve(codream_tables.layer(cell[2], where))
            rows = {str(seed): curve for seed, curve in enumerate(found["curves"])}
            seconds = found["seconds"] / found["seeds"]
            results = [{**{w: found[w] for w in ("bytes_up", "bytes_down")}, "seconds": seconds}] * found["seeds"]
            gpu = str(found["device"]).startswith("cuda")
            command = (
                f"python benchmarks/codream_tables.py run {cell[0]} --device {'cuda' if gpu else 'cpu'} --data-dir DIR"
            )
            yield Old(f"codream_tables.json: {cell[0]}: {cell[1]}", config, rows, results, command, GPU if gpu else CPU)


def feddm() -> Iterator[Old]:
    kept = read("feddm_tables.json").get("runs", {})
    where = argparse.Namespace(data_dir=None, device="cpu", set=[])
    for row in feddm_tables.rows():
        label = feddm_tables.label(row, where)
        seeds = {
            name.rsplit("seed=", 1)[1]: found for name, found in kept.items() if name.rsplit(" seed=", 1)[0] == label
        }
        if not seeds:
            continue
        first = next(iter(seeds.values()))
        own = {
            k: v
            for k, v in first["settings"].items()
            if k in options(type(feddm_tables.configure(row, 0, where).options))
        }
        config = resolve({**configs.flat(feddm_tables.configure(row, 0, where)), **own})
        rows = {
            seed: [{"round": i, "accuracy": a / 100} for i, a in enumerate(found["accuracies"], start=1)]
            for seed, found in seeds.items()
        }
        sizes = [{k: found[k] for k in ("bytes_up", "bytes_down", "seconds")} for found in seeds.values()]
        extra = {"rounds": config.rounds, "paper_up": 4 * config.rounds * first["paper_numbers_up_a_round"]}
        command, machine = first["command"], first["environment"]
        yield Old(f"feddm_tables.json: {label}", config, rows, [{**s, **extra} for s in sizes], command, machine)


def tuned() -> Iterator[Old]:
    """FedAvg's grid, on the same held-out tenth."""
    kept = read("feddm_tables.json").get("tuned", {})
    where = argparse.Namespace(data_dir=None, device="cpu", set=[])
    for row in feddm_tables.rows():
        grid = kept.get(feddm_tables.ground(row.settings), {}).get("grid", {}) if row.method == "fedavg" else {}
        for cell in feddm_tables.GRID:
            if (value := grid.get(feddm_tables.name_of(cell))) is not None:
                config = resolve({**configs.flat(feddm_tables.configure(row, 0, where, **cell)), "validation": 0.1})
                rows = {"0": [{"round": config.rounds, "accuracy": value / 100}]}
                sizes = [{"bytes_up": 0, "bytes_down": 0, "seconds": 0.0}]  # not kept
                command = f"python benchmarks/feddm_tables.py tune {row.table} --device cuda --data-dir DIR"
                yield Old(f"tuned: {feddm_tables.ground(row.settings)} {cell}", config, rows, sizes, command, GPU)


def tofu() -> Iterator[Old]:
    kept = read("tofu_tables.json") | read("tofu_small.json")
    where = argparse.Namespace(rounds=None, device="cpu", engine="auto", data_dir=None)
    for row in tofu_tables.rows():
        found = kept.get(row.key)
        if found is None or row.validation:
            continue
        config = tofu_tables.configuration(row, where)
        if row.full:
            after = {"rounds": config.rounds + row.full, "switch2": config.rounds}
            config = resolve({**configs.flat(config), **after})
        curve = [*found["accuracy"], *found["full"]]
        numbers = [found.get("message", found["parameters"])] * len(found["accuracy"])
        numbers += [found["parameters"]] * len(found["full"])
        rows = [
            {"round": i, "accuracy": a, "bytes_up": 4 * config.clients * sum(numbers[:i])}
            for i, a in enumerate(curve, start=1)
        ]
        result = {**{k: found[k] for k in ("bytes_up", "bytes_down", "seconds")}, "rounds": config.rounds}
        gpu = str(found["device"]).startswith("cuda")
        command = f"python benchmarks/tofu_tables.py run {row.table} --device {'cuda' if gpu else 'cpu'} --data-dir DIR"
        seed = str(row.settings.get("seed", 0))
        yield Old(f"tofu: {row.key}", config, {seed: rows}, [result], command, GPU if gpu else CPU)


def main() -> None:
    everything = [old for source in (repshare, fedgen, codream, feddm, tuned, tofu) for old in source()]
    by_key: dict[str, list[Old]] = {}
    for old in everything:
        by_key.setdefault(key(old.config), []).append(old)
    used: set[str] = set()
    for preset in presets.available().values():
        cells = {cell.name: cell for cell in preset.cells}
        results = {}
        for cell in preset.cells:
            olds = by_key.get(key(cell.config), [])
            rival = by_key.get(key(cells[cell.against].config)) if cell.against else None
            if not olds or (cell.against and not rival):
                continue
            numbers, kept = {}, []
            for old in olds:
                for (seed, rows), result in zip(old.rows.items(), old.results, strict=True):
                    others = next(iter(rival[0].rows.values())) if rival else None
                    if seed not in numbers:
                        numbers[seed] = reproduction.taken(cell, rows, result, others)
                        kept.append(result)
            sizes = {size: sum(r[size] for r in kept) / len(kept) for size in reproduction.SIZES}
            first = olds[0]
            made = {"command": first.command, "version": "0.1.0.dev0", "commit": commit(first.name.split(":")[0])}
            about = {**made, "machine": first.machine}
            results[cell.name] = Found(cell.run, numbers, about=about, **sizes)
            used |= {old.name for old in olds}
        if results:
            print(reproduction.save(preset, results, OUT), len(results))
    for old in everything:
        if old.name not in used:
            print("no cell asks for", old.name)


if __name__ == "__main__":
    main()
