"""Models that came out of a run, as two files each: NAME.safetensors with the tensors, NAME.json with all else.

The tensors have the names of the module's `state_dict`. Whoever reads the files trusts neither: what they say is
checked before anything is built from it.
"""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedgist
from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError, unknown
from fedgist.core.federation import SERVER
from fedgist.core.message import Params
from fedgist.core.task import Model, Task
from fedgist.engines.engine import Engine
from fedgist.experiments.config import OWN, RunConfig, is_own, model_spec
from fedgist.experiments.folder import RunFolder, read_json, write_json
from fedgist.experiments.inputs import Inputs
from fedgist.features import Ground, LinearModel, from_text
from fedgist.learning.evaluation import scores

WIDEST, MOST_INPUTS, MOST_CLASSES = 2**15, 2**26, 2**20
"""What a file may ask for: a width in an architecture, values of one input, classes."""


@dataclass(frozen=True)
class About:
    """What NAME.json says."""

    model: str
    """The architecture with all its options, as in `mlp:hidden=200x100:norm=none`; `own` is a caller's module."""
    module: str
    """The name of that module's class, or of the architecture."""
    input_shape: tuple[int, ...]
    classes: int
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...] | None
    """Subtracted for each channel from pixels of which full intensity is 1; None: the data came as it is."""
    std: tuple[float, ...] | None
    """Divided by then."""
    columns: tuple[str, ...] | None
    """Of a table, where they have names; a category is called NAME=VALUE."""
    low: tuple[float, ...] | None
    """The least that a value is after that, for each channel; None where that is not a number."""
    high: tuple[float, ...] | None
    method: str
    dataset: str
    client: str | None
    """Whose model it is; None is the server's."""
    seed: int
    rounds: int
    accuracy: float | None
    """Of just this model, where there was something to test it on."""
    measured_on: str
    fedgist: str

    @property
    def of_pixels(self) -> bool:
        """Whether what was normalised are pixels from 0 to 1: these became `low` and `high`."""
        if self.mean is None or self.std is None or self.low is None or self.high is None:
            return False
        channels = zip(self.low, self.high, self.mean, self.std, strict=True)
        ends = [end for low, high, mean, std in channels for end in (low * std + mean, high * std + mean - 1)]
        return max(map(abs, ends)) < 1e-4


NUMBERS = ("mean", "std", "low", "high")


@dataclass(frozen=True, eq=False)
class Trained:
    """A model that came out of a run."""

    about: About
    model: Model
    w: Params
    scores: Mapping[str, float] | None = None
    """All that its accuracy in `about` is one of; None where there was nothing to test it on."""

    def module(self) -> nn.Module:
        return models.as_module(self.model, self.w)

    def save(self, stem: Path) -> None:
        save(self.module(), self.about, stem)


def collect(engine: Engine, config: RunConfig, inputs: Inputs, test: tuple[Tensor, Tensor]) -> dict[str, Trained]:
    """The server's model where it is a whole one, and those that the clients in this process keep, by their names."""
    method, state = engine.method, engine.state
    found: list[tuple[str, Model, str, Params, tuple[Tensor, Tensor] | None]] = []
    server = method.weights(state)
    if server is not None and server.keys() == method.model.shapes.keys():
        found.append((SERVER, method.model, method.task.model, server, test))
    for me in engine.clients():
        w = method.client_weights(me, method.weights(state, me.info["model"]) or {})
        if w is not None:
            found.append((me.id, method.model_of(me), me.info["model"], w, me.data.test))
    tests = {name: scores(net, w, some) for name, net, _, w, some in found if some and len(some[1])}
    scored = dict(zip(tests, engine.executor.drive(list(tests.values())), strict=True))
    made = {}
    for name, net, spec, w, samples in found:
        about = describe(
            method.task,
            spec,
            net,
            class_names=inputs.names or None,
            columns=inputs.columns or None,
            method=config.method if config.finish is None else f"{config.method}, finished with {config.finish}",
            dataset=config.dataset,
            client=None if name == SERVER else name,
            seed=config.seed,
            rounds=config.rounds,
            accuracy=scored[name]["accuracy"] if name in scored else None,
            measured_on=_measured_on(config, 0 if samples is None else len(samples[1]), name != SERVER),
        )
        made[name] = Trained(about, net, tree.to(w, "cpu"), scored.get(name))
    return made


def _measured_on(config: RunConfig, samples: int, own: bool) -> str:
    kind = "held-out training" if config.validation else "test"
    some = {"own-labels": " of the client's labels", "own-share": " of the client"}.get(config.client_test, "") * own
    seen = ", as the client sees them" * (own and bool(config.discrepancy))
    return f"{samples} {kind} samples of {config.dataset}{some}{seen}"


