"""Shadow runs: a method many times over, each time on a random half of every client's samples, for LiRA.

Each run is a whole federation, with the same clients and the same split as all others, so that the attacker is given
more than it has: how the data are split, and samples of the very same kind. What is judged is the model that came out.
With one client that is what its replies alone make; with several, what their sum makes.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments import runner
from fedgist.experiments.config import RunConfig
from fedgist.experiments.inputs import Inputs
from fedgist.experiments.results import Result
from fedgist.privacy import lira
from fedgist.privacy.lira import Rates

FEWEST = 4
BATCH = 500


def halved(config: RunConfig) -> Inputs:
    """The data of the shadow run with this seed."""
    whole = sources.from_dataset(config)
    kept = held(config, whole)
    sites = {id: dataclasses.replace(data, x=data.x[kept[id]], y=data.y[kept[id]]) for id, data in whole.sites.items()}
    counts = {id: data.counts().tolist() for id, data in sites.items()}
    parts = whole.parts and {id: part[kept[id].cpu().numpy()] for id, part in whole.parts.items()}
    return dataclasses.replace(whole, sites=sites, counts=counts, parts=parts)


def held(config: RunConfig, whole: Inputs) -> dict[str, Tensor]:
    """Which of each client's samples the run with this seed has."""
    rng = Rng(config.seed)("shadow")
    return {id: (rng(id).uniform(data.n) < 0.5).to(data.y.device) for id, data in whole.sites.items()}


def attack(layer: dict[str, Any], runs: int, out: Path, together: int, profile: str | None) -> dict[str, Any]:
    """Makes the runs that `out` lacks, `together` at a time, and judges each by all others."""
    if runs < FEWEST:
        raise FedgistError(f"a likelihood ratio needs at least {FEWEST} runs, not {runs}")
    layer = {"partition_seed": 0, "eval_every": 0, "checkpoint_every": 1_000_000, **layer}
    each = [configs.resolve({**layer, "seed": seed}, profile=profile) for seed in range(runs)]
    results: list[Result] = []
    for first in range(0, runs, together):
        some = [(config, out / f"shadow-{config.seed}") for config in each[first : first + together]]
        results += runner.run_together(some, halved)
    whole = sources.from_dataset(dataclasses.replace(each[0], device="cpu"))
    x, y = (torch.cat([getattr(data, name) for data in whole.sites.values()]) for name in ("x", "y"))
    inside = torch.stack([torch.cat([*held(config, whole).values()]) for config in each])
    logits = torch.stack([_logits(result, x) for result in results])
    sure = torch.stack([lira.confidence(each, y) for each in logits])
    right = (logits.argmax(2) == y).double()
    return {
        "runs": runs,
        "samples": len(y),
        "accuracy": statistics.fmean(result.accuracy for result in results),
        "right": {"held": float(right[inside].mean()), "others": float(right[~inside].mean())},
        "likelihood ratio": _over([lira.rates(lira.ratios(sure, inside, t), inside[t]) for t in range(runs)]),
        "loss threshold": _over([lira.rates(sure[t], inside[t]) for t in range(runs)]),
        "blind": _over([lira.rates(lira.ratios(sure, inside, t, seen=(t + 1) % runs), inside[t]) for t in range(runs)]),
    }


def _logits(result: Result, x: Tensor) -> Tensor:
    """Of the model that came out."""
    with torch.no_grad():
        return torch.cat([result.model(part) for part in x.split(BATCH)])


def _over(each: Sequence[Rates]) -> dict[str, Any]:
    """Mean and deviation over targets."""
    found: dict[str, Any] = {}
    for name in ("auc", "at_one_percent", "at_a_thousandth"):
        values = [value for one in each if (value := getattr(one, name)) is not None]
        found[name] = round(statistics.fmean(values), 4) if values else None
        found[f"{name} std"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
    return found
