"""What a federation holds before its first round: clients with their data, a test set, a task, models."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist import methods, models
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data import datasets, discrepancies, partitions
from fedgist.data.client_data import ClientData
from fedgist.experiments import own_data
from fedgist.experiments.config import RunConfig, model_spec, proxy_spec
from fedgist.models import Model, ModuleModel, own_code

Makers = Mapping[str, Callable[[tuple[int, ...], int], Model]]
"""A caller's own models by name: how each is made from the shape of an input and the number of classes."""

NONE: Makers = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Inputs:
    """Data and models, ready to run."""

    task: Task
    sites: dict[str, ClientData]
    info: dict[str, dict[str, Any]]
    """What each client announces: its architecture, nothing about its data."""
    test: tuple[Tensor, Tensor]
    counts: dict[str, list[int]]
    """How many samples of each class each client holds."""
    sha256: str
    """Of who holds what: of the indices of a split data set, of the data itself when a caller brought it."""
    parts: dict[str, np.ndarray] | None = None
    """Which training samples each client holds, where a data set was split."""
    names: tuple[str, ...] = ()
    """Of the classes, where they are known."""
    columns: tuple[str, ...] = ()
    """Of a table, where they have names."""
    unstated: tuple[int, ...] = ()
    """Channels that are standardised once clients have exchanged sums of them."""

    def who_runs_what(self) -> str:
        """Which clients have which model, and what to set so that all have one."""
        holders: dict[str, list[str]] = {}
        for id, about in self.info.items():
            holders.setdefault(about["model"], []).append(id)
        found = [f"{model} at {', '.join(ids[:3])}{', …' * (len(ids) > 3)}" for model, ids in holders.items()]
        one = next(iter(holders)) if len(holders) == 1 else "NAME, here and at every site"
        return (
            f"there is {' and '.join(found)}: set --model {one}, or take a method for models of their own, as repshare"
        )


def from_dataset(config: RunConfig, own_models: Makers = NONE) -> Inputs:
    """A data set, split over the clients as the configuration says."""
    train, test = _loaded(config, public=config.epsilon is not None)
    settings = {name: getattr(config, name) for name in partitions.options(config.partition)}
    seed = config.seed if config.partition_seed is None else config.partition_seed
    proxy, rest = _proxy(config, train, Rng(seed)("proxy"))
    groups = None if train.groups is None else train.groups[rest.cpu()]
    rng = Rng(seed)("partition")
    cut = partitions.split(train.y[rest], config.clients, rng, config.partition, groups, test.y, **settings)
    parts = [rest.cpu().numpy()[part] for part in cut]
    shares = [train.take(part) for part in parts]
    clients = [ClientData(share.x, share.y, train.classes) for share in shares]
    _check_categories(config, train.columns)
    named = _models(config, train.shape, train.classes, own_models)
    task = _task(config, train, named, proxy)
    made = _inputs(config, task, clients, (test.x, test.y), parts)
    return replace(made, names=train.names, columns=train.columns, unstated=train.unstated)


def _loaded(config: RunConfig, public: bool = False) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The train and the test set, on the run's device; `public`: normalised by public numbers alone."""
    both = datasets.load(config.dataset, config.data_dir, config.normalise, config.limit, public)
    train, test = (replace(one, x=one.x.to(config.device), y=one.y.to(config.device)) for one in both)
    return train, test


def _task(config: RunConfig, train: datasets.Dataset, named: dict[str, Model], proxy: Tensor | None) -> Task:
    form = train.shape, train.classes, train.low, train.high
    return Task(*form, named, config.model, proxy, train.mean, train.deviation, config.epsilon is not None)


def _proxy(config: RunConfig, train: datasets.Dataset, rng: Rng) -> tuple[Tensor | None, Tensor]:
    """The server's unlabelled images, if any, and the indices of the training samples that are left for the clients."""
    everything = torch.arange(len(train), device=train.y.device)
    if config.proxy is None:
        return None, everything
    name, count = proxy_spec(config.proxy)
    other = name is not None and name != config.dataset
    source = datasets.load(name, config.data_dir, config.normalise)[0] if name is not None and other else train
    if source.shape != train.shape:
        raise FedgistError(f"proxy images of {name} have shape {source.shape}, those of {config.dataset} {train.shape}")
    if count > len(source) - (not other):
        raise FedgistError(f"proxy asks for {count} of the {len(source)} images there are, and clients need some")
    chosen = rng.permutation(len(source))[:count].sort().values
    proxy = source.x[chosen.to(source.x.device)].to(train.x.device)
    return proxy, everything if other else everything[~torch.isin(everything, chosen.to(everything.device))]