def describe(task: Task, spec: str, net: Model, **others: Any) -> About:
    """What follows from the task and an architecture in it, with what else there is to say."""
    name, options = model_spec(spec)
    whole = OWN if is_own(spec) else models.spell_out(name, **options)
    return About(
        model=net.spec.format(net=whole.replace(":", ";")) if isinstance(net, LinearModel) else whole,
        module=net.name,
        input_shape=tuple(task.shape),
        classes=task.classes,
        low=_finite(task.low),
        high=_finite(task.high),
        mean=task.mean or None,
        std=task.std or None,
        fedgist=fedgist.__version__,
        **others,
    )


def save(module: nn.Module, about: About, stem: Path) -> None:
    """Writes both files; what is needed to read the tensors comes last."""
    storage.save_tensors(module.state_dict(), stem.with_name(f"{stem.name}.safetensors"))
    said = dataclasses.asdict(about)
    numbers = {name: said.pop(name) for name in NUMBERS}
    write_json(stem.with_name(f"{stem.name}.json"), {**said, "normalisation": numbers})


def write(made: Mapping[str, Trained], folder: RunFolder) -> None:
    for name, one in made.items():
        one.save(folder.model if name == SERVER else folder.clients / name)


def stems(path: Path) -> dict[str, Path]:
    """The models in a folder, by the name of whose they are; of a file, the one that it belongs to."""
    if path.suffix in (".safetensors", ".json") and not path.is_dir():
        return {SERVER: path.with_suffix("")} if path.is_file() else {}
    here = {SERVER: path / "model"} if (path / "model.json").is_file() else {}
    return here | {found.stem: found.with_suffix("") for found in sorted((path / "clients").glob("*.json"))}


def choose(found: Mapping[str, Any], client: str | None, where: object) -> Any:
    """The one that is asked for: a client's, or the server's, or the only one that there is."""
    if client is not None:
        if [*found] == [SERVER]:
            raise FedgistError(f"in {where} clients keep no models: there is the server's alone, so leave out --client")
        if client not in found:
            raise unknown(f"client with a model in {where}", client, [name for name in found if name != SERVER])
        return found[client]
    if SERVER not in found and len(found) != 1:
        few = ", ".join([*found][:3]) + (", …" if len(found) > 3 else "")
        raise FedgistError(f"in {where} every client has a model of its own: name one of {few} as client (--client)")
    return found.get(SERVER, next(iter(found.values())))


def read(stem: Path, own: nn.Module | None = None) -> tuple[nn.Module, About]:
    """The module with its weights, in eval mode, and what is known about it; `own` is a caller's module to fill."""
    about = read_about(stem.with_name(f"{stem.name}.json"))
    path = stem.with_name(f"{stem.name}.safetensors")
    try:
        tensors = storage.load_tensors(path)
    except (OSError, ValueError) as error:
        raise FedgistError(f"{path} cannot be read ({error}); copy the model again") from error
    made = _own(about, own, path) if about.model == OWN or own is not None else _net(about, path, tensors)
    if isinstance(made, nn.Module):
        wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in made.state_dict().items()}
    else:  # without a number: as many as its .json asks for may not be there
        wanted = {name: (torch.Size(shape), torch.float32) for name, shape in made.shapes.items()}
    for name in [*wanted, *tensors]:
        if name not in tensors or name not in wanted:
            there = "lacks" if name not in tensors else "has"
            raise FedgistError(f"{path} is not of the model {about.model} that its .json names: it {there} {name!r}")
        if (found := (tensors[name].shape, tensors[name].dtype)) != wanted[name]:
            kinds = [f"{str(dtype).removeprefix('torch.')} {list(shape)}" for shape, dtype in (found, wanted[name])]
            raise FedgistError(f"{path} is not of the model {about.model}: {name!r} is {kinds[0]}, not {kinds[1]}")
    if not isinstance(made, nn.Module):
        return models.as_module(made, {name: tensors[name] for name in wanted}), about
    made.load_state_dict(tensors)
    return made.eval(), about


def _own(about: About, own: nn.Module | None, path: Path) -> nn.Module:
    """A copy of a caller's module."""
    if own is None:
        raise FedgistError(f"{path} is of your own module {about.module}: fedgist.load(…, module=…) fills it")
    if about.model != OWN:
        raise FedgistError(f"{path} is of the model {about.model}, which is built in: leave out module")
    return copy.deepcopy(own)


