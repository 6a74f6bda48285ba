"""Which tensors travel, and how they are averaged."""

from typing import Any

import pytest
import torch

from fedgist import models
from fedgist.families.global_model import Local, Travel, average, statistics_apart
from toys import apart, clients, federation, play

NET = models.build("cnn", (1, 8, 8), 4)
HEAD = ["classifier.weight", "classifier.bias"]


def test_all_or_the_head_with_statistics_or_without() -> None:
    everything = list(NET.shapes)
    trained = [name for name in everything if name not in NET.buffers]
    assert NET.buffers and len(trained) < len(everything)
    assert Travel("all", "aggregate").names(NET) == everything
    assert Travel("all", "local").names(NET) == trained
    assert Travel("head", "aggregate").names(NET) == Travel("head", "local").names(NET) == HEAD
    assert Travel("body", "aggregate").names(NET) + HEAD == list(NET.shapes)
    assert Travel("body", "local").names(NET) + HEAD == trained


def test_a_head_may_begin_at_an_earlier_layer() -> None:
    """It holds what comes after that layer, statistics of BatchNorm included, in the order of the model."""
    longer = Travel("head", "aggregate", "norm2")
    norm = [f"norm2.{part}" for part in ("weight", "bias", "running_mean", "running_var")]
    assert longer.names(NET) == [*norm, "fc1.weight", "fc1.bias", *HEAD]
    assert longer.head(NET) == set(longer.names(NET))
    assert Travel("head", "local", "norm2").names(NET) == [*norm[:2], "fc1.weight", "fc1.bias", *HEAD]
    assert Travel("all", "aggregate", "norm2").names(NET) == list(NET.shapes), "where all travels, no head matters"
    assert longer.shapes(NET) == {name: NET.shapes[name] for name in longer.names(NET)}


def test_other_architectures_share_a_head() -> None:
    nets = [models.build(name, (1, 8, 8), 4, feature_size=16) for name in ("mlp", "cnn")]
    heads = [Travel("head", "aggregate").shapes(net) for net in nets]
    assert heads[0] == heads[1] == {"classifier.weight": (4, 16), "classifier.bias": (4,)}


def test_statistics_are_told_apart_from_what_is_trained() -> None:
    trained, statistics = statistics_apart(NET.buffers, NET.shapes)
    assert statistics.keys() == NET.buffers
    assert {**trained, **statistics} == NET.shapes and len(trained) + len(statistics) == len(NET.shapes)


@pytest.mark.parametrize(("p", "expected"), [(4.0, [0.5, 1.5]), (0.0, [9.0, 9.0])])
def test_an_average_of_nobody_is_what_there_was(p: float, expected: list[float]) -> None:
    total = Local({"w": torch.tensor([2.0, 6.0])}, p)
    before: Any = {"w": torch.tensor([9.0, 9.0])}
    assert average(total, otherwise=before)["w"].tolist() == expected


@pytest.mark.parametrize("given", [{"share": "body"}, {"share": "all", "batch_norm": "local"}, {"share": "head"}])
def test_a_second_way_to_evaluate_changes_nothing_of_the_first(given: dict[str, Any]) -> None:
    """With `published`, clients keep statistics of their own beside those that travel, for that evaluation alone."""
    sites = clients(40, 60, test=50)
    engines = [play(federation("fedavg", sites, "cnn", published=also, **given), 2) for also in (False, True)]
    one, other = (engine.evaluate(sites["0"].test) for engine in engines)  # type: ignore[arg-type]
    assert other.pop("accuracy_published") and one == other
    kept = [[engine.method.client_weights(me, engine.state["w"]) for me in engine.clients()] for engine in engines]
    assert apart(*kept) == 0
