"""Toy federations in one process: the one builder of all tests, and the small data that most of them are about."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedgist import methods, models, options
from fedgist.core import tree
from fedgist.core.federation import Answers, Ask
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Task
from fedgist.core.tree import Tree
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.engines.scheduler import Executor
from fedgist.experiments.config import RunConfig, model_spec, resolve
from fedgist.experiments.inputs import Inputs, from_dataset

SHAPE, CLASSES = (1, 8, 8), 4
NOTHING = ClientData(torch.zeros(0, 1, 1, 1), torch.zeros(0, dtype=torch.int64), 2)
"""The data of a client that needs none."""

Sites = Mapping[str, ClientData]
Nets = str | Model | Sequence[str]


def clients(
    *sizes: int,
    shape: tuple[int, ...] = SHAPE,
    classes: int = CLASSES,
    test: int = 0,
    seed: int = 3,
    name: str = "{}",
) -> dict[str, ClientData]:
    """Clients with so many samples each of noise with random labels, and `test` images that all of them share."""
    rng = Rng(seed)
    tests = (rng("test").normal(test, *shape), rng("labels").integers(classes, test)) if test else None
    return {
        name.format(i): ClientData(rng("x", i).normal(n, *shape), rng("y", i).integers(classes, n), classes, tests)
        for i, n in enumerate(sizes)
    }


def by_label(counts: Mapping[str, Sequence[int]]) -> dict[str, ClientData]:
    """Clients with so many samples of each class, with pixels between 0 and 1."""
    rng = Rng(4)
    labels = {id: torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for id, n in counts.items()}
    return {id: ClientData(rng(id).uniform(len(y), *SHAPE), y, len(counts[id])) for id, y in labels.items()}


def task_of(nets: Nets, shape: tuple[int, ...] = SHAPE, classes: int = CLASSES, proxy: Tensor | None = None) -> Task:
    """A task with a net, or with several by their texts such as `mlp:hidden=6`: the first is the server's.

    Methods that need images of nobody's get noise unless there is a `proxy`.
    """
    named: dict[str, Model] = {}
    for net in [nets] if isinstance(nets, str) or not isinstance(nets, Sequence) else nets:
        if isinstance(net, str):
            base, about = model_spec(net)
            named[net] = models.build(base, shape, classes, **about)
        else:
            named[net.name] = net
    images = Rng(1).normal(20, *shape) if proxy is None else proxy
    return Task(shape, classes, (0.0,) * shape[0], (1.0,) * shape[0], named, next(iter(named)), images)


def federation(
    method: str | Method,
    sites: Sites,
    nets: Nets = "mlp",
    *,
    engine: str | Executor = "sequential",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    proxy: Tensor | None = None,
    parts: Mapping[str, Any] | None = None,
    info: Mapping[str, Mapping[str, str]] | None = None,
    ledger: Any = None,
    topology: Any = None,
    offline: Any = 0.0,
    delay: Any = 0,
    between: Any = None,
    **settings: Any,
) -> LocalEngine:
    """A federation of these sites, which have the nets in turn.

    method: its name, with its options as `settings` and what else it is made of as `parts`; or one made already.
    engine: the name of an executor for `device` and `dtype`; or one made already.
    between: the layer between replies and sums, under a name that no method has for an option.
    """
    if isinstance(method, str):
        data = next(iter(sites.values()))
        task = task_of(nets, tuple(data.x.shape[1:]), data.classes, proxy)
        names, kind = list(task.models), methods.find(method)
        info = info or {id: {"model": names[i % len(names)]} for i, id in enumerate(sites)}
        method = kind(options.build(kind.Config, settings), task, **(parts or {}))
    else:
        assert not (settings or parts or proxy), "a method that is made already takes no settings"
    runner = executor(engine, device, dtype) if isinstance(engine, str) else engine
    about = {"ledger": ledger, "info": info, "topology": topology, "offline": offline, "delay": delay, "layer": between}
    return LocalEngine(method, sites, seed=seed, executor=runner, **about)


@cache
def _toy(layer: tuple[tuple[str, Any], ...]) -> tuple[RunConfig, Inputs]:
    given = dict(layer)
    config = resolve(given, profile="toy" if "toy" in methods.find(given["method"]).profiles else None)
    return config, from_dataset(config)


def toy(method: str, **layer: Any) -> tuple[RunConfig, Inputs]:
    """A method's toy profile on real 8×8 digits, 300 of them unless said otherwise; made once for all tests."""
    return _toy(tuple({"method": method, "dataset": "digits", "limit": 300, "device": "cpu", **layer}.items()))


ENGINE = ("engine", "dtype", "seed", "ledger", "topology", "offline", "delay", "between")


def toy_federation(method: str, sites: Sites | None = None, **given: Any) -> LocalEngine:
    """The federation of `toy`, or one with other sites; what is not for the engine is an option of run or method."""
    config, inputs = toy(method, **{key: value for key, value in given.items() if key not in ENGINE})
    built = methods.find(method)(config.options, inputs.task)
    about = {key: value for key, value in given.items() if key in ENGINE}
    return federation(built, inputs.sites if sites is None else sites, info=inputs.info, **about)


def received(engine: LocalEngine) -> list[Answers]:
    """What the askers get from now on, exchange after exchange."""
    kept: list[Answers] = []
    collect = engine.collect

    def keep(ask: Ask) -> Any:
        kept.append(collect(ask))  # type: ignore[arg-type]
        return kept[-1]

    engine.collect = keep  # type: ignore[method-assign]
    return kept


def play(engine: LocalEngine, rounds: int = 1) -> LocalEngine:
    """So many rounds, none of which may be skipped, or lead to what is not a number."""
    for _ in range(rounds):
        assert engine.run_round().skipped is None
    assert not engine.diverged()
    return engine


def apart(one: Tree, other: Tree) -> float:
    """The norm of the difference."""
    return float(tree.norm(tree.sub(one, other)))
