"""Exact joining and leaving: the sums of one more site are added to a finished model of gist, or taken from it.

As sums over clients are sums over the union, the model is then that of a run with the other set of clients. A site
makes its sums with the model alone; they say what its reply in a run would have said.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch

import fedgist
from fedgist import engines, methods, storage
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.experiments import finishing, results, standardisation, trained
from fedgist.experiments import inputs as sources
from fedgist.experiments.config import OWN, RunConfig
from fedgist.experiments.folder import RunFolder, read_json
from fedgist.features import LinearModel, Moments
from fedgist.features.feature_map import below
from fedgist.learning.evaluation import scores
from fedgist.learning.ridge import symmetric, triangle
from fedgist.learning.sums import Sums

INEXACT = "joining and leaving are exact where nothing is clipped (clip from 2), mirrored, held out or a client's own"
FOREIGN = 20
"""So many times what rounding does, an eigenvalue below 0 is none: what was taken away was never there."""
PARTS = ("features", "labels", "products", "targets")
OF_ROUNDS = ("checkpoint", "metrics.jsonl", "fairness.json")
"""What is about the model of the rounds alone."""


def opened(run: Path) -> tuple[LinearModel, dict[str, torch.Tensor], trained.About]:
    """The model of gist in a folder, its tensors, and what is known about it."""
    stem = trained.stems(run).get(SERVER)
    module, about = trained.read(stem) if stem is not None else (None, None)
    model = getattr(module, "_model", None)
    if module is None or about is None or not isinstance(model, LinearModel):
        raise FedgistError(f"{run} holds no model of gist, to which sums could be added")
    w = dict(module.state_dict())
    if w["head.clip"] < 2:
        raise FedgistError(INEXACT)
    return model, w, about


def sums_of(run: Path, data: ClientData) -> Sums:
    """A site's sums, about the mean of the model in a folder."""
    model, w, about = opened(run)
    mean, clip = w["head.mean"], float(w["head.clip"])
    moments, fixed = Moments(model.features, about.classes, clip), below(w, "features")
    plan = data.epochs(Rng(0)("order"), 1, min(256, max(1, data.n)))
    with torch.no_grad():
        features, labels = moments.first(plan, data.pool, fixed)
        products, targets = moments.second(plan, data.pool, fixed, mean)
    return Sums(features, labels, symmetric(products), targets, mean.double(), clip)


def write(sums: Sums, path: Path) -> None:
    """As one file, which a site may send to whoever has the run."""
    storage.save({**packed(sums), "mean": sums.mean, "scale": sums.scale}, path)


def packed(sums: Sums) -> dict[str, torch.Tensor]:
    """The parts, of symmetric products half."""
    return {**{name: getattr(sums, name) for name in PARTS}, "products": triangle(sums.products)}


def read(path: Path, like: Sums) -> Sums:
    """What `write` wrote, if it can be about the same model; it may come from anybody."""
    try:
        kept = storage.load(path)
        found = {name: kept[name].double() for name in (*PARTS, "mean")}
        shapes = {name: tuple(found[name].shape) for name in found}
        wanted = {name: tuple(getattr(like, name).shape) for name in found}
        wanted["products"] = (len(like.mean) * (len(like.mean) + 1) // 2,)
        finite = all(bool(part.isfinite().all()) for part in found.values())
        if shapes != wanted or not finite or found["labels"].min() < 0:
            raise ValueError("sizes or numbers that do not fit")
        return Sums(**{**found, "products": symmetric(found["products"])}, scale=float(kept["scale"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FedgistError(f"{path} does not hold the sums of a site for this model ({error})") from error


def known(run: RunFolder) -> tuple[RunConfig, results.Result, Sums]:
    """A finished run, and the sums that its model is made of; or why nobody can be added to it."""
    if not run.finished:
        raise FedgistError(f"{run.path} holds no finished run")
    config = run.configuration()
    given = config.options
    if config.method != "gist":
        raise FedgistError(f"{run.path} is a run of {config.method}: only the model of gist is made of sums")
    if config.epsilon is not None or config.secure is not None:
        raise FedgistError(
            "noise and masks are over a set of clients as a whole: make the run again with the other set"
        )
    if given.clip < 2 or given.mirrored or given.ridge == "validation" or given.own:
        raise FedgistError(INEXACT)
    result = results.load(run)
    state = result.state
    if not state["answered"]:
        raise FedgistError(f"{run.path} has no sums: no client answered in it")
    kept = {name: tensor.double() for name, tensor in state["sums"].items()}
    kept["products"] = symmetric(kept["products"])
    return config, result, Sums(**kept, mean=state["mean"].double(), scale=given.clip)


def change(run: RunFolder, site: Sums, sign: int, out: Path) -> float:
    """Writes the run as it would be with the site (1) or without it (−1) into another folder; returns its accuracy."""
    config, result, sums = known(run)
    if out.exists():
        raise FedgistError(f"{out} is there already: choose another folder with --out")
    changed = sums.plus(site, sign).centred()
    inputs = sources.from_sites(config, ["site"]) if config.partition == OWN else sources.from_dataset(config)
    inputs = standardisation.recalled(config, inputs, run)
    method: Any = methods.find("gist")(config.options, inputs.task)
    # a run keeps its sums in float32, however they came
    classifier = changed.ridge(torch.float16 if method.wire == torch.float16 else torch.float32)
    if classifier.noise * changed.samples > FOREIGN * classifier.rounding * sums.samples:
        raise FedgistError("these sums are no part of the model's: what would be left are products of no samples")
    ridge = method.ridge_from(classifier, changed.samples, changed.spread)
    state = dict(result.state)
    fitted = {"mean": changed.mean, "weight": classifier.weights(ridge)}
    fitted |= {"intercept": changed.labels / changed.samples, "ridge": torch.tensor(ridge)}
    state |= {name: tensor.to(state[name]) for name, tensor in fitted.items()}
    state |= {"sums": {name: tensor.to(state["weight"]) for name, tensor in packed(changed).items()}}
    state["answered"] += sign
    w = method.weights(state)
    judged = scores(method.model, w, inputs.test)
    (found,) = engines.executor("sequential").drive([judged])
    shutil.copytree(run.path, out, ignore=shutil.ignore_patterns(*finishing.MADE_ANEW, *OF_ROUNDS))
    told = trained.read_about(run.path / "model.json")
    told = dataclasses.replace(told, accuracy=found["accuracy"], fedgist=fedgist.__version__)
    trained.Trained(told, method.model, w).save(RunFolder(out).model)
    RunFolder(out).append({**result.metrics[-1], **found})
    accuracies = dict.fromkeys(("accuracy", "accuracy_max", "accuracy_best5"), found["accuracy"])
    later = dataclasses.replace(result, state=state, weights=w, **accuracies)
    said = {key: value for key, value in read_json(run.result).items() if key not in ("fairness", "state_sha256")}
    members = [*said.get("members", []), {"change": sign, "samples": round(site.samples)}]
    results.save(later, RunFolder(out), {**said, "members": members})
    return found["accuracy"]
