"""How far each way of optimising dreams together gets (Co-Dream, Table 2), seen at the dreams and not at a student.

    FEDGIST_DATA=DIR python benchmarks/dream_descent.py     # CIFAR-10; half an hour on a core

Four clients with a narrow ResNet9 and 2,000 images each dream one batch. Printed at the start and after every fifth of
the exchanges, means over clients: the entropy of their outputs and the gap of their BatchNorm statistics (Eq. 6), which
are what dreams are to make small; and the dreams' deviation.
"""

import argparse
import json
from typing import Any

import torch

from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.core.work import scan
from fedgist.engines import executor
from fedgist.experiments import config as configs
from fedgist.experiments.inputs import from_dataset
from fedgist.learning.optimisers import SGD
from fedgist.learning.training import Trainer
from fedgist.synthesis.dream_optimisers import DistAdam, DreamOptimiser, FedAdam, FedAvg
from fedgist.synthesis.dream_spaces import FreeDreams
from fedgist.synthesis.inversion import Dreamer, DreamOptions, entropy, statistics_gap

RATE, LOCAL_STEPS = 0.05, 5
WAYS: dict[str, tuple[DreamOptimiser, int, float | None]] = {  # how, exchanges, rate of local Adam steps if any
    "DistAdam, 400 exchanges": (DistAdam(RATE), 400, None),
    "DistAdam, 2,000 exchanges": (DistAdam(RATE), 2000, None),
    "FedAvg, 400 exchanges of 5 local steps": (FedAvg(1.0), 400, RATE),
    "FedAdam, 400 exchanges of 5 local steps": (FedAdam(RATE), 400, RATE),
    "FedAvg, local rate 0.01": (FedAvg(1.0), 400, 0.01),
    "FedAdam, local rate 0.01": (FedAdam(RATE), 400, 0.01),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dreams", type=int, default=32)
    parser.add_argument("--training", type=int, default=300, help="steps of 128 images of each client")
    parser.add_argument("--shorter", type=int, default=1, help="divides all exchanges")
    options = parser.parse_args()
    data = {"dataset": "cifar10", "limit": 8000, "clients": 4, "partition": "iid", "device": "cpu"}
    inputs, rng = from_dataset(configs.resolve({"method": "codream", "model": "resnet9:width=8", **data})), Rng(0)
    (net,) = inputs.task.models.values()
    trainer, rate = Trainer(net, SGD(momentum=0.9, weight_decay=1e-4)), torch.tensor(0.1)
    roles = []
    for id, own in inputs.sites.items():
        w, plan = net.init(rng("w", id)), own.steps(rng("batches", id), options.training, 128)
        roles.append(scan(trainer.step, (w, trainer.init(w)), plan, own.pool, rate))
    clients = [w for w, _ in executor("sequential", "cpu").drive(roles)]
    space = FreeDreams(options.dreams, inputs.task.shape)
    dreamer = Dreamer(DreamOptions().objective(net), space)

    def take_local_steps(v: Any, w: Any, rate: float) -> Any:
        """What a client's Adam steps do to the dreams."""
        carry = v, dreamer.adam.init(v)
        for i in range(LOCAL_STEPS):
            carry = dreamer.step(carry, torch.tensor(i), w, torch.tensor(rate))
        return tree.sub(carry[0], v)

    def measure(v: Any) -> dict[str, float]:
        terms: list[tuple[float, float]] = []
        for w in clients:
            tap: Tap = []
            logits = net(w, v["x"], tap=tap).logits
            terms.append((entropy(logits).item(), statistics_gap(tap).item()))
        uncertainty, gap = (sum(values) / len(clients) for values in zip(*terms, strict=True))
        return {"entropy": round(uncertainty, 3), "gap": round(gap, 2), "deviation": round(v["x"].std().item(), 3)}

    for name, (optimiser, exchanges, local_rate) in WAYS.items():
        v = space.start(rng("dreams"))
        state, exchanges, stands = optimiser.init(v), exchanges // options.shorter, [measure(v)]
        for done in range(1, exchanges + 1):
            moves = [
                dreamer.gradient(v, w) if local_rate is None else take_local_steps(v, w, local_rate) for w in clients
            ]
            v, state = optimiser.step(v, tree.scale(tree.map(lambda *each: sum(each), *moves), 1 / len(moves)), state)
            if done % (exchanges // 5) == 0:
                stands.append(measure(v))
        print(json.dumps({"way": name, "stands": stands}), flush=True)


if __name__ == "__main__":
    main()
