"""Who gains by taking part: the accuracy of every client, beside that of the model that it would have learned alone.

A client is judged twice, on the test images of the labels that it holds and on everybody's test set; by the global
model where there is one, and by its own where it keeps one. Alone means a run of `independent` on the same ground.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.federation import SERVER, Site
from fedgist.core.task import Samples
from fedgist.engines.engine import Engine
from fedgist.experiments import config as configs
from fedgist.experiments.config import RunConfig
from fedgist.experiments.folder import RunFolder, read_json
from fedgist.experiments.trained import Trained
from fedgist.families.local_training import TrainingOptions
from fedgist.learning.evaluation import scores
from fedgist.options import options

ALONE = "independent"
OWN_LABELS, EVERYONE = "own labels", "everyone"
GLOBAL, OWN = "global", "own"

Parts = dict[str, dict[str, float]]
"""What was tested on (own labels, everyone) -> client -> accuracy."""
Accuracies = dict[str, Parts]
"""Whose model (global, own) -> the above."""


@dataclass(frozen=True)
class Fairness:
    """How a run did by its clients, by one model and on one part of the tests."""

    clients: int
    mean: float
    worst_tenth: float
    """The mean over the tenth of the clients, at least one, that fare worst."""
    deviation: float
    """Between clients."""
    gain: int | None = None
    """How many clients are more accurate than alone; this and what follows only where alone is known."""
    lose: int | None = None
    gain_mean: float | None = None
    gain_worst_tenth: float | None = None
    losers: dict[str, float] | None = None
    """Who is less accurate than alone, and by how much, the greatest loss first."""


def by_client(engine: Engine, test: Samples, last: Mapping[str, Any], made: Mapping[str, Trained]) -> Accuracies:
    """The accuracy of each client in this process; `last` is the evaluation on `test` after the last round, `made` are
    the models that came out, each judged on its owner's test set where there is one."""
    method = engine.method
    # data in one place is nobody's own
    clients = [] if method.pooled else [replace(me, state={}) for me in engine.clients()]
    own = [me for me in clients if me.id in made]
    found: Accuracies = {}
    if clients and (not own or SERVER in made):
        judged = {me.id: last if _common(me, test) else engine.evaluate(_test_of(me, test)) for me in clients}
        everyone = {me.id: float(last["accuracy"]) for me in clients if last.get("accuracy") is not None}
        found[GLOBAL] = _parts(clients, judged, everyone, test)
    if own:
        known = {me.id: one for me in own if (one := made[me.id].scores) is not None}
        others = [me for me in own if me.id not in known or not _common(me, test)]
        todo = [scores(made[me.id].model, engine.executor.place.put(made[me.id].w), test) for me in others]
        on_all = known | dict(zip([me.id for me in others], engine.executor.drive(todo), strict=True))
        found[OWN] = _parts(own, on_all | known, {me.id: on_all[me.id]["accuracy"] for me in own}, test)
    return {model: parts for model, parts in found.items() if any(parts.values())}


def _test_of(me: Site, test: Samples) -> Samples:
    return test if me.data.test is None else me.data.test


def _common(me: Site, test: Samples) -> bool:
    """Whether a client tests on everybody's test set."""
    return _test_of(me, test)[1].data_ptr() == test[1].data_ptr() and len(_test_of(me, test)[1]) == len(test[1])


def _parts(
    clients: Sequence[Site], judged: Mapping[str, Mapping[str, Any]], everyone: dict[str, float], test: Samples
) -> Parts:
    common, own = _images(test), dict[str, float | None]()
    for me in clients:
        images = common if _common(me, test) else _images(_test_of(me, test))
        own[me.id] = _on_labels(me.data.counts().nonzero().flatten().tolist(), judged[me.id], images)
    return {OWN_LABELS: {id: value for id, value in own.items() if value is not None}, EVERYONE: everyone}


def _images(test: Samples) -> dict[int, int]:
    """How many there are of each label."""
    return dict(zip(*(values.tolist() for values in torch.unique(test[1], return_counts=True)), strict=True))


def _on_labels(labels: Iterable[int], judged: Mapping[str, Any], images: Mapping[int, int]) -> float | None:
    """The accuracy on the images of some labels, from the recall of each."""
    tested = [c for c in labels if c in images and judged.get(f"recall_{c}") is not None]
    total = sum(images[c] for c in tested)
    return sum(judged[f"recall_{c}"] * images[c] for c in tested) / total if total else None


def judge(accuracies: Mapping[str, float], alone: Mapping[str, float] | None) -> Fairness:
    """What the accuracies of clients say, and how they stand to what each had alone."""
    mean, deviation = statistics.fmean(accuracies.values()), statistics.pstdev(accuracies.values())
    plain = Fairness(len(accuracies), mean, _worst_tenth(accuracies.values()), deviation)
    if alone is None or not accuracies.keys() <= alone.keys():
        return plain
    gains = {id: value - alone[id] for id, value in accuracies.items()}
    losers = dict(sorted(((id, gain) for id, gain in gains.items() if gain < 0), key=lambda one: one[1]))
    return replace(
        plain,
        gain=sum(gain > 0 for gain in gains.values()),
        lose=len(losers),
        gain_mean=statistics.fmean(gains.values()),
        gain_worst_tenth=_worst_tenth(gains.values()),
        losers=losers,
    )


def _worst_tenth(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return statistics.fmean(ordered[: max(1, math.ceil(len(ordered) / 10))])


def summary(accuracies: Accuracies, alone: Parts | None) -> dict[str, dict[str, Fairness]]:
    """Whose model -> what was tested on -> how fair that is."""
    return {
        model: {part: judge(values, (alone or {}).get(part)) for part, values in parts.items() if values}
        for model, parts in accuracies.items()
    }


def as_json(found: Mapping[str, Mapping[str, Fairness]]) -> dict[str, Any]:
    return {
        model: {part: {key: v for key, v in asdict(one).items() if v is not None} for part, one in parts.items()}
        for model, parts in found.items()
    }


def read(folder: RunFolder) -> tuple[Accuracies, Parts | None]:
    """What a finished run says of its clients, and of the same clients alone where it knew."""
    if not folder.fairness.is_file():  # of a run from before, or across machines
        return {}, None
    said = read_json(folder.fairness)
    return said["accuracies"], said["alone"]


def across(folder: RunFolder) -> dict[str, dict[str, Fairness]]:
    """What the sites of a run across machines said together of how they fare, where they were asked."""
    said = read_json(folder.fairness).get("across", {}) if folder.fairness.is_file() else {}
    return {model: {part: Fairness(**one) for part, one in parts.items()} for model, parts in said.items()}


def alone_in(folder: RunFolder) -> Parts:
    """What the clients of a run of `independent` reached."""
    accuracies, _ = read(folder)
    if OWN not in accuracies:
        raise FedgistError(f"{folder.path} does not say how each client did: make it anew with --overwrite")
    return accuracies[OWN]


def alone(config: RunConfig) -> RunConfig:
    """`independent` on the same ground: the same data, models, rounds and local training, where the method has any."""
    shared, known = options(RunConfig), options(methods.find(ALONE).Config)
    trains = issubclass(methods.find(config.method).Config, TrainingOptions)  # else an option may mean something else
    kept = {key: value for key, value in configs.flat(config).items() if key in shared or (trains and key in known)}
    return configs.resolve(kept, {"method": ALONE, "topology": None, "record": (), "finish": None})
