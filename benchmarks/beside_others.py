"""The same FedAvg by others and by fedgist, each in an environment of its own: seconds a round and to a target, memory.

    python benchmarks/beside_others.py --envs build/others --data DIR --out benchmarks/results/beside_others.json

The first call makes an environment for each below `--envs` (torch 2.13.0 of the CPU in all: several GB in all). Two
jobs, for 10, 100 and 1,000 clients: an MLP of 200 and 200 hidden units on MNIST (an equal share of all samples for each
client, ten of them asked in a round, a hundred of a thousand; batches of 32), and pfl-research's CIFAR-10 (50 samples
for each client, fifty clients asked in a round or all ten, batches of ten; its CNN without dropout, so that all do the
same). One pass, rate 0.1, no momentum; all start from the same weights with the same split. A round's seconds are
those between two tests of the global model, and the tests, which are the same for all, are not counted. Memory is that
of the process and all below it (proportional shares of what they share), at its highest.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TORCH = "torch==2.13.0"
PACKAGES = {
    "fluke": [TORCH, "fluke-fl==0.8.1"],
    "pfl": [TORCH, "pfl==0.6.0"],
    "flower": [TORCH, "flwr[simulation]==1.41.0"],
}
RUNNERS = ("loop", *PACKAGES, "fedgist", "fedgist_stacked")
JOBS: dict[str, dict[str, Any]] = {
    "mnist": {"batch": 32, "active": {10: 10, 100: 10, 1000: 100}, "share": None, "target": 0.90},
    "cifar10": {"batch": 10, "active": {10: 10, 100: 50, 1000: 50}, "share": 50, "target": 0.30},
}
RATE = 0.1


def model_of(job: str) -> nn.Module:
    if job == "mnist":
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(200, 10))
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10))
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return net


class Task:
    """A job with its data, the same for whoever runs it."""

    def __init__(self, path: Path):
        with np.load(path) as file:
            self.job, self.rounds = str(file["job"]), int(file["rounds"])
            self.x, self.y, self.test_x, self.test_y = (
                torch.from_numpy(file[name]) for name in ("x", "y", "test_x", "test_y")
            )
            self.parts = [torch.from_numpy(part) for part in np.split(file["indices"], np.cumsum(file["sizes"])[:-1])]
        self.batch = JOBS[self.job]["batch"]
        self.active = JOBS[self.job]["active"][len(self.parts)]
        torch.manual_seed(0)
        self.model = model_of(self.job)
        self.times: list[float] = []
        self.accuracies: list[float] = []
        self._began = time.perf_counter()

    def begin(self) -> None:
        self._began = time.perf_counter()

    def end(self, model: nn.Module) -> None:
        """A round is over: its time, and how good the global model is now."""
        self.times.append(time.perf_counter() - self._began)
        with torch.no_grad():
            chunks = zip(self.test_x.split(1000), self.test_y.split(1000), strict=True)
            right = sum(int((model(x).argmax(1) == y).sum()) for x, y in chunks)
        self.accuracies.append(right / len(self.test_y))
        self.begin()

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[self.parts[i]], self.y[self.parts[i]]

    def chosen(self) -> Iterator[list[int]]:
        """The clients of each round."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(self.rounds):
            yield torch.randperm(len(self.parts), generator=generator)[: self.active].tolist()


def prepare(job: str, clients: int, rounds: int, data: Path, path: Path) -> None:
    """Splits the data, as a file that every environment can read."""
    from fedgist.data import datasets

    train, test = datasets.load(job, data)
    order = torch.randperm(len(train.y), generator=torch.Generator().manual_seed(0))
    share = JOBS[job]["share"]
    order = order[: clients * share] if share else order
    sizes = [len(part) for part in order.tensor_split(clients)]
    arrays = {"x": train.x, "y": train.y, "test_x": test.x, "test_y": test.y, "indices": order}
    numbers = {name: tensor.numpy() for name, tensor in arrays.items()}
    np.savez(path, job=job, rounds=rounds, sizes=np.array(sizes), **numbers)  # type: ignore[arg-type]


# Who runs it


def loop(task: Task) -> None:
    """As PFLlib and most code of papers: one client after the other, a DataLoader and an optimiser for each."""
    from torch.utils.data import DataLoader, TensorDataset

    model, loss = task.model, nn.CrossEntropyLoss()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    task.begin()
    for ids in task.chosen():
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        samples = sum(len(task.parts[i]) for i in ids)
        for i in ids:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for x, y in DataLoader(TensorDataset(*task.client(i)), batch_size=task.batch, shuffle=True):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value * (len(task.parts[i]) / samples)
        start = total
        model.load_state_dict(start)
        task.end(model)


