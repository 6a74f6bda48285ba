"""Tuning: settings of a method are tried on samples that are cut from the clients, and the best of them is kept.

The test set has no part in it: a trial judges on the `validation` share of every client's samples, on which nobody then
trains. Every trial is an ordinary run, in a folder that is found again by the digest of its configuration.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.core.errors import FedgistError, check_known
from fedgist.core.rng import Rng
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig, method_options
from fedgist.options import options, toml_value

VALIDATION = 0.2
"""The share that is cut from the clients where nobody says otherwise."""

UNCHARGED = (
    "not private: every trial looks at the clients' records, and nothing of that is charged; "
    "the epsilon of a run with what was chosen covers that run alone"
)
"""What is said of tuning for private runs."""

Setting = dict[str, str]
"""Option -> value, as typed."""


@dataclass(frozen=True)
class Trial:
    """A setting of a method, and what came of it on the validation samples."""

    method: str
    setting: Setting
    accuracies: list[float]
    """One a seed."""

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)


def choices(names: Sequence[str], pairs: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What is to be tried with these methods, and what is fixed, from texts such as `lr=0.01,0.1` and `rounds=20`.

    Where a value is a list itself, its own commas stay: `architectures=mlp,cnn;cnn,cnn` are two of them.
    """
    tried, fixed = {}, {}
    known = {key: one for name in names for key, one in method_options(name).items()} | options(RunConfig)
    for key, text in configs.assignments(list(pairs)).items():
        mark = ";" if key in known and known[key].is_list else ","
        values = [value.strip() for value in text.split(mark)]
        if not all(values):
            raise FedgistError(f"--set wants {key}=A{mark}B{mark}…, without empty values, not {key}={text}")
        if len(values) > 1:
            tried[key] = list(dict.fromkeys(values))
        else:
            fixed[key] = text
    return tried, fixed


def settings(method: str, tried: Mapping[str, Sequence[str]], budget: int | None, seed: int) -> list[Setting]:
    """The grid of a method over the options that it has, or as many settings of it, drawn without repetition."""
    known = {**options(RunConfig), **method_options(method)}
    tried = {name: values for name, values in tried.items() if name in known}
    total = math.prod(map(len, tried.values()))
    if budget is None or budget >= total:
        return grid(tried)
    found: dict[int, Setting] = {}
    rng = Rng(seed)("tune", method)
    draw = 0
    while len(found) < budget:
        at = int(rng(draw).integers(total, 1))
        draw += 1
        if at not in found:
            found[at] = _numbered(at, tried)
    return list(found.values())


def grid(tried: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of the values of these options, those of the last changing first."""
    return [dict(zip(tried, values, strict=True)) for values in itertools.product(*tried.values())]


def _numbered(at: int, tried: Mapping[str, Sequence[str]]) -> Setting:
    """The setting of that number, where values of the first option change first."""
    setting = {}
    for name, values in tried.items():
        at, digit = divmod(at, len(values))
        setting[name] = values[digit]
    return setting


def check(names: Sequence[str], tried: Mapping[str, Sequence[str]]) -> None:
    """Refuses options that no method has, and those that a search must not change."""
    own = {key for name in names for key in method_options(name)}
    for key in tried:
        check_known("option", key, own | options(RunConfig).keys())
        if key in ("method", "seed", "seeds", "validation", "dataset"):
            raise FedgistError(f"{key} is no setting of a method: give one value of it")
    if not tried:
        raise FedgistError("nothing to try: give at least one option with several values, as in --set lr=0.01,0.1")


def best(trials: Sequence[Trial]) -> Trial:
    """The most accurate on the validation samples; of equals, the first."""
    return max(trials, key=lambda trial: trial.accuracy)


def chosen_toml(trials: Sequence[Trial], command: str, private: bool) -> str:
    """The best setting of each method as TOML, which `run --config` and `compare --config` take."""
    lines = [f"# chosen on held-out samples of the clients by: {command}"]
    lines += [f"# {UNCHARGED}\n" if private else ""]
    for method in dict.fromkeys(trial.method for trial in trials):
        one = best([trial for trial in trials if trial.method == method])
        values = configs.flat(configs.resolve(one.setting, {"method": method}))
        lines.append(f"[{toml_value(method) if not method.isalnum() else method}]")
        lines.append(f"# validation accuracy {one.accuracy:.4f}, of {sum(t.method == method for t in trials)} settings")
        lines += [f"{name} = {toml_value(values[name])}" for name in one.setting]
        lines.append("")
    return "\n".join(lines)
