"""Gist, Fed3R and AFL on their own ground: one frozen net that learned another data set, and heads from the same sums.

    python benchmarks/gist_relatives.py DATA_DIR [--samples 5000] [--out benchmarks/results/gist_relatives.json]

On the same rows and with the same λ all three have the same W, however the data are split, which a test holds
(tests/methods/test_gist_relatives.py). They differ in what they fix, and nothing here is chosen: AFL has no intercept
and ends with λ = 0; Fed3R has λ = 0.01, of the intercept too, and columns of norm 1, all as in their published code;
gist takes features at norm 1, an intercept without a penalty, and λ from the sums. Judged on a fifth of the samples,
which is held out, and on the test set. Three seeds: of the net, of its training and of what is held out.
"""

import argparse
import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedgist
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import from_dataset
from fedgist.learning.ridge import Ridge
from fedgist.methods.gist import FROM_SUMS

GROUNDS = {
    "clothes → digits": ("fashion-mnist", "mnist"),
    "CIFAR-10 → 100 classes": ("cifar10", "cifar100-subset"),
    "100 classes → CIFAR-10": ("cifar100-subset", "cifar10"),
}
SEEDS = (0, 1, 2)


def net(channels: int, classes: int) -> nn.Sequential:
    """512 features, as many as AFL's ResNet-18 has."""
    widths, layers = (channels, 32, 64, 128), list[nn.Module]()
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, classes))


def heads(x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """W and intercept of each, from sums over all samples of features as they are."""
    u, n, mean, prior = F.pad(x, (0, 1), value=1.0), len(x), x.mean(0), y.mean(0)
    z = x - mean
    joint, ours = Ridge.of(u.T @ u, u.T @ y).weights(0.01), Ridge.of(z.T @ z, z.T @ y)
    ridge = ours.best(n, n * (1 - prior.square().sum().item()), [ours.scale * factor for factor in FROM_SUMS])
    w, lengths = ours.weights(ridge), torch.linalg.vector_norm(joint[:-1], dim=0).clamp_min(1e-12)
    return {
        "AFL: no intercept, λ = 0": (torch.linalg.lstsq(x, y, driver="gelsd").solution, torch.zeros_like(prior)),
        "Fed3R: λ = 0.01, columns of norm 1": (joint[:-1] / lengths, joint[-1] / lengths),
        "Fed3R without the norm": (joint[:-1], joint[-1]),
        "ours, features as they are": (w, prior - mean @ w),
    }


def judged(source: str, target: str, seed: int, place: dict[str, Any]) -> dict[str, list[float]]:
    """Accuracies by head, of what is held out and of the test set, in per cent."""
    known = {**place, "method": "gist", "features": "model", "clients": 10, "alpha": 0.1, "seed": seed}
    shapes = {name: from_dataset(resolve({**known, "dataset": name})).task for name in (source, target)}
    torch.manual_seed(seed)
    fresh = net(shapes[source].shape[0], shapes[source].classes)
    training = {"rounds": 5, "epochs": 1, "batch": 64, "lr": 0.01, "momentum": 0.9, "eval_every": 0, "seed": seed}
    learned = fedgist.run("centralized", fresh, source, **training, **place).model
    assert learned is not None
    frozen = nn.Sequential(*list(learned.children())[:-1], nn.Linear(512, shapes[target].classes)).eval()
    found: dict[str, list[float]] = {}
    for validation in (0.2, 0.0):
        split = {"clients": 10, "alpha": 0.1, "partition": "dirichlet-balanced", "seed": seed, "validation": validation}
        inputs = from_dataset(resolve({**known, **split, "dataset": target}))
        x, y = (torch.cat([getattr(site, name) for site in inputs.sites.values()]) for name in "xy")
        with torch.no_grad():
            phi, tested = (
                torch.cat([frozen[:-1](some) for some in all_.split(500)]).double() for all_ in (x, inputs.test[0])
            )
        for name, (w, b) in heads(phi, F.one_hot(y, shapes[target].classes).double()).items():
            right = ((tested @ w + b).argmax(1) == inputs.test[1]).double().mean().item()
            found.setdefault(name, []).append(100 * right)
        for name, model, features in (
            ("gist: features of norm 1", frozen, "model"),
            ("gist on scattering, no other data", "mlp", "scattering"),
        ):
            result = fedgist.run("gist", model, target, features=features, rounds=1, **split, **place)
            found.setdefault(name, []).append(100 * result.accuracy)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir")
    parser.add_argument("--samples", type=int, default=5_000)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    place = {"data_dir": chosen.data_dir, "limit": chosen.samples, "device": "cpu"}
    table = {}
    for ground, (source, target) in GROUNDS.items():
        seeds = [judged(source, target, seed, place) for seed in SEEDS]
        for name in seeds[0]:
            both = [[one[name][which] for one in seeds] for which in (0, 1)]
            table.setdefault(name, {})[ground] = {
                part: [round(statistics.fmean(some), 2), round(statistics.stdev(some), 2)]
                for part, some in zip(("held out", "test"), both, strict=True)
            }
            print(ground, name, table[name][ground], flush=True)
    if chosen.out:
        about = {"samples": chosen.samples, "seeds": len(SEEDS), "accuracies": table}
        chosen.out.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