def from_memory(
    config: RunConfig,
    data: Mapping[str, Any],
    test: Any,
    classes: int | None = None,
    own_models: Makers = NONE,
) -> Inputs:
    """A caller's own data, by the names of clients; without `classes`, the largest label gives them."""
    held = {name: own_data.pair(f"client {name}", both, config.device) for name, both in data.items()}
    pairs, test = list(held.values()), own_data.pair("the test set", test, config.device)
    if not len(test[1]):
        raise FedgistError("the test set is empty: give test=(x, y) with at least one sample")
    if not sum(len(y) for _, y in pairs):
        raise FedgistError("data must be a list of (x, y) pairs, one a client, with at least one sample in all")
    shape = tuple(test[0].shape[1:])
    for i, (x, _) in held.items():
        if x.shape[1:] != shape:
            raise FedgistError(f"client {i} has inputs of shape {tuple(x.shape[1:])}, the test set of {shape}")
    labels = 1 + max(int(y.max()) for _, y in [*pairs, test] if len(y))
    if classes is None:
        classes = labels
    elif labels > classes:
        raise FedgistError(f"there is a label {labels - 1}, but classes = {classes} allows 0 to {classes - 1}")
    channels = test[0].movedim(1, 0).flatten(1)  # the range of values is public, so it comes from the test set
    low, high = (tuple(ends.tolist()) for ends in (channels.amin(1), channels.amax(1)))
    named = _models(config, shape, classes, own_models)
    task = Task(shape, classes, low, high, named, config.model, private=config.epsilon is not None)
    made = _inputs(config, task, [ClientData(x, y, classes) for x, y in pairs], test, None, list(held))
    return replace(made, unstated=tuple(range(shape[0])) if config.normalise == "sums" else ())


def from_code(config: RunConfig, code: str) -> ModuleModel:
    """A module of the operator's own, made for the data set of a run."""
    train, _ = datasets.load(config.dataset, config.data_dir, config.normalise, config.limit)
    return own_code.load(code, train.shape, train.classes)


def from_sites(config: RunConfig, sites: Sequence[str], code: Mapping[str, Model] | None = None) -> Inputs:
    """The server's part of a federation whose sites hold the data: what is learned, who takes part, the test set.

    `code` are models of the operator's own, by the names under which they are announced.
    """
    train, test = _loaded(config)
    _check_categories(config, train.columns)
    proxy, _ = _proxy(config, train, Rng(config.seed)("proxy"))
    task = _task(config, train, dict(code or {}), proxy)
    announced: dict[str, dict[str, Any]] = {name: {} for name in sorted(sites)}
    known = Inputs(task, {}, announced, (test.x, test.y), {}, sha256="", names=train.names, columns=train.columns)
    return with_architectures(config, replace(known, unstated=train.unstated))


def with_architectures(config: RunConfig, known: Inputs) -> Inputs:
    """A federation's part, with the architectures that the configuration now has for its sites; what is built stays."""
    built: Makers = {spec: lambda *form, model=model: model for spec, model in known.task.models.items()}
    task = replace(known.task, models=_models(config, known.task.shape, known.task.classes, built))
    return replace(known, task=task, info=_dealt(config.architectures or (config.model,), known.info))


