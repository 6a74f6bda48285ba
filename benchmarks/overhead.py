"""What a client costs the host in a round of FedAvg beside its training: the process's own time, and operations.

    python benchmarks/overhead.py --engine stacked
    PYTHONPATH=build/before/src python benchmarks/overhead.py --engine stacked   # another version of the code

A net of two hidden units on inputs of four numbers trains for one step, all clients in one stack, so that nearly all of
the time is what the host does for each of them: its request, its batch plan, its coroutine, its reply. Beside it stands
the number of torch operations of a client on the thread that drives the round: on a GPU each costs several
microseconds, unless it is on the host. `beside` is what the thread that drives the round spends outside of clients'
work, the sequential engine's doing of it included in the first figure only.
"""

import argparse
import collections
import json
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedgist import methods, models
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.engines import executor, scheduler
from fedgist.engines.local import LocalEngine
from fedgist.engines.stacked import executor as stacked
from fedgist.options import build

SHAPE, CLASSES, SAMPLES = (4,), 10, 32


class Work:
    """Stands before the doing of a client's work and knows how long this thread spent in it."""

    def __init__(self, do: Any) -> None:
        self.do, self.spent = do, 0.0

    def __call__(self, *given: Any) -> Any:
        began = time.thread_time()
        result = self.do(*given)
        self.spent += time.thread_time() - began
        return result


class Operations(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(op)] += 1
        return op(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="stacked", choices=("sequential", "stacked"))
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    stacked.LARGEST_STACK, stacked.WORTH_TRACING = options.clients, 1
    rng, net, method = Rng(0), models.build("mlp", SHAPE, CLASSES, hidden=2), methods.find("fedavg")
    sites = {
        f"{i:04d}": ClientData(rng("x", i).normal(SAMPLES, *SHAPE), rng("y", i).integers(CLASSES, SAMPLES), CLASSES)
        for i in range(options.clients)
    }
    config = build(method.Config, {"steps": 1, "batch": SAMPLES, "lr": 0.05, "momentum": 0.9})
    task = Task(SHAPE, CLASSES, (0.0,), (1.0,), {"mlp": net}, "mlp")
    runner: Any = executor(options.engine)
    runner.workers = 1
    engine = LocalEngine(method(config, task), sites, seed=0, executor=runner)
    for _ in range(5):
        engine.run_round()
    work = scheduler.execute = Work(scheduler.execute)
    times, beside = [], []
    for _ in range(options.rounds):
        began, thread, work.spent = time.process_time(), time.thread_time(), 0.0
        engine.run_round()
        times.append(time.process_time() - began)
        beside.append(time.thread_time() - thread - work.spent)
    with Operations() as operations:
        engine.run_round()
    line = {"engine": options.engine, "clients": options.clients, "ms_a_client": 1e3 * min(times) / options.clients}
    line["beside"] = 1e3 * min(beside) / options.clients
    counted = {name: round(n / options.clients, 2) for name, n in operations.found.most_common(8)}
    print(json.dumps(line | {"operations": sum(operations.found.values()) / options.clients, "most": counted}))


if __name__ == "__main__":
    main()
