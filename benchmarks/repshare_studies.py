"""Studies of representation sharing on MNIST with LeNet5, beyond Table 1 of Berdoz 2022; one table each.

    python benchmarks/repshare_studies.py network --out results/studies.json --seeds 3

grid         Figure 3: λ_KD × λ_disc, 5 clients
observations M_up, M_down and n_avg
network      without a server, with clients offline, with late replies
differences  frameworks × kinds of difference between clients
models       LeNet5, MLP and CNN clients in one federation
"""

from itertools import product
from typing import Any

from repshare_cells import cell, parser, run_cells, summary

CNNS = [f"{id}:lambda_kd=0:lambda_disc=4" for id in (2, 5, 8)]
MLPS = [f"{id}:lambda_kd=0.3" for id in (1, 4, 7)]
MIXED = "lenet5-thesis,mlp:feature_size=84,cnn:feature_size=84:norm=none"


def grid() -> dict[str, dict[str, Any]]:
    weights = (0, 0.1, 0.5, 1, 2, 4, 8, 10)
    pairs = product(weights, weights)
    return {f"KD {kd}, disc {disc}": cell("mnist", 5, "ours", lambda_kd=kd, lambda_disc=disc) for kd, disc in pairs}


def observations() -> dict[str, dict[str, Any]]:
    changes = [{}, *({"n_avg": n} for n in (1, 3, 100)), *({"m_down": m} for m in (0, 2, 5))]
    changes += [{"m_up": m, "m_down": m} for m in (2, 5)]
    return {_name(change): cell("mnist", 10, "ours", **change) for change in changes}


def network() -> dict[str, dict[str, Any]]:
    changes: list[dict[str, Any]] = [{}, {"means": "received"}, {"means": "received", "m_up": 3, "m_down": 9}]
    changes += [{"topology": graph} for graph in ("full", "regular:4", "ring")]
    changes += [
        {"offline": 0.5},
        {"offline": 0.5, "train_offline": False},
        {"offline": 0.8},
        {"topology": "ring", "offline": 0.5},
    ]
    changes += [{"delay": delay} for delay in (1, 2, 3)]
    return {_name(change): cell("mnist", 10, "ours", **change) for change in changes}


def differences() -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "label skew": {"partition": "dirichlet", "alpha": 0.5},
        "feature shift": {"discrepancy": "rotation,blur,contrast"},
        "concept shift": {"discrepancy": "labels"},
        "label skew and feature shift": {
            "partition": "dirichlet", "alpha": 0.5, "discrepancy": "rotation,blur,contrast",
        },
        "label skew and concept shift": {"partition": "dirichlet", "alpha": 0.5, "discrepancy": "labels"},
    }  # fmt: skip
    rows = ("IL", "FL, common start", "FD", "ours")
    return {f"{kind}: {row}": cell("mnist", 10, row, **change) for kind, change in kinds.items() for row in rows}


def models() -> dict[str, dict[str, Any]]:
    """`chosen` was chosen on 10,000 training images that no client has, with another seed."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "IL": ("IL", {}),
        "ours": ("ours", {}),
        "ours, chosen": ("ours", {"lambda_kd": 3, "choices": ",".join([*MLPS, *CNNS])}),
    }
    return {
        f"mixed models: {name}": cell("mnist", 9, row, model="lenet5-thesis", architectures=MIXED, **changes)
        for name, (row, changes) in rows.items()
    }


STUDIES = {"grid": grid, "observations": observations, "network": network, "differences": differences, "models": models}


def _name(change: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in change.items()) or "as published"


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("study", choices=list(STUDIES))
    options = options_parser.parse_args()
    cells = {f"{options.study}: {name}": layer for name, layer in STUDIES[options.study]().items()}
    results = run_cells(cells, options)
    print(f"\n| {options.study} | accuracy |\n|---|---|")
    for name in cells:
        print(f"| {name.removeprefix(f'{options.study}: ')} | {summary(results[name])} |")


if __name__ == "__main__":
    main()