def _dealt(architectures: Sequence[str], ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What each announces: its architecture, which are dealt out in turn."""
    return {id: {"model": architectures[i % len(architectures)]} for i, id in enumerate(ids)}


def _check_categories(config: RunConfig, columns: Sequence[str]) -> None:
    """Categories that `tabular` is told of are the last ones of the table, whose columns are called NAME=VALUE."""
    names = [column.partition("=")[0] for column in columns if "=" in column]
    there = tuple(names.count(name) for name in dict.fromkeys(names))
    for spec in (config.model, *config.architectures):
        name, options = model_spec(spec)
        told = options.get("categories", ())
        told = told if isinstance(told, tuple) else (told,)
        if name == "tabular" and columns and told != there[max(0, len(there) - len(told)) :]:
            known = "x".join(map(str, there))
            hint = f"{', '.join(dict.fromkeys(names))}: categories={known}" if there else "none: leave categories out"
            raise FedgistError(f"{spec}: the categories of {config.dataset} are {hint}")


def _models(config: RunConfig, shape: tuple[int, ...], classes: int, own: Makers) -> dict[str, Model]:
    """Every architecture of the run by the name that the configuration gives it."""
    specs = dict.fromkeys((config.model, *config.architectures))
    return {spec: own[spec](shape, classes) if spec in own else build_model(spec, shape, classes) for spec in specs}


def build_model(spec: str, shape: tuple[int, ...], classes: int) -> Model:
    """The model that a text describes; of one that is a site's own code, what others know of it."""
    name, options = model_spec(spec)
    if name == own_code.ELSEWHERE:
        return own_code.from_afar(spec, shape, classes)
    return models.build(name, shape, classes, **options)


def _inputs(
    config: RunConfig,
    task: Task,
    clients: list[ClientData],
    test: tuple[Tensor, Tensor],
    parts: list[np.ndarray] | None,
    ids: list[str] | None = None,
) -> Inputs:
    """Names the clients and gives each its architecture and what it tests its own model on."""
    ids = ids or list(own_data.by_client(clients))
    dealt = config.architectures or (task.model,)
    sha256 = _sha256(parts or [array.cpu().numpy() for client in clients for array in (client.x, client.y)])
    if config.validation:
        clients, test = _held_out(config, dict(zip(ids, clients, strict=True)))
    if config.discrepancy:
        clients, test = _seen_differently(config, task.classes, clients, test)
    counts = {name: client.counts().tolist() for name, client in zip(ids, clients, strict=True)}
    named = dict(zip(ids, parts, strict=True)) if parts else None
    if methods.find(config.method).pooled:
        clients, ids, dealt = [_pooled(clients)], ["0"], (task.model,)
    clients = [replace(client, test=_client_test(config, client, client.test or test)) for client in clients]
    sites = dict(zip(ids, clients, strict=True))
    return Inputs(task, sites, _dealt(dealt, ids), test, counts, sha256, named)


def _held_out(config: RunConfig, clients: Mapping[str, ClientData]) -> tuple[list[ClientData], tuple[Tensor, Tensor]]:
    """The clients without a share of their samples, drawn at random, and all those shares as the test set."""
    kept, apart = [], []
    for id, client in clients.items():
        order = Rng(config.seed)("validation", id).permutation(client.n).to(client.y.device)
        count = int(config.validation * client.n + 1e-9)
        held, rest = order[:count], order[count:]
        apart.append((client.x[held], client.y[held]))
        own = apart[-1] if config.client_test == "own-share" else client.test
        kept.append(replace(client, x=client.x[rest], y=client.y[rest], test=own))
    test = torch.cat([x for x, _ in apart]), torch.cat([y for _, y in apart])
    if not len(test[1]):
        raise FedgistError(f"validation = {config.validation} of so few samples leaves nothing to judge on")
    return kept, test


def _seen_differently(
    config: RunConfig, classes: int, clients: list[ClientData], test: tuple[Tensor, Tensor]
) -> tuple[list[ClientData], tuple[Tensor, Tensor]]:
    """Every client's view of its own data and of its part of the test set; the server tests on all parts together."""
    seed = config.seed if config.partition_seed is None else config.partition_seed
    views = discrepancies.views(config.discrepancy, len(clients), classes, Rng(seed)("discrepancy"))
    seen = []
    for i, (client, view) in enumerate(zip(clients, views, strict=True)):
        x, y = view(client.x, client.y)
        part = slice(i, None, len(clients))
        seen.append(replace(client, x=x, y=y, test=view(test[0][part], test[1][part])))
    tests = [client.test for client in seen if client.test is not None]
    return seen, (torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests]))


def _client_test(config: RunConfig, client: ClientData, test: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if config.client_test != "own-labels":
        return test  # the same tensors for all: they are on the device once
    mine = torch.isin(test[1], client.y.unique())
    return test[0][mine], test[1][mine]


def _pooled(clients: list[ClientData]) -> ClientData:
    """All data in one place, for the method that shows what that would give."""
    return ClientData(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]), clients[0].classes)


def _sha256(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
