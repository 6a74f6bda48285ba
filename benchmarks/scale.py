"""What a run with many clients costs: memory, seconds a round, a checkpoint; a hundred are asked in a round, or all.

    python benchmarks/scale.py --clients 10 100 1000 10000 100000 --out benchmarks/results/scale.json

Every size runs in a process of its own, so that its peak of resident memory is its own; what Python, torch and the data
take before there are any clients is subtracted. Times are the process's own, the least of a few turns. Clients hold
eight samples of 64 numbers each, cut out of one array, and train an MLP of 200 and 200 hidden units (55,210 numbers,
221 kB) for one step: what is measured is what they cost beside data and training. `python docs/make_scale.py` draws it.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedgist import methods, models, storage
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.options import build

SAMPLES, SHAPE, CLASSES = 8, (64,), 10


def peak() -> float:
    """The largest resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def written(folder: Path) -> int:
    """Bytes of states on the disk."""
    return sum(path.stat().st_size for path in folder.glob("states-*.log"))


def measure(name: str, clients: int, active: int, rounds: int, engine: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    rng, method = Rng(0), methods.find(name)
    x, y = rng("x").normal(clients * SAMPLES, *SHAPE), rng("y").integers(CLASSES, clients * SAMPLES)
    net = models.build("mlp", SHAPE, CLASSES, hidden=(200, 200))
    task = Task(SHAPE, CLASSES, (0.0,), (1.0,), {"mlp": net}, "mlp")
    config = build(
        method.Config, {"steps": 1, "batch": SAMPLES, "lr": 0.05, "active": active if active < clients else 0}
    )
    before, began = peak(), time.process_time()
    parts = zip(x.split(SAMPLES), y.split(SAMPLES), strict=True)
    sites = {f"{i:06d}": ClientData(own, labels, CLASSES) for i, (own, labels) in enumerate(parts)}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.csv", name)
        federation = LocalEngine(method(config, task), sites, seed=0, executor=executor(engine), ledger=ledger)
        federation.site_states.keep_in(Path(folder))
        set_up = time.process_time() - began
        for _ in range(8):  # what comes again and again is traced by then
            federation.run_round()
        times, saves, sizes = [], [], []
        for _ in range(rounds):
            began = time.process_time()
            federation.run_round()
            times.append(time.process_time() - began)
            began, before_it = time.process_time(), written(Path(folder))
            storage.save(federation.snapshot(), Path(folder) / "checkpoint.safetensors")
            saves.append(time.process_time() - began)
            sizes.append(written(Path(folder)) - before_it + (Path(folder) / "checkpoint.safetensors").stat().st_size)
        most, on_disk = peak(), written(Path(folder)) / 1e6
        ledger.close()
        federation.site_states.close()
    return {
        "method": name,
        "clients": clients,
        "active": min(active, clients),
        "set_up_s": round(set_up, 3),
        "round_ms": round(1e3 * min(times), 1),
        "ms_a_client": round(1e3 * min(times) / min(active, clients), 3),
        "memory_mb": round(most - before, 1),
        "asked": len(federation.site_states),
        "checkpoint_mb": round(sizes[-1] / 1e6, 3),
        "states_on_disk_mb": round(on_disk, 1),
        "checkpoint_ms": round(1e3 * min(saves), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10_000, 100_000])
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "scaffold"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="stacked")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one:
        name, clients, active = options.one.split(",")
        print(json.dumps(measure(name, int(clients), int(active), options.rounds, options.engine)))
        return
    sizes = [(clients, options.active) for clients in options.clients] + [(1000, 1000)]
    found = []
    for name in options.methods:
        for clients, active in sizes:
            command = [sys.executable, __file__, "--one", f"{name},{clients},{active}", "--rounds", str(options.rounds)]
            done = subprocess.run([*command, "--engine", options.engine], check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout))
            print(found[-1], flush=True)
    if options.out:
        about = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__}
        options.out.write_text(json.dumps({**about, "results": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
