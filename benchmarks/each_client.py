"""The accuracy of every client's own model after the last round, for presets whose clients have models of their own.

    fedgist reproduce codream/mixed && python benchmarks/each_client.py codream/mixed
    fedgist reproduce repshare/models --data-dir DIR && python benchmarks/each_client.py repshare/models

A run's metrics have the mean over clients alone; what each of their models is worth stands in the run's folder.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from fedgist.experiments import reproduction, trained
from fedgist.experiments.folder import RunFolder


def accuracies(folder: RunFolder) -> dict[tuple[str, str], float]:
    """Client and architecture -> the share of the test set that its model gets right."""
    found = [trained.read_about(Path(f"{stem}.json")) for stem in trained.stems(folder.path).values()]
    judged = [about for about in found if about.client is not None and about.accuracy is not None]
    return {(about.client, about.module): about.accuracy for about in judged}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="as in codream/mixed")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="folder of the runs")
    options = parser.parse_args()
    for cell in reproduction.find(options.preset).cells:
        kinds = defaultdict(list)
        for path in sorted((options.out / cell.run).glob("seed-*")):
            if (folder := RunFolder(path)).finished and (found := accuracies(folder)):
                print(f"\n{cell.name}, {path.name}\n")
                head = [f"{client} ({module})" for client, module in found]
                for row in (head, ["---"] * len(head), [f"{100 * accuracy:.1f}" for accuracy in found.values()]):
                    print(f"| {' | '.join(row)} |")
                for (_, module), accuracy in found.items():
                    kinds[module].append(100 * accuracy)
        if kinds:
            print(f"\n{cell.name}: " + ", ".join(f"{kind} {statistics.fmean(of):.1f}" for kind, of in kinds.items()))


if __name__ == "__main__":
    main()
