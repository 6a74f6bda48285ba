"""How far FedDM's images move while they are matched: at fresh weights, and at those of a run's last round.

    fedgist reproduce feddm/real --seeds 1 --only "FedDM, CIFAR-10" --data-dir DIR --device cuda
    FEDGIST_DATA=DIR python benchmarks/matching_drift.py runs/reproduce/feddm-cifar10-*/seed-0

One client of the run matches as the run did, but for the learning rates and the sizes given here. Loss: Eq. 9 over many
of its samples, relative to that of the real images it begins with. Moved: ‖x − x_0‖ / ‖x_0‖.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Pool
from fedgist.experiments import config as configs
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import from_dataset
from fedgist.learning.optimisers import SGD
from fedgist.synthesis.augmentation import Augmentation
from fedgist.synthesis.matching import ClassBatches, Matcher, embed, matching_loss, on_sphere, shares

SEEN = 200
"""Samples of each class over which the loss is taken."""


@torch.no_grad()
def drift(folder: RunFolder, client: str, rates: list[float], steps: int, batch: int) -> None:
    config = configs.resolve(configs.load(folder.config), {"device": "cpu", "data_dir": None})
    inputs, rng = from_dataset(config), Rng(0)
    (net,), data = inputs.task.models.values(), inputs.sites[client]
    ipc, rho, kinds = config.options.ipc, config.options.rho, config.options.augmentation
    members = [own for c in range(inputs.task.classes) if len(own := (data.y == c).nonzero().flatten()) >= ipc]
    changes = Augmentation(kinds, inputs.task.shape[1:]) if kinds else None
    batches = ClassBatches(members, data.n, batch, augmentation=changes)
    own = shares([ipc] * len(members), [ipc] * len(members)).float()
    start, pool = data.x[torch.cat([indices[:ipc] for indices in members])], Pool(x=data.x, y=data.y)
    seen = data.x[torch.cat([indices[:SEEN] for indices in members])]
    counts = [min(SEEN, len(indices)) for indices in members]

    def loss(w: Any, images: Tensor) -> Tensor:
        around = on_sphere(w, rng("weights").seeds(1)[0], rho)
        means = shares(counts, counts).float() @ embed(net, around, seen)
        return matching_loss(means, own @ embed(net, around, images))

    last = storage.load(folder.checkpoint_files()[0])
    for name, w in (("fresh", net.init(rng("fresh"))), ("last", last["engine"]["states"]["server"]["w"])):
        for rate in rates:
            matcher = Matcher(net, rho, SGD(config.options.momentum), rate)
            carry = matcher.init(start.clone())
            for step in range(1, steps + 1):
                drawn = tree.index(batches.make(1, step - 1, 1), 0)
                carry = matcher.step(carry, drawn, pool, w, batches.shares.float(), own)
                if step in (1, 5, 20, 60, 200, 1000):
                    x = carry[0]["x"]
                    rest, distance = loss(w, x) / loss(w, start), (x - start).norm() / start.norm()
                    place = f"{name} weights, rate {rate}, step {step}"
                    print(f"{place}: loss {rest:.2f}, moved {distance:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=RunFolder, help="folder of a run of feddm, one seed")
    parser.add_argument("--client", default="0")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="real samples of each class in a step")
    options = parser.parse_args()
    drift(options.run, options.client, options.rates, options.steps, options.batch)


if __name__ == "__main__":
    main()