def fluke(task: Task) -> None:
    operators = torch.library.Library("torchvision", "DEF")
    for name in (
        "nms",
        "qnms",
    ):  # torchvision, imported and not needed here, comes from the index without them for a CPU
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou) -> Tensor")
    from fluke import FlukeENV
    from fluke.algorithms.fedavg import FedAVG
    from fluke.client import Client
    from fluke.config import OptimizerConfigurator
    from fluke.data import FastDataLoader
    from fluke.server import Server
    from fluke.utils import FederationObserver

    env = FlukeENV()
    env.set_seed(0)
    env.set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    optimizer = OptimizerConfigurator({"name": "SGD", "lr": RATE}, {"name": "StepLR", "step_size": 1, "gamma": 1})
    clients = []
    for i in range(len(task.parts)):
        x, y = task.client(i)
        data = FastDataLoader(x, y, num_labels=10, batch_size=task.batch, shuffle=True)
        clients.append(Client(i, data, None, optimizer, nn.CrossEntropyLoss(), local_epochs=1, persistency=False))
    server = Server(task.model, None, clients, weighted=True)

    class Clock(FederationObserver):  # type: ignore[misc]
        def start_round(self, round: int, global_model: Any) -> None:
            task.begin()

        def end_round(self, round: int) -> None:
            task.end(server.model)

    federation = FedAVG(len(clients), None, {}, clients, server)
    federation.set_callbacks(Clock())
    federation.run(task.rounds, task.active / len(clients))


def pfl(task: Task) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.model

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

        def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
            return nn.functional.cross_entropy(self(x), y)

        def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, *, model: Any) -> Any:
            task.begin()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            task.end(learner.net)
            return False, Metrics()

    learner, held = Learner(), {i: task.client(i) for i in range(len(task.parts))}
    sampler = get_user_sampler("minimize_reuse", list(held))

    def shuffled(i: int) -> Any:
        order = torch.randperm(len(held[i][1]))
        return PyTorchTensorDataset((held[i][0][order], held[i][1][order]), user_id=str(i))

    users = FederatedDataset(shuffled, sampler)
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    model = PyTorchModel(learner, torch.optim.SGD, optimizer)
    params = NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=task.rounds + 1,
        train_cohort_size=task.active,
        val_cohort_size=0,
    )
    train = NNTrainHyperParams(local_batch_size=task.batch, local_num_epochs=1, local_learning_rate=RATE)
    backend = SimulatedBackend(users, users)
    FederatedAveraging().run(params, backend, model, train, NNEvalHyperParams(1000), [Clock()])


