"""Gist on a net that was trained elsewhere, which is what Fed3R and AFL do: here on clothes, for clients with digits.

Run it with: python examples/pretrained_features.py DATA_DIR [SAMPLES]
"""

import sys

import torch
from torch import nn

import fedgist


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 10),
    )


def main(data_dir: str, samples: int = 10_000) -> dict[str, float]:
    """Accuracy on MNIST's digits, of ten clients with few classes each, by what the features are."""
    torch.manual_seed(0)  # the weights that a module is made with are the start
    place = {"data_dir": data_dir, "limit": samples}
    clothes = fedgist.run("centralized", net(), "fashion-mnist", rounds=5, epochs=1, batch=64, lr=0.05, **place)
    digits = {"rounds": 1, "alpha": 0.1, "partition": "dirichlet-balanced", "clients": 10, **place}
    found = {
        "trained on clothes": fedgist.run("gist", clothes.model, "mnist", features="model", **digits),
        "never trained": fedgist.run("gist", net(), "mnist", features="model", **digits),
        "scattering": fedgist.run("gist", "mlp", "mnist", **digits),
        "trained on clothes, and scattering": fedgist.run(
            "gist", clothes.model, "mnist", features="model+scattering", **digits
        ),
    }
    for name, result in found.items():
        print(f"{name}: {100 * result.accuracy:.2f}, {result.bytes_up / 10 / 1e6:.1f} MB a client")
    return {name: result.accuracy for name, result in found.items()}


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
