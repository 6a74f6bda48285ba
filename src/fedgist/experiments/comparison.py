"""Several methods on the same ground: what `fedgist compare` and `fedgist demo` run, and what came of it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fedgist import methods
from fedgist.core.errors import FedgistError, check_known
from fedgist.data import datasets
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig, method_options
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.report.runs import SHARE_OF_BEST, Group, beside_alone, read, usual_target
from fedgist.options import Role, having, options

NOTHING: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
MODEL = {"model": "mlp:norm=batch", "architectures": (), "eval_every": 1}
"""What `compare` and `demo` run where nobody says otherwise: one model for all, so that they start at the same
weights and rounds mean the same. It has BatchNorm, because Co-Dream's dreams are held to its statistics, and is quick
on two cores."""


def compare(
    names: Sequence[str], layer: Mapping[str, Any], profile: str | None, own: Mapping[str, Mapping[str, Any]] = NOTHING
) -> tuple[list[RunConfig], list[str]]:
    """What `fedgist compare` runs: one ground, one model, and notes on what was chosen for the user.

    `own` are settings for single methods, as `fedgist tune` writes them.
    """
    chosen = {name: profile or _usual_profile(name) for name in names}
    others = [f"{name}: {used or 'none'}" for name, used in chosen.items() if not profile and used != "small"]
    usual = f"profile {profile or 'small'}" + (f" ({', '.join(others)})" if others else "")
    notes = [f"{usual}, where no option says otherwise"]
    resolved, settled = same_ground(names, layer, chosen, own, MODEL)
    if "model" not in layer:
        settled = [f"model {MODEL['model']} for all; another with --model", *settled]
    reduced = {name: configs.profile_note(name, chosen[name]) for name in names}
    return resolved, [*notes, *(f"  {name}: {note}" for name, note in reduced.items() if note), *settled]


def _usual_profile(name: str) -> str | None:
    """`compare` where a method needs other settings for the common model than in its own small profile."""
    return next((profile for profile in ("compare", "small") if profile in methods.find(name).profiles), None)


def same_ground(
    names: Sequence[str],
    layer: Mapping[str, Any],
    profiles: Mapping[str, str | None],
    own_layers: Mapping[str, Mapping[str, Any]] = NOTHING,
    usual: Mapping[str, Any] = NOTHING,
) -> tuple[list[RunConfig], list[str]]:
    """A configuration for each method, and a note on each part of the ground that their profiles disagree on.

    An option that only some of the methods have is set for those. Where profiles disagree, all get the usual value,
    which `usual` may say; a method's own layer is above it, and `layer` above both.
    """
    if len(set(names)) < len(names):
        raise FedgistError(f"a method is named twice: {', '.join(names)}")
    own, shared = {name: method_options(name) for name in names}, options(RunConfig)
    for key in layer:
        check_known("option", key, {*shared, *(name for known in own.values() for name in known)})
    ground: dict[str, Any] = {}
    notes = []
    wanted = {name: configs.profile_of(name, profiles[name]) for name in names}
    for key in having(RunConfig, Role.GROUND):
        values = {name: wanted[name].get(key, shared[key].default) for name in names}
        if key in layer or key in usual or len(set(values.values())) == 1:
            continue
        ground[key] = shared[key].default
        differ = ", ".join(f"{name} has {value}" for name, value in values.items() if value != ground[key])
        notes.append(f"{key} {ground[key]} for all, where the profile of {differ}; another with --set {key}=…")
    resolved = []
    for name in names:
        fitting = {key: value for key, value in layer.items() if key in shared or key in own[name]}
        above = own_layers.get(name, {})
        resolved.append(configs.resolve(ground, usual, above, fitting, {"method": name}, profile=profiles[name]))
    return resolved, notes


def demo(only: Sequence[str] | None, ground: Mapping[str, Any]) -> tuple[list[RunConfig], list[str]]:
    """The demo profiles of the methods that have one, on real digits and with one model, and lines that say so."""
    able = [name for name in methods.available() if "demo" in methods.find(name).profiles]
    for name in only or ():
        check_known("method with a demo", name, able)
    dataset, notes = "mnist5k", [f"model {MODEL['model']} for all methods"]
    try:
        datasets.load(dataset)
    except FedgistError:
        dataset = "digits"
        notes.append("the 8×8 digits of scikit-learn stand in for MNIST, which 'fedgist[demo]' brings")
    names = only or able
    return same_ground(names, {**MODEL, **ground, "dataset": dataset}, dict.fromkeys(names, "demo"))[0], notes


def groups(folders: Sequence[Sequence[RunFolder]]) -> list[Group]:
    """The runs of each method together, which know of each other how clients did alone."""
    found = iter(beside_alone([read(folder) for group in folders for folder in group]))
    runs = [[next(found) for _ in group] for group in folders]
    return [Group(str(of[0].config["method"]), of) for of in runs]


def target(groups: Sequence[Group]) -> float:
    """The accuracy that rounds and bytes are counted to where nobody names one."""
    return usual_target(groups) or SHARE_OF_BEST * groups[0].accuracy