def flower(task: Task) -> None:
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    path = Path(os.environ["BESIDE_OTHERS_TASK"])

    def numbers(model: nn.Module) -> list[np.ndarray]:
        return [value.numpy() for value in model.state_dict().values()]

    def fill(model: nn.Module, values: list[np.ndarray]) -> None:
        model.load_state_dict(dict(zip(model.state_dict(), map(torch.from_numpy, values), strict=True)))

    class Flower(NumPyClient):  # type: ignore[misc]
        def __init__(self, i: int):
            global _held
            _held = globals().get("_held") or Task(path)  # once for each of Ray's processes
            self.i, self.held = i, _held

        def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
            model, (x, y) = self.held.model, self.held.client(self.i)
            fill(model, parameters)
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for batch in torch.randperm(len(y)).split(self.held.batch):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            return numbers(model), len(y), {}

    def judge(round: int, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        if round == 0:
            task.begin()
            return None
        fill(task.model, parameters)
        task.end(task.model)
        return None

    def server(context: Context) -> ServerAppComponents:
        strategy = FedAvg(
            fraction_fit=task.active / len(task.parts),
            min_fit_clients=task.active,
            fraction_evaluate=0.0,
            min_evaluate_clients=0,
            min_available_clients=len(task.parts),
            evaluate_fn=judge,
            initial_parameters=ndarrays_to_parameters(numbers(task.model)),
        )
        return ServerAppComponents(config=ServerConfig(num_rounds=task.rounds), strategy=strategy)

    def client(context: Context) -> Any:
        return Flower(int(context.node_config["partition-id"])).to_client()

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(ServerApp(server_fn=server), ClientApp(client), len(task.parts), backend_config=resources)


def fedgist_stacked(task: Task) -> None:
    fedgist(task, "stacked")


def fedgist(task: Task, engine: str = "auto") -> None:
    import fedgist
    from fedgist.engines import local
    from fedgist.models import as_module

    clients = [task.client(i) for i in range(len(task.parts))]
    options = {"epochs": 1, "steps": 0, "batch": task.batch, "lr": RATE, "active": task.active % len(clients)}
    run_round = local.LocalEngine.run_round

    def timed(engine: Any) -> Any:
        report = run_round(engine)
        task.end(as_module(engine.method.model, engine.method.weights(engine.state)))
        return report

    local.LocalEngine.run_round = timed  # type: ignore[method-assign]
    tests = (task.test_x[:10], task.test_y[:10])  # its own evaluation is at the end, and not needed
    task.begin()
    about = {"classes": 10, "rounds": task.rounds, "eval_every": 0, "engine": engine}
    fedgist.run("fedavg", task.model, clients, tests, **about, **options)


# Around it


def child(runner: str, path: Path) -> None:
    task = Task(path)
    run: Callable[[Task], None] = globals()[runner]
    run(task)
    print("RESULT " + json.dumps({"times": task.times, "accuracies": task.accuracies}))


def memory_below(pid: int) -> int:
    """Bytes of a process and all that it started, each page divided by how many share it."""
    total, parents = 0, dict[int, list[int]]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(stat.read_text().rsplit(")", 1)[1].split()[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    todo = [pid]
    while todo:
        one = todo.pop()
        todo += parents.get(one, [])
        try:
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
            total += int(rollup.split("Pss:", 1)[1].split()[0]) * 1024
        except (OSError, IndexError):
            continue
    return total


def measure(python: str, runner: str, path: Path, limit: int) -> dict[str, Any]:
    environment = {**os.environ, "BESIDE_OTHERS_TASK": str(path), "RAY_DEDUP_LOGS": "0", "FLWR_TELEMETRY_ENABLED": "0"}
    command = [python, __file__, "--child", runner, "--task", str(path)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, text=True)
        most, over = 0, threading.Event()

        def watch() -> None:
            nonlocal most
            while not over.wait(0.25):
                most = max(most, memory_below(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        over.set()
        watcher.join()
        out.seek(0)
        err.seek(0)
        said = [line for line in out.read().splitlines() if line.startswith("RESULT ")]
        if not said:
            why = [line for line in err.read().splitlines() if line.strip()][-3:]
            return {"failed": f"exit {process.returncode} within {limit} s: {' | '.join(why)}"}
    return {**json.loads(said[0][7:]), "peak_mb": round(most / 1e6)}


def summary(found: dict[str, Any], target: float) -> dict[str, Any]:
    if "failed" in found:
        return found
    times, accuracies = found["times"], found["accuracies"]
    at = next((i for i, accuracy in enumerate(accuracies) if accuracy >= target), None)
    return {
        "s_a_round": round(statistics.median(times[1:] or times), 3),
        "first_round_s": round(times[0], 3),
        "target": target,
        "s_to_target": None if at is None else round(sum(times[: at + 1]), 2),
        "rounds_to_target": None if at is None else at + 1,
        "accuracy": accuracies[-1],
        "rounds": len(times),
        "peak_mb": found["peak_mb"],
    }


def environments(folder: Path, names: list[str]) -> dict[str, str]:
    """The Python of each, made where it is not there; of one that cannot be, why."""
    found = dict.fromkeys(("loop", "fedgist", "fedgist_stacked"), sys.executable)
    for name in names:
        if name not in PACKAGES:
            continue
        python = folder / name / "bin" / "python"
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
        found[name] = str(python)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, default=Path("build/others"))
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDGIST_DATA"))
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000], choices=[10, 100, 1000])
    parser.add_argument("--runners", nargs="+", default=list(RUNNERS), choices=RUNNERS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=600, help="seconds after which a run is given up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.task)
        return
    pythons = environments(options.envs, options.runners)
    about = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "machine": platform.processor()}
    kept = json.loads(options.out.read_text("utf-8"))["results"] if options.out and options.out.is_file() else []
    done = {(row["job"], row["clients"], row["runner"]): row for row in kept}
    with tempfile.TemporaryDirectory() as folder:
        for job in options.jobs:
            for clients in options.clients:
                path = Path(folder) / f"{job}-{clients}.npz"
                prepare(job, clients, options.rounds, options.data, path)
                for runner in options.runners:
                    found = summary(measure(pythons[runner], runner, path, options.limit), JOBS[job]["target"])
                    done[job, clients, runner] = {"job": job, "clients": clients, "runner": runner, **found}
                    print(done[job, clients, runner], flush=True)
                    if options.out:
                        text = json.dumps({**about, "cores": os.cpu_count(), "results": [*done.values()]}, indent=1)
                        options.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
