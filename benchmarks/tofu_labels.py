"""Why TOFU's labels are free numbers, and what hot updates do to a net: two looks inside, beside the presets.

    python benchmarks/tofu_labels.py encode                                  # as a net grows sure of itself
    python benchmarks/tofu_labels.py live runs/reproduce/tofu-mnist5k-*/*    # the ReLUs of finished runs

`encode` encodes the update of one client's epoch at the weights before it, with either kind of label: 5,000 digits, a
small MLP, seed 0. `live` is the share of the last hidden layer that is above zero on 1,000 test images, after the last
round of a run.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Compute, Place, Scan, execute
from fedgist.experiments import config as configs
from fedgist.experiments import results
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import from_dataset
from fedgist.families.local_training import trainer
from fedgist.synthesis import encoding

SETTINGS = {"method": "tofu", "dataset": "mnist5k", "partition": "iid", "clients": 4, "model": "mlp:hidden=64"}
LOCAL = {"batch": 32, "lr": 0.02, "momentum": 0.9}
HERE = {"device": "cpu"}
IMAGES, ITERATIONS = 16, 200


def encode() -> Iterator[str]:
    """How well one client's update is encoded, and how sure the net is of the images, as its training goes on."""
    config = configs.resolve(SETTINGS, LOCAL, HERE)
    inputs = from_dataset(config)
    model, data = inputs.task.models[inputs.task.model], inputs.sites["0"]
    learner, place = trainer(config.options, model), Place(torch.device("cpu"))
    lr = torch.tensor(config.options.lr, dtype=torch.float64)
    rates = {"lr": encoding.learning_rates(0.1, ITERATIONS)}
    w, rng = model.init(Rng(0)), Rng(7)
    for epoch in range(7):
        batches = data.epochs(rng(epoch), 1, config.options.batch)
        trained, _ = execute(Scan(learner.step, (w, learner.init(w)), batches, (data.pool, lr)), place)
        for labels in encoding.PARAMETRISATIONS if epoch in (0, 1, 3, 6) else ():
            encoder = encoding.Encoder(model, labels=labels)
            aim = execute(Compute(encoder.aim, (tree.sub(w, trained),)), place)
            begin = encoder.init(encoder.start(Rng(1), IMAGES))
            variables, _ = execute(Scan(encoder.step, begin, rates, (w, *aim)), place)
            sent, cosine = execute(Compute(encoder.finish, (variables, w, *aim, torch.tensor(0.0))), place)
            with torch.no_grad():
                sure = model(w, sent["images"]).logits.softmax(1).amax(1).mean()
            mass = sent["labels"].sum(1).abs().mean()
            yield f"| {epoch} | {labels} | {cosine:.2f} | {sure:.2f} | {mass:.1f} |"
        w = trained


@torch.no_grad()
def live(folder: RunFolder) -> str:
    """A finished run: what matters of its settings, and the share of its last hidden layer that is above zero."""
    config = configs.resolve(configs.load(folder.config), HERE)
    inputs = from_dataset(config)
    result = results.load(folder)
    assert result.weights is not None
    features = inputs.task.models[inputs.task.model](result.weights, inputs.test[0][:1000]).features
    names = ("labels", "objective", "lr", "momentum", "switch1")
    settings = ", ".join(f"{name} {getattr(config.options, name)}" for name in names)
    share = (features > 0).float().mean()
    return f"| {config.model}, {settings}, seed {config.seed} | {100 * result.accuracy:.1f} | {share:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("encode", "live"))
    parser.add_argument("runs", nargs="*", type=Path, help="for live: folders of finished runs of tofu")
    options = parser.parse_args()
    if options.action == "live":
        print("| run | accuracy | live |\n|---|---|---|")
        for path in options.runs:
            print(live(RunFolder(path)), flush=True)
        return
    print("| epochs before | labels | cosine | confidence | mean of the sum of a label |\n|---|---|---|---|---|")
    for text in encode():
        print(text, flush=True)


if __name__ == "__main__":
    main()
