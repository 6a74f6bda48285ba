"""Rare classes: gist as it is, with weights by class, and with `balance`, on unions with a long tail.

    python benchmarks/gist_balance.py DATA_DIR [--samples 12000] [--out benchmarks/results/gist_balance.json]

A fifth of each class's training samples is held out and judged. Of the others class k keeps a share of R^(−k/9), R
being 10 or 100, or class 9 − k does: six runs, by both directions and three seeds of what is held out. Scattering as by
default, λ from the sums for each; how the union is split among clients would change nothing. `weights` gives a sample
of class k the weight n/(c·n_k), in S, V, μ and ȳ alike: other sums than gist's, which the product does not ask for.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist.core.rng import Rng
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.features import Scattering, drawn
from fedgist.learning.ridge import Ridge, balanced
from fedgist.methods.gist import FROM_SUMS

SETS = ("digits", "mnist5k", "fashion-mnist", "cifar10")
TAILS = (10, 100)
CLASSES = 10


def samples(name: str, place: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Features in float64, and labels."""
    inputs = from_dataset(resolve({**place, "method": "gist", "dataset": name, "clients": 1, "device": "cpu"}))
    ((data,), task) = inputs.sites.values(), inputs.task
    scattering = Scattering(task.shape, task.low, task.high)
    w = {key: value.float() for key, value in drawn(scattering, 0).items()}
    return scattering(w, data.x).double(), data.y


def tails(y: Tensor, ratio: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What is learned from and what is judged, for three seeds and both directions."""
    for seed in range(3):
        order = Rng(seed)("held out").permutation(len(y))
        for turned in (False, True):
            kept, held = [], []
            for k in range(CLASSES):
                of_class = order[y[order] == k]
                fifth = len(of_class) // 5
                share = ratio ** (-(CLASSES - 1 - k if turned else k) / (CLASSES - 1))
                held.append(of_class[:fifth])
                kept.append(of_class[fifth:][: max(1, round(share * (len(of_class) - fifth)))])
            yield torch.cat(kept), torch.cat(held)


def fitted(phi: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """μ, W and ȳ of samples with weights whose sum is their number."""
    n = len(y)
    mean, prior = weight @ phi / n, weight @ y / n
    z = phi - mean
    ridge = Ridge.of((z.T * weight) @ z, (z.T * weight) @ (y - prior))
    best = ridge.best(n, n * (1 - prior.square().sum().item()), [ridge.scale * factor for factor in FROM_SUMS])
    return mean, ridge.weights(best), prior


def judged(phi: Tensor, y: Tensor, ratio: int) -> dict[str, list[tuple[float, float, float]]]:
    """By head, of each run: accuracy with classes of one size, of the worst class, and with those of the union."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for kept, held in tails(y, ratio):
        labels = F.one_hot(y[kept], CLASSES).double()
        even = (len(kept) / CLASSES / labels.sum(0))[y[kept]]
        (mean, w, prior), (even_mean, even_w, even_prior) = (
            fitted(phi[kept], labels, weight) for weight in (torch.ones_like(even), even)
        )
        z = phi[held] - mean
        scale, shift = balanced(w, prior)
        for name, scores in {
            "gist": z @ w + prior,
            "without the prior": z @ w,
            "weights": (phi[held] - even_mean) @ even_w + even_prior,
            "balance": z @ scale + shift,
        }.items():
            right = (scores.argmax(1) == y[held]).double()
            classes = 100 * torch.stack([right[y[held] == k].mean() for k in range(CLASSES)])
            found.setdefault(name, []).append((classes.mean().item(), classes.min().item(), (prior @ classes).item()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir")
    parser.add_argument("--samples", type=int, default=12_000, help="of data sets that are larger")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name in SETS:
        large = {"data_dir": chosen.data_dir, "limit": chosen.samples} if name in ("fashion-mnist", "cifar10") else {}
        phi, y = samples(name, large)
        for ratio in TAILS:
            for head, runs in judged(phi, y, ratio).items():
                means = [round(statistics.fmean(part), 2) for part in zip(*runs, strict=True)]
                spread = round(statistics.stdev(balance for balance, _, _ in runs), 2)
                row = dict(zip(("even", "worst", "as in the union", "deviation"), [*means, spread], strict=True))
                table.setdefault(head, {})[f"{name}, {ratio}:1"] = row
                print(name, ratio, head, row, flush=True)
    if chosen.out:
        about = {"samples": chosen.samples, "runs": 6, "accuracies": table}
        chosen.out.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
