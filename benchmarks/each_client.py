"""The accuracy of every client's own model after the last round, for presets whose clients have models of their own.

    fedgist reproduce codream/mixed && python benchmarks/each_client.py codream/mixed
    fedgist reproduce repshare/models --data-dir DIR && python benchmarks/each_client.py repshare/models

No run has it among its metrics, because a server sees only the sum over clients. But where all clients were simulated,
the last checkpoint holds their models.
"""

import argparse
from pathlib import Path

import torch

from fedgist import storage
from fedgist.experiments import config as configs
from fedgist.experiments import reproduction
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.inputs import from_dataset
from fedgist.learning.evaluation import Correct


@torch.no_grad()
def accuracies(folder: RunFolder) -> dict[str, float]:
    """Client and architecture -> the share of the client's test set that its model gets right."""
    inputs = from_dataset(configs.resolve(configs.load(folder.config), {"device": "cpu"}))
    states = storage.load(folder.checkpoint_files()[0])["engine"]["sites"]
    found = {}
    for id in sorted(states, key=int):
        name = inputs.info[id]["model"]
        x, y = inputs.sites[id].test
        found[f"{id} ({name})"] = Correct(inputs.task.models[name])(states[id]["w"], x, y).item() / len(y)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="as in codream/mixed")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder of the runs")
    options = parser.parse_args()
    for cell in reproduction.find(options.preset).cells:
        for path in sorted((options.out / cell.run).glob("seed-*")):
            if (folder := RunFolder(path)).finished:
                found = accuracies(folder)
                print(f"\n{cell.name}, {path.name}: {100 * sum(found.values()) / len(found):.1f}\n")
                print("| " + " | ".join(found) + " |\n" + "|---" * len(found) + "|")
                print("| " + " | ".join(f"{100 * accuracy:.1f}" for accuracy in found.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
