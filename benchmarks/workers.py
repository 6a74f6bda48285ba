"""What a round costs with workers on Ray, beside the same round in one process.

    python benchmarks/workers.py --workers 2 --out benchmarks/results/workers.json

FedAvg on random data of MNIST's shape, twenty steps of 32 samples for each client; `--device cuda` lets the workers
share one GPU. Seconds are of the clock, the median of a few rounds after the second: by then what is a client's own
lies where it stays. With one step of one sample, what is left is nearly all messages, and what spreading costs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedgist import engines, methods, models
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from fedgist.options import build

SHAPE, CLASSES, SAMPLES = (1, 28, 28), 10, 320


def seconds(executor: Any, model: str, clients: int, steps: int, batch: int, rounds: int) -> float:
    rng, method = Rng(0), methods.find("fedavg")
    net = models.build(model, SHAPE, CLASSES)
    task = Task(SHAPE, CLASSES, (0.0,), (1.0,), {model: net}, model)
    sites = {
        f"{i:04d}": ClientData(rng("x", i).normal(SAMPLES, *SHAPE), rng("y", i).integers(CLASSES, SAMPLES), CLASSES)
        for i in range(clients)
    }
    config = build(method.Config, {"steps": steps, "batch": batch, "lr": 0.05})
    engine = LocalEngine(method(config, task), sites, seed=0, executor=executor)
    times = []
    for _ in range(rounds + 2):
        began = time.perf_counter()
        engine.run_round()
        if executor.place.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", default=["mlp:stacked", "lenet5:threaded"], help="MODEL:ENGINE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for job in options.jobs:
        model, engine = job.split(":")
        began = time.perf_counter()
        spread = engines.executor(engine, options.device, workers=options.workers)
        start = time.perf_counter() - began
        here = engines.executor(engine, options.device)
        row: dict[str, Any] = {"model": model, "engine": engine, "workers": options.workers, "start_s": round(start, 2)}
        for words, steps, batch in (("20 steps", 20, 32), ("one step of one sample", 1, 1)):
            with engines.one_thread(engine, options.device):
                each = [seconds(one, model, options.clients, steps, batch, options.rounds) for one in (here, spread)]
            row[words] = {"one process, s": round(each[0], 4), "workers, s": round(each[1], 4)}
        found.append(row)
        print(row, flush=True)
        del spread
    if options.out:
        about = {"command": " ".join(["python", *sys.argv]), "clients": options.clients, "device": options.device}
        text = json.dumps({**about, "cores": os.cpu_count(), "results": found}, indent=1)
        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
