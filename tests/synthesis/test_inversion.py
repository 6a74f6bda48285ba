"""The objective of Co-Dream: each term against its formula, and its input gradient against finite differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.task import NormStatistics
from fedgist.models.layers import bind_all
from fedgist.synthesis.dream_spaces import FreeDreams, GeneratedDreams
from fedgist.synthesis.inversion import (
    Dreamer,
    DreamOptions,
    Objective,
    Unsure,
    entropy,
    has_statistics,
    statistics_gap,
    total_variation,
)

SHAPE, CLASSES, N = (1, 8, 8), 3, 4
MODEL = models.build("mlp", SHAPE, CLASSES, hidden=(7, 5), norm="batch")
CONV = models.build("cnn", SHAPE, CLASSES)
NOTHING = {"entropy": 0.0, "statistics": 0.0, "tv": 0.0, "l2": 0.0}


def weights(model: models.Model) -> dict[str, Tensor]:
    """Double-precision weights whose BatchNorm statistics are not those of a fresh net."""
    w = tree.map(lambda t: t.double(), model.init(Rng(0)))
    for name in model.buffers:
        w[name] = w[name] + 0.3 * Rng(1)(name).uniform(*w[name].shape).double()
    return w


def noise(*shape: int) -> Tensor:
    return Rng(2)("x").normal(*shape).double()


def slope(value: Callable[[Tensor], Tensor], x: Tensor, towards: Tensor, h: float = 1e-5) -> float:
    """The directional derivative by central differences, whose error is of the order h²."""
    return float((value(x + h * towards) - value(x - h * towards)) / (2 * h))


TERMS = {
    "entropy": {"entropy": 1.0},
    "statistics": {"statistics": 1.0},
    "tv mean": {"tv": 1.0, "tv_form": "mean"},
    "tv norms": {"tv": 1.0, "tv_form": "norms"},
    "l2": {"l2": 1.0},
    "conditional": {"entropy": 1.0, "conditional": True},
    "all": {"entropy": 1.0, "statistics": 10.0, "tv": 0.1, "l2": 0.1},
}


@pytest.mark.parametrize("model", [MODEL, CONV], ids=["mlp", "cnn"])
@pytest.mark.parametrize("term", TERMS)
def test_input_gradients_are_those_of_finite_differences(model: models.Model, term: str) -> None:
    w, x = weights(model), noise(N, *SHAPE)
    objective = Objective(model, **(NOTHING | TERMS[term]))
    with torch.no_grad():
        found = Dreamer(objective, FreeDreams(N, SHAPE)).gradient({"x": x}, w)["x"]
    for i in range(3):
        towards = Rng(3)(i).normal(*x.shape).double()
        expected = slope(lambda at: objective(w, at), x, towards)
        assert expected != 0
        assert float((found * towards).sum()) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_gradients_at_a_layer() -> None:
    w, x = weights(MODEL), noise(N, 7)
    objective = Objective(MODEL, layer="norm1", entropy=1.0, statistics=2.0, l2=0.1)
    with torch.no_grad():
        found = Dreamer(objective, FreeDreams(N, (7,))).gradient({"x": x}, w)["x"]
    towards = Rng(3).normal(*x.shape).double()
    assert float((found * towards).sum()) == pytest.approx(slope(lambda at: objective(w, at), x, towards), rel=1e-6)


def test_gradients_of_codes_and_generator() -> None:
    """The same objective, differentiated through the generator, in each of its tensors."""
    w, space = weights(MODEL), GeneratedDreams(N, SHAPE, (-1.0,), (2.0,), noise=5, width=2)
    v = tree.map(lambda t: t.double(), space.start(Rng(4)))
    dreamer = Dreamer(Objective(MODEL, **(NOTHING | TERMS["all"])), space)
    with torch.no_grad():
        found = dreamer.gradient(v, w)
    assert found.keys() == space.shapes.keys()
    assert {name: tuple(t.shape) for name, t in v.items()} == space.shapes
    for name in v:
        towards = Rng(5)(name).normal(*v[name].shape).double()

        def value(at: Tensor, name: str = name) -> Tensor:
            return dreamer.objective(w, space.render({**v, name: at}))

        expected = slope(value, v[name], towards)
        assert float((found[name] * towards).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-8), name


def test_generated_dreams_are_in_the_range_of_pixels() -> None:
    space = GeneratedDreams(N, (3, 8, 12), (-1.0, 0.0, 2.0), (2.0, 1.0, 5.0), noise=5, width=2)
    x = space.render(space.start(Rng(0)))
    assert x.shape == (N, 3, 8, 12)
    for channel, (low, high) in enumerate(zip(space.low, space.high, strict=True)):
        assert low < float(x[:, channel].min()) < float(x[:, channel].max()) < high


def test_the_adaptive_term_climbs_the_student_s_entropy() -> None:
    w, x = weights(MODEL), noise(N, *SHAPE)
    with torch.no_grad():
        found = Unsure(MODEL, FreeDreams(N, SHAPE)).gradient({"x": x}, w)["x"]
    towards = Rng(3).normal(*x.shape).double()
    expected = slope(lambda at: -entropy(MODEL(w, at).logits), x, towards)
    assert float((found * towards).sum()) == pytest.approx(expected, rel=1e-6)


def test_robust_dreams_are_judged_at_the_worst_step() -> None:
    """δ = ε sign ∇: no other δ of that size raises the doubt more to first order; for the descent δ is a constant."""
    w, x, epsilon = weights(MODEL), noise(N, *SHAPE), 0.01
    plain = Objective(MODEL, **(NOTHING | {"entropy": 1.0}))
    robust = Objective(MODEL, robust=epsilon, **(NOTHING | {"entropy": 1.0}))
    with torch.no_grad():
        delta = robust.attack(w, x)
        assert float(delta.abs().max()) == pytest.approx(epsilon)
        assert robust(w, x) == plain(w, x + delta) > plain(w, x)
        for i in range(5):
            other = epsilon * Rng(7)(i).normal(*x.shape).double().sign()
            assert plain(w, x + other) < plain(w, x + delta)
        found = Dreamer(robust, FreeDreams(N, SHAPE)).gradient({"x": x}, w)["x"]
    towards = Rng(3).normal(*x.shape).double()
    assert float((found * towards).sum()) == pytest.approx(slope(lambda at: plain(w, at + delta), x, towards), rel=1e-6)


def test_entropy() -> None:
    """Against its formula in numpy; log C for a uniform output, 0 for a certain one, however large the logits."""
    logits = noise(5, CLASSES)
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    assert float(entropy(logits)) == pytest.approx(float(-(p * np.log(p)).sum(1).mean()))
    assert float(entropy(torch.zeros(2, CLASSES))) == pytest.approx(math.log(CLASSES))
    assert float(entropy(torch.tensor([[1000.0, 0.0, -1000.0]]))) == 0.0


def test_conditional_labels_are_the_classes_in_turn() -> None:
    objective, logits = Objective(MODEL, conditional=True), noise(4, CLASSES)
    log_p = logits.log_softmax(1)
    expected = -(log_p[0, 0] + log_p[1, 1] + log_p[2, 2] + log_p[3, 0]) / 4
    assert float(objective.doubt(logits)) == pytest.approx(float(expected))


def test_statistics_gap() -> None:
    """Two layers by hand: ‖(3, 4)‖ + ‖(0, 2)‖ + ‖(1)‖ + ‖(0)‖, norms and not their squares."""
    one = NormStatistics(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 3.0]), torch.zeros(2), torch.ones(2))
    two = NormStatistics(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([-0.5]), torch.tensor([1.0]))
    assert float(statistics_gap([one, two])) == pytest.approx(5 + 2 + 1 + 0)


def test_statistics_are_those_of_the_batch_before_each_batch_norm() -> None:
    w, x = weights(MODEL), noise(N, *SHAPE)
    only = Objective(MODEL, **(NOTHING | {"statistics": 1.0}))
    entered, activation = {}, x
    for (name, _), step in zip(MODEL.layers, bind_all(MODEL.layers), strict=True):
        entered[name], activation = activation, step(w, activation, None, None)
    expected = sum(
        float(
            (h.mean(0) - w[f"{name}.running_mean"]).norm() + (h.var(0, correction=0) - w[f"{name}.running_var"]).norm()
        )
        for name, h in entered.items()
        if name in ("norm1", "norm2")
    )
    assert float(only(w, x)) == pytest.approx(expected)


def test_total_variation() -> None:
    """The image [[0, 1], [3, 6]]: down 3, 5; across 1, 3; falling diagonal 6; rising diagonal 2."""
    x = torch.tensor([[[[0.0, 1.0], [3.0, 6.0]]]])
    assert float(total_variation(x, "mean")) == pytest.approx((9 + 25 + 1 + 9) / 4)
    assert float(total_variation(x, "norms")) == pytest.approx(math.sqrt(34) + math.sqrt(10) + 6 + 2)


def test_the_two_forms_of_total_variation_differ_by_three_orders_of_magnitude() -> None:
    """At the start of a batch of CIFAR size: 2 · 2 · 31/32 ≈ 3.9 against four norms of about √(2 · 786,432 · 0.97)."""
    x = Rng(0).normal(256, 3, 32, 32)
    assert float(total_variation(x, "mean")) == pytest.approx(4 * 31 / 32, rel=0.01)
    n = 256 * 3
    norms = 2 * math.sqrt(2 * n * 31 * 32) + 2 * math.sqrt(2 * n * 31 * 31)
    assert float(total_variation(x, "norms")) == pytest.approx(norms, rel=0.01)


def test_dreaming_leaves_the_running_statistics_alone() -> None:
    w = weights(CONV)
    before = storage.digest(w)
    with torch.no_grad():
        Dreamer(Objective(CONV), FreeDreams(N, SHAPE)).gradient({"x": noise(N, *SHAPE)}, w)
    assert storage.digest(w) == before


def test_dreams_are_seen_in_evaluation_mode() -> None:
    """What a model says about a dream does not depend on the others in the batch."""
    w, x = weights(CONV), noise(N, *SHAPE)
    dreamer = Dreamer(Objective(CONV), FreeDreams(N, SHAPE))
    torch.testing.assert_close(dreamer.logits({"x": x}, w)[:1], dreamer.logits({"x": x[:1]}, w))


def test_whether_there_is_a_batch_norm_on_the_way() -> None:
    assert has_statistics(MODEL) and has_statistics(MODEL, "norm2")
    assert not has_statistics(MODEL, "classifier")
    assert not has_statistics(models.build("lenet5", (1, 28, 28), 10))
    without = models.build("mlp", SHAPE, CLASSES)
    assert (
        float(Objective(without, **(NOTHING | {"statistics": 1.0}))(without.init(Rng(0)), torch.zeros(2, *SHAPE))) == 0
    )


def test_options_make_the_objective() -> None:
    options = DreamOptions(True, 2.0, 3.0, 4.0, "norms", 5.0, 6.0)
    assert options.objective(MODEL, "norm1") == Objective(
        MODEL, "norm1", conditional=True, entropy=2.0, statistics=3.0, tv=4.0, tv_form="norms", l2=5.0, robust=6.0
    )
