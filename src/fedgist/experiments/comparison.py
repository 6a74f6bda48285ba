"""Several methods on the same ground: what `fedgist compare` and `fedgist demo` run."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgist import methods
from fedgist.core.config import options
from fedgist.core.errors import FedgistError, unknown
from fedgist.data import datasets
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig, method_options

GROUND = (
    "dataset", "normalise", "limit", "clients", "partition", "alpha", "min_size", "ratio", "shards_per_client",
    "partition_seed", "discrepancy", "seed", "seeds",
)  # fmt: skip


def same_ground(names: Sequence[str], layer: Mapping[str, Any], profile: str | None = None) -> list[RunConfig]:
    """A configuration for each method; an option that only some of them have is set for those."""
    if len(set(names)) < len(names):
        raise FedgistError(f"a method is named twice: {', '.join(names)}")
    own = {name: method_options(name) for name in names}
    shared = options(RunConfig)
    for key in layer:
        if key not in shared and not any(key in known for known in own.values()):
            raise unknown("option", key, [*shared, *(key for known in own.values() for key in known)])
    resolved = []
    for name in names:
        fitting = {key: value for key, value in layer.items() if key in shared or key in own[name]}
        resolved.append(configs.resolve(fitting, {"method": name}, profile=profile))
    first = resolved[0]
    for other in resolved[1:]:
        for key in GROUND:
            mine, theirs = getattr(first, key), getattr(other, key)
            if mine != theirs:
                raise FedgistError(
                    f"profile {profile!r} gives {first.method} {key} = {mine} and {other.method} {key} = {theirs}; "
                    f"say which for all with --set {key}=…"
                )
    return resolved


def demo(only: Sequence[str] | None, ground: Mapping[str, Any]) -> tuple[list[RunConfig], str | None]:
    """The demo profiles of the methods that have one, on real digits, and a line when those are not the usual ones."""
    able = [name for name in methods.available() if "demo" in methods.find(name).profiles]
    for name in only or ():
        if name not in able:
            raise unknown("method with a demo", name, able)
    dataset, note = "mnist5k", None
    try:
        datasets.load(dataset)
    except FedgistError:
        dataset, note = "digits", "the 8×8 digits of scikit-learn stand in for MNIST, which 'fedgist[demo]' brings"
    return same_ground(only or able, {**ground, "dataset": dataset}, profile="demo"), note
