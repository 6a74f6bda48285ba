"""`fedgist.run`: a method on a caller's own model and data, or on a named data set, from Python."""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fedgist.core.errors import FedgistError
from fedgist.experiments import config as configs
from fedgist.experiments import inputs as sources
from fedgist.experiments import report as reports
from fedgist.experiments import runner, trained
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.engine_choice import fitting_engine
from fedgist.experiments.folder import RunFolder, run_folders
from fedgist.experiments.own_data import Chosen, architectures, by_client
from fedgist.experiments.progress import choose
from fedgist.experiments.runner import Result
from fedgist.experiments.trained import About
from fedgist.models import from_module
from fedgist.options import Role, having


def run(
    method: str,
    model: Chosen | Sequence[Chosen] | Mapping[str, Chosen] = "mlp",
    data: str | Sequence[Any] | Mapping[str, Any] = "digits",
    test: Any = None,
    *,
    classes: int | None = None,
    classifier: str | None = None,
    profile: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    **options: Any,
) -> Result:
    """Run a method and return its result.

    `data` is a list with one item a client, or a dict of them by the clients' names: a pair (inputs, labels) of float
    numbers [samples, columns] or [samples, channels, …] and whole numbers from 0 (tensors, arrays, lists, what pandas
    has), or a torch `Dataset` of such pairs, or a `DataLoader` (of which only the data set counts); then `test` is
    needed, of the same kind. Or it is the name of a data set, which is split over the clients. `model` is a module,
    whose weights are the start, or the name of one; where the method lets clients have models of their own, a list with
    one for each, or a dict by their names; the first is the server's. `classes` is needed where not every class occurs
    in the data, `classifier` where the layer that turns features into class scores is not the module's last linear one.
    `options` are those of the run and of the method, as in `rounds=20, lr=0.1`; `fedgist config METHOD` shows them all.
    Without `out` nothing is written; with it, a folder as of `fedgist run`, with its report where plotly is there.
    """
    if int(options.get("seeds", 1)) != 1:
        raise FedgistError("fedgist.run makes one run; for several seeds call it with seed=0, seed=1, …")
    if "dataset" in options:
        raise FedgistError(f"fedgist.run takes a data set as data={options['dataset']!r}, not as dataset")
    held = None if isinstance(data, str) else by_client(data)
    specs, modules = architectures(model, None if held is None else list(held))
    if held is not None and len(specs) not in (1, len(held)):
        raise FedgistError(f"there are {len(specs)} models for {len(held)} clients: give one, or one for each")
    own = {name: partial(from_module, module, classifier=classifier) for name, module in modules.items()}
    fixed = {"method": method, "model": specs[0]} | ({"architectures": tuple(specs)} if len(specs) > 1 else {})
    if held is None:
        if test is not None or classes is not None:
            raise FedgistError(f"data set {data!r} has its own test set and classes; give them with data of your own")
        config = configs.resolve(options, fixed, {"dataset": data}, profile=profile)
        load = partial(sources.from_dataset, own_models=own)
    else:
        if test is None:
            raise FedgistError("data of your own needs a test set: test=(x, y)")
        if said := [key for key in having(RunConfig, Role.SITES) if key in options and key != "architectures"]:
            raise FedgistError(f"data of your own says who the clients are, one a pair: leave out {said[0]}")
        if said := [key for key in ("data_dir", "limit", "proxy") if options.get(key) is not None]:
            raise FedgistError(f"data of your own is taken as it is: leave out {said[0]}")
        if options.get("normalise", "sums") not in ("dataset", "sums"):
            raise FedgistError(f"data of your own is taken as it is, or normalise='sums', not {options['normalise']!r}")
        brought = {"dataset": OWN, "partition": OWN, "clients": max(1, len(held))}
        config = configs.resolve(options, fixed, brought, profile=profile)
        load = partial(sources.from_memory, data=held, test=test, classes=classes, own_models=own)
    if config.engine == "auto" and not (resume and out is not None and RunFolder(out).started):
        config = dataclasses.replace(config, engine=fitting_engine(config, modules))
    shown = choose(quiet=not progress)
    result = runner.run(config, out, resume=resume, load=load, progress=shown, overwrite=overwrite)
    if result.folder is not None:
        with suppress(reports.MissingPlotly):
            reports.write([RunFolder(result.folder)], RunFolder(result.folder).report)
    return result


def load(
    run: Result | str | Path, client: str | None = None, normalised: bool = False, module: nn.Module | None = None
) -> nn.Module:
    """A model that came out of a run, in eval mode: class scores of inputs [samples, *shape].

    `run` is a result, the folder of a run, or one that `fedgist export` or `fedgist site export` wrote. `client` names
    whose model it is, where clients keep their own. With `normalised` it takes values as in the data
    (pixels from 0 to 1); else they have to be normalised as model.json says. `module` is your own one that was trained:
    a copy of it gets the weights.
    """
    found, about = loaded(run, client, module)
    return trained.normalising(found, about) if normalised else found


def loaded(run: Result | str | Path, client: str | None, module: nn.Module | None = None) -> tuple[nn.Module, About]:
    """The module as it was trained, and what is known about it."""
    if isinstance(run, Result) and run.trained:
        one = trained.choose(run.trained, client, "this run")
        return one.module(), one.about
    path = Path(str(run.folder if isinstance(run, Result) else run)).expanduser()
    if found := trained.stems(path):
        return trained.read(trained.choose(found, client, path), module)
    folders = run_folders(path)
    if folders[0].path != path:
        raise FedgistError(f"{path} holds {len(folders)} runs: name one of them, as {folders[0].path}")
    config = folders[0].configuration()
    if config.partition == OWN != config.dataset:
        raise FedgistError(f"{path} has no model of the server; sites keep theirs: `fedgist site export` there")
    how = "make it again in another folder" if folders[0].finished else f"finish it with --resume --out {path}"
    raise FedgistError(f"{path} holds a run without its model; {how}")
