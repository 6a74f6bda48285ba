"""Runs named cells of a table, several seeds together, and keeps every result in a JSON file, so as to go on later.

A cell is a name and a flat configuration, as `fedgist run --set` takes it. Models are evaluated once, at the end.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist import engines, methods
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.engines.local import LocalEngine, run_rounds
from fedgist.engines.scheduler import Executor
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.learning.evaluation import Classifier

THESIS = {"optimiser": "adam", "lr": 0.001, "batch": 32, "epochs": 1, "partition": "stratified", "normalise": "train"}
"""What all of the thesis's runs have in common; `limit` keeps the first samples in file order, as its code does."""

ROWS: dict[str, dict[str, Any]] = {
    "CL": {"method": "centralized"},
    "FL": {"method": "fedavg", "keep_momentum": True, "common_start": False},
    "FL, common start": {"method": "fedavg", "keep_momentum": True},
    "IL": {"method": "independent"},
    "FD": {"method": "feddistill", "form": "mse", "pull": 10},
    "ours": {"method": "repshare", "exclude_self": False},
}
"""The frameworks of Table 1; FL as published averages nets that began at different weights."""

TASKS: dict[str, dict[str, Any]] = {
    "mnist": {"limit": 1200, "rounds": 100, "model": "lenet5-thesis"},
    "fashion-mnist": {"limit": 6000, "rounds": 20, "model": "resnet9"},
    "cifar10": {"limit": 10000, "rounds": 20, "model": "resnet18-thesis"},
}


def cell(dataset: str, clients: int, row: str, **changes: Any) -> dict[str, Any]:
    """The configuration of one cell of Table 1; the published code used 100 features in its smaller MNIST cells."""
    task = dict(TASKS[dataset])
    if dataset == "mnist" and clients != 10:
        task["model"] = "lenet5-thesis:feature_size=100"
    return {**THESIS, **task, "dataset": dataset, "clients": clients, **ROWS[row], **changes}


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, default=5, help="how many, from 0")
    made.add_argument("--together", type=int, default=1, help="seeds driven together, which the stacked engine stacks")
    made.add_argument("--engine", default="measured")
    made.add_argument("--tf32", action="store_true", help="round the inputs of products to 10 bits")
    made.add_argument("--device", default="cpu")
    made.add_argument("--data-dir", default=None, help="folder with data files; else the one that FEDGIST_DATA names")
    made.add_argument("--out", type=Path, required=True, help="JSON file of results; those in it are not run again")
    return made


def run_cells(cells: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All results of the cells, cell by cell; what the file lacks is run and written at once."""
    results: dict[str, list[dict[str, Any]]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    executor = engines.executor(options.engine, options.device, tf32=options.tf32)
    for name, layer in cells.items():
        done = {result["seed"] for result in results.get(name, [])}
        seeds = [seed for seed in range(options.seeds) if seed not in done]
        for first in range(0, len(seeds), options.together):
            places = {"engine": options.engine, "device": options.device, "data_dir": options.data_dir}
            new = _run({**layer, **places}, seeds[first : first + options.together], executor)
            results.setdefault(name, []).extend(new)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1))
            for result in new:
                print(
                    f"{name}, seed {result['seed']}: {result['accuracy']:.4f} in {result['seconds']:.1f} s", flush=True
                )
    return results


def _run(layer: Mapping[str, Any], seeds: Sequence[int], executor: Executor) -> list[dict[str, Any]]:
    configs = [resolve({**layer, "seed": seed}) for seed in seeds]
    start = time.perf_counter()
    federations, tests = zip(*(_federation(config, executor) for config in configs), strict=True)
    for _ in range(configs[0].rounds):
        run_rounds(federations)
    results = []
    for config, federation, test in zip(configs, federations, tests, strict=True):
        totals = federation.ledger.totals()
        results.append({"seed": config.seed, **_evaluate(config, federation, test), **vars(totals)})
    seconds = (time.perf_counter() - start) / len(seeds)
    return [{**result, "seconds": round(seconds, 2)} for result in results]


def _evaluate(config: RunConfig, federation: LocalEngine, test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The method's metrics; where clients have different models, also the accuracy of each."""
    federation.outage = lambda *_: False  # clients that were away come back to be judged
    metrics: dict[str, Any] = federation.evaluate(test)
    if config.architectures:
        metrics["clients"] = {id: _own_accuracy(federation, id) for id in federation.ids}
    return metrics


@torch.no_grad()
def _own_accuracy(federation: LocalEngine, id: str) -> float:
    x, y = federation.data[id].test
    correct = Classifier(federation.method.task.models[federation.info[id]["model"]]).correct
    return correct(federation.site_states[id]["w"], x, y).item() / len(y)


def _federation(config: RunConfig, executor: Executor) -> tuple[LocalEngine, Any]:
    inputs = from_dataset(config)
    method = methods.find(config.method)(config.options, inputs.task)
    graph = None
    if config.topology is not None:
        graph = topologies.build(config.topology, sorted(inputs.sites), Rng(config.seed))
    settings: dict[str, Any] = {"offline": config.offline, "delay": config.delay, "topology": graph}
    engine = LocalEngine(method, inputs.sites, seed=config.seed, executor=executor, info=inputs.info, **settings)
    return engine, inputs.test


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Mean ± standard deviation in per cent."""
    accuracies = [100 * result["accuracy"] for result in results]
    deviation = f" ± {statistics.stdev(accuracies):.2f}" if len(accuracies) > 1 else ""
    return f"{statistics.fmean(accuracies):.2f}{deviation}"