def _net(about: About, path: Path, tensors: Params) -> Model:
    """The model that the description names."""
    if not about.model.startswith("gist:"):
        return _built(about, about.model)
    net = _linear(about, path)
    numbers, least = sum(tensor.numel() for tensor in tensors.values()), net.feature_size * net.classes
    if least > numbers:  # what its features are made with is drawn before it can be compared
        raise FedgistError(
            f"{path} is not of the model {about.model} that its .json names: it holds {numbers:,} numbers, and such a "
            f"model at least {least:,}"
        )
    return net


def _built(about: About, spec: str) -> Model:
    name, options = model_spec(spec)
    return models.build(name, about.input_shape, about.classes, **options)


def _linear(about: About, path: Path) -> Model:
    """A linear model on features, of which those of a net say which net."""
    low, high = about.low or (), about.high or ()

    def ground(net: str) -> Ground:
        if net == OWN:
            raise FedgistError(f"{path} is about features of your own module {about.module}: only its run can use it")
        return Ground(about.input_shape, low, high, _built(about, net))

    return from_text(model_spec(about.model)[1], ground)


def normalising(module: nn.Module, about: About) -> nn.Module:
    """The module, made to take what the data set holds: pixels of which full intensity is 1."""
    return module if about.mean is None or about.std is None else models.Normalised(module, about.mean, about.std)


def read_about(path: Path) -> About:
    """What NAME.json says, if all of it can be true."""
    said = read_json(path)
    if not isinstance(said, dict) or not isinstance(said.get("normalisation"), dict):
        raise FedgistError(f"{path} is not the description of a model")
    said = {**said, **said["normalisation"]}

    def take(name: str, fits: Callable[[Any], bool], words: str) -> Any:
        value = said.get(name)
        if not fits(value):
            raise FedgistError(f"{path}: {name} must be {words}, not {json.dumps(value)[:60]}")
        return tuple(value) if isinstance(value, list) else value

    shape = take("input_shape", _is_shape, "1 to 8 positive whole numbers")
    classes = take("classes", lambda v: _is_whole(v, 1, MOST_CLASSES), "a positive whole number")

    def per_channel(value: Any) -> bool:
        return isinstance(value, list) and len(value) == shape[0] and all(map(_is_number, value))

    scale = {
        "mean": take("mean", lambda v: v is None or per_channel(v), f"{shape[0]} numbers"),
        "std": take("std", lambda v: v is None or (per_channel(v) and min(v) > 0), f"{shape[0]} numbers above 0"),
    }
    if (scale["mean"] is None) != (scale["std"] is None):
        raise FedgistError(f"{path}: mean and std must be both there or both missing")
    ends = {name: take(name, lambda v: v is None or per_channel(v), f"{shape[0]} numbers") for name in ("low", "high")}
    words = {name: take(name, _is_text, "a short text") for name in ("module", "method", "dataset", "measured_on")}
    return About(
        model=take("model", _is_spec, "an architecture as in mlp:hidden=200x100"),
        input_shape=shape,
        classes=classes,
        class_names=take("class_names", lambda v: v is None or _are_names(v, classes), f"{classes} short texts"),
        columns=take("columns", lambda v: v is None or _are_names(v, shape[0]), f"{shape[0]} short texts"),
        client=take("client", lambda v: v is None or _is_text(v), "a short text"),
        seed=take("seed", lambda v: _is_whole(v, 0, 2**63), "a whole number"),
        rounds=take("rounds", lambda v: _is_whole(v, 0, 2**63), "a whole number"),
        accuracy=take("accuracy", lambda v: v is None or (_is_number(v) and 0 <= v <= 1), "a number from 0 to 1"),
        fedgist=take("fedgist", _is_text, "a version"),
        **words,
        **scale,
        **ends,
    )


def _finite(values: tuple[float, ...]) -> tuple[float, ...] | None:
    return values if all(map(math.isfinite, values)) else None  # a caller's data may hold anything; JSON may not


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 500 and value.isprintable()


def _is_spec(value: Any) -> bool:
    """Numbers are bounded here, because a model is built to see what its tensors should be."""
    return _is_text(value) and all(len(n) <= 6 and int(n) <= WIDEST for n in re.findall(r"\d+", value))


def _is_shape(value: Any) -> bool:
    sides = isinstance(value, list) and 1 <= len(value) <= 8 and all(_is_whole(n, 1, MOST_INPUTS) for n in value)
    return sides and math.prod(value) <= MOST_INPUTS


def _are_names(value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(map(_is_text, value))
