"""What a step of DP-SGD costs beside a plain one.

    python benchmarks/dp_sgd.py            # writes benchmarks/results/dp_sgd.json

Both are measured in turn, in one process and on one core, in seconds of the processor; what counts is the ratio of
their fastest.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.learning.optimisers import SGD
from fedgist.learning.private_training import PrivateTrainer
from fedgist.learning.training import Trainer

BATCH, ROUNDS = 256, 15
OUT = Path(__file__).parent / "results" / "dp_sgd.json"


def fastest(steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each, taken in turn."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            start = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - start)
    return best


def measure(name: str, shape: tuple[int, ...]) -> dict[str, float]:
    model = models.build(name, shape, 10)
    w = model.init(Rng(0))
    pool = {"x": Rng(1).normal(BATCH, *shape), "y": Rng(2).integers(10, BATCH)}
    batch = {"index": torch.arange(BATCH), "mask": torch.ones(BATCH), "seed": torch.tensor(7)}
    lr = torch.tensor(0.1, dtype=torch.float64)
    learners: dict[str, Any] = {"plain": Trainer(model, SGD()), "DP-SGD": PrivateTrainer(model, SGD(), 1.0, 1.0, BATCH)}
    with torch.no_grad():
        steps = {title: partial(learner.step, (w, {}), batch, pool, lr) for title, learner in learners.items()}
        seconds = fastest(steps)
    return {**seconds, "ratio": seconds["DP-SGD"] / seconds["plain"]}


def main() -> None:
    torch.set_num_threads(1)
    found = {"mlp": measure("mlp", (1, 28, 28)), "lenet5": measure("lenet5", (1, 28, 28))}
    for name, row in found.items():
        print(name, {key: round(value, 5) for key, value in row.items()})
    content = {"batch": BATCH, "torch": torch.__version__, "device": "cpu", "steps": found}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
