"""The losses of representation sharing against oracles, finite differences and the theorem behind them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgist import models
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.work import Pool, gradient
from fedgist.learning.contrastive import (
    CRITIC,
    TEMPERATURE,
    Averager,
    RepresentationLoss,
    chosen,
    critic,
    discriminator,
    distance,
    draw,
    log_agreement,
)
from fedgist.learning.training import cross_entropy
from fedgist.models import Model, Output

CLASSES, FEATURES, BATCH, MANY = 4, 5, 6, 3


@pytest.fixture
def model() -> Model:
    return models.build("mlp", (1, 2, 3), CLASSES, hidden=(FEATURES,))


@pytest.fixture
def batch(model: Model) -> dict[str, Any]:
    """One batch of a client and its lesson, in float64; class 1 has no mean, class 2 no observation."""
    rng = Rng(0)
    return {
        "w": {name: 2 * tensor.double() for name, tensor in model.init(rng("w")).items()},
        "x": rng("x").normal(BATCH, 1, 2, 3).double(),
        "y": torch.tensor([0, 1, 2, 3, 1, 0]),
        "mask": torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64),
        "lesson": {
            "means": rng("means").normal(CLASSES, FEATURES).double(),
            "known": torch.tensor([1.0, 0, 1, 1], dtype=torch.float64),
            "observations": rng("observations").normal(MANY, CLASSES, FEATURES).double(),
            "observed": torch.tensor([1.0, 1, 0, 1], dtype=torch.float64),
        },
    }


def loss(
    model: Model, batch: dict[str, Any], reduction: str, kd: float, disc: float, w: Params | None = None
) -> Tensor:
    w = batch["w"] if w is None else w
    weights = torch.tensor(kd, dtype=torch.float64), torch.tensor(disc, dtype=torch.float64)
    output = model(w, batch["x"])
    return RepresentationLoss(model, reduction)(output, batch["y"], batch["mask"], w, batch["lesson"], *weights)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("reduction", ["paper", "code"])
def test_loss_equals_a_plain_reading_of_the_algorithm(model: Model, batch: dict[str, Any], reduction: str) -> None:
    """Algorithm 2, sample by sample in numpy: L = 1/|B| Σ_i (ℓ_CE + λ_KD ‖s_i − t̄^y‖² + λ_disc Σ_c ℓ_disc).

    ℓ_disc(1, s, t) = −log⟨softmax τ(s), softmax τ(t)⟩ for c = y, −log(1 − …) for the others (Eqs. 5 and 7), and its
    expectation over m. The code divides the second term by d' and the third by C (means in the place of sums).
    """
    kd, disc = 0.7, 1.3
    w = {name: tensor.numpy() for name, tensor in batch["w"].items()}
    lesson = {name: tensor.numpy() for name, tensor in batch["lesson"].items()}

    def classify(feature: np.ndarray) -> np.ndarray:
        return w["classifier.weight"] @ feature + w["classifier.bias"]

    total = 0.0
    for x, y, counts in zip(batch["x"].numpy(), batch["y"].tolist(), batch["mask"].tolist(), strict=True):
        s = np.maximum(w["fc1.weight"] @ x.reshape(-1) + w["fc1.bias"], 0)
        p = softmax(classify(s))
        sample = -np.log(p[y])
        if lesson["known"][y]:
            sample += kd * np.sum((s - lesson["means"][y]) ** 2) / (FEATURES if reduction == "code" else 1)
        for c in range(CLASSES):
            if lesson["observed"][c]:
                h = np.array([p @ softmax(classify(t)) for t in lesson["observations"][:, c]])
                doubt = -np.log(h) if c == y else -np.log(1 - h)
                sample += disc * doubt.mean() / (CLASSES if reduction == "code" else 1)
        total += counts * sample
    assert loss(model, batch, reduction, kd, disc).item() == pytest.approx(
        total / batch["mask"].sum().item(), rel=1e-12
    )


@pytest.mark.parametrize("reduction", ["paper", "code"])
def test_gradient_equals_finite_differences(model: Model, batch: dict[str, Any], reduction: str) -> None:
    """Along random directions v: (L(w + εv) − L(w − εv)) / 2ε = ⟨∇L, v⟩ + O(ε²); every weight takes part."""
    grads, _ = gradient(lambda w: (loss(model, batch, reduction, 0.7, 1.3, w), None), batch["w"])
    for trial in range(5):
        direction = {name: Rng(trial)(name).normal(*tensor.shape).double() for name, tensor in batch["w"].items()}
        ends = [{name: w + step * direction[name] for name, w in batch["w"].items()} for step in (1e-6, -1e-6)]
        after, before = (loss(model, batch, reduction, 0.7, 1.3, end).item() for end in ends)
        slope = sum((grads[name] * direction[name]).sum().item() for name in grads)
        assert (after - before) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_the_reductions_differ_by_d_and_c(model: Model, batch: dict[str, Any]) -> None:
    code = loss(model, batch, "code", 0.7 * FEATURES, 1.3 * CLASSES)
    assert code.item() == pytest.approx(loss(model, batch, "paper", 0.7, 1.3).item(), rel=1e-12)


def test_teachers_gradient_reaches_the_classifier(model: Model, batch: dict[str, Any]) -> None:
    """τ_u judges both s and t, so the discriminator alone moves it even where the student's features are fixed."""
    students = torch.tensor([[4.0, 0, 0, 0]], dtype=torch.float64)  # constant: the gradient comes through the teachers

    def objective(w: Params) -> tuple[Tensor, None]:
        agreement = log_agreement(students, model.head(w, batch["lesson"]["observations"][0]))
        return discriminator(agreement, torch.tensor([0]), 1, torch.ones(CLASSES)).sum(), None

    assert gradient(objective, batch["w"])[0]["classifier.weight"].abs().sum() > 1e-2


def test_external_discriminator_equals_a_plain_reading(model: Model, batch: dict[str, Any]) -> None:
    """Pair by pair in numpy: ĥ = e^z / (e^z + C − 1), z = cos(A s, B t) / τ; −log ĥ where c = y, else −log(1 − ĥ)."""
    w = batch["w"] | {name: tensor.double() for name, tensor in critic(FEATURES, Rng(3)).items()}
    a, b = (w[CRITIC + name].numpy() for name in ("student", "teacher"))
    features = model(w, batch["x"]).features.detach().numpy()
    teachers, observed = (batch["lesson"][name].numpy() for name in ("observations", "observed"))
    total = 0.0
    for s, y, counts in zip(features, batch["y"].tolist(), batch["mask"].tolist(), strict=True):
        for c in range(CLASSES):
            for t in teachers[:, c]:
                u, v = a @ s, b @ t
                odds = np.exp(u @ v / np.linalg.norm(u) / np.linalg.norm(v) / TEMPERATURE) / (CLASSES - 1)
                h = odds / (odds + 1)
                total -= counts * observed[c] * np.log(h if c == y else 1 - h) / MANY
    output = model(w, batch["x"])
    lesson, weights = batch["lesson"], torch.tensor([0.0, 1.0], dtype=torch.float64)
    arguments = output, batch["y"], batch["mask"], w, lesson, *weights
    found = RepresentationLoss(model, "paper", "external")(*arguments)
    base = cross_entropy(output, batch["y"], batch["mask"], w)
    assert (found - base).item() == pytest.approx(total / batch["mask"].sum().item(), rel=1e-10)


def test_what_is_absent_adds_nothing(model: Model, batch: dict[str, Any]) -> None:
    """Neither garbage in absent rows nor a sample that only fills up the batch is felt; no lesson is cross-entropy."""
    before = loss(model, batch, "paper", 0.7, 1.3)
    batch["lesson"]["means"][1] = 1e6
    batch["lesson"]["observations"][:, 2] = -1e6
    batch["x"][5] = 1e3
    assert loss(model, batch, "paper", 0.7, 1.3).item() == before.item()
    batch["lesson"]["known"] *= 0
    batch["lesson"]["observed"] *= 0
    plain = cross_entropy(model(batch["w"], batch["x"]), batch["y"], batch["mask"], batch["w"])
    assert loss(model, batch, "paper", 0.7, 1.3).item() == plain.item()


def test_agreement_is_exact_where_it_rounds_to_one() -> None:
    """Both certain of class 0, by 200: 1 − ĥ = Σ_{a≠0} p_a + Σ_{b≠0} q_b + O(e⁻⁴⁰⁰) = 2 (K − 1) e⁻²⁰⁰."""
    certain = torch.tensor([[200.0, 0.0, 0.0]])
    same, different = log_agreement(certain, certain)
    assert same.item() == pytest.approx(0.0, abs=1e-6)
    assert different.item() == pytest.approx(math.log(4) - 200, rel=1e-6)


@given(st.integers(0, 2**20))
def test_agreement_is_a_probability(seed: int) -> None:
    students, teachers = Rng(seed)("s").normal(3, 5).double() * 4, Rng(seed)("t").normal(2, 5).double() * 4
    same, different = log_agreement(students, teachers)
    assert torch.allclose(same.exp() + different.exp(), torch.ones(3, 2, dtype=torch.float64))
    assert torch.allclose(same.exp(), students.softmax(1) @ teachers.softmax(1).T)


def test_distance_is_to_the_own_class() -> None:
    features, means = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert distance(features, torch.tensor([0, 1]), means, torch.tensor([1.0, 1.0])).tolist() == [4.0, 9.0]
    assert distance(features, torch.tensor([0, 1]), means, torch.tensor([1.0, 0.0])).tolist() == [4.0, 0.0]


@pytest.mark.parametrize("negatives", [1, 3, 9])
def test_theorem_1_and_its_gap(negatives: int) -> None:
    """I(s, t) ≥ log K − L_disc(h) for any h; the true posterior q is the best, yet even for it there is a gap.

    With r = p_s p_t / p_st the posterior of a pair being joint is q = 1 / (1 + K r) (Eq. 27). Two steps of the proof
    are inequalities for q too: a 1 is added inside a logarithm (Eq. 23), which costs E_st[log(1 + K r) − log(K r)], and
    K E_{s×t}[log(1 − q)] ≤ 0 is added (Eq. 28). The gap at h = q is exactly their sum; it never vanishes.
    """
    joint = np.array([[0.20, 0.05, 0.05], [0.02, 0.28, 0.02], [0.08, 0.05, 0.25]])
    marginals = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    information = np.sum(joint * np.log(joint / marginals))

    def bound(h: np.ndarray) -> float:
        lost = -np.sum(joint * np.log(h)) - negatives * np.sum(marginals * np.log(1 - h))  # Eq. 3
        return math.log(negatives) - lost

    ratio = marginals / joint
    posterior = 1 / (1 + negatives * ratio)
    best = bound(posterior)
    draw_h = Rng(negatives).numpy()
    others = [bound(draw_h.uniform(0.01, 0.99, joint.shape)) for _ in range(200)]
    nearby = [bound(np.clip(posterior + 0.01 * draw_h.standard_normal(joint.shape), 1e-3, 0.999)) for _ in range(200)]
    assert max(others + nearby) < best < information
    one_inside = np.sum(joint * (np.log(1 + negatives * ratio) - np.log(negatives * ratio)))
    dropped = -negatives * np.sum(marginals * np.log(1 - posterior))
    assert information - best == pytest.approx(one_inside + dropped, rel=1e-12)
    assert min(one_inside, dropped) > 0.01


@given(
    st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(0, 99)
)
def test_chosen_takes_the_first_of_each_class(labels: list[int], sizes: list[int], seed: int) -> None:
    y, keys = torch.tensor(labels, dtype=torch.int64), Rng(seed).uniform(2, len(labels))
    picked = chosen(y, keys, torch.tensor(sizes))
    for row, key in zip(picked, keys, strict=True):
        for c in range(4):
            members = torch.nonzero(y == c).flatten()
            first = members[key[members].argsort()][: sizes[c]]
            assert sorted(members[row[members]].tolist()) == sorted(first.tolist())


def test_draw_takes_different_rows_while_there_are_any() -> None:
    """Class 0 has rows 0, 1 and 3; class 1 only row 2; class 2 none."""
    values = torch.arange(1.0, 13.0).view(4, 3, 1)
    there = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)
    firsts = set()
    for seed in range(30):
        drawn, observed = draw(values, there, Rng(seed).uniform(4, 3), 5)
        assert observed.tolist() == [True, True, False]
        assert sorted(drawn[:3, 0, 0].tolist()) == [1.0, 4.0, 10.0]
        assert drawn[3:, 0].equal(drawn[:2, 0])
        assert drawn[:, 1, 0].tolist() == [8.0] * 5
        assert not drawn[:, 2].any()
        firsts.add(drawn[0, 0, 0].item())
    assert firsts == {1.0, 4.0, 10.0}


def test_averager_adds_up_features_by_class(model: Model, batch: dict[str, Any]) -> None:
    plan = {
        "index": torch.tensor([5, 0, 3, 4]),
        "weight": torch.tensor([1.0, 1.0, 0.0, 1.0]).double(),
        "member": torch.tensor([[0.5, 0.0], [0.5, 1.0], [0.0, 0.0], [0.0, 1.0]]).double(),
    }
    start = torch.ones(CLASSES, FEATURES).double(), torch.zeros(2, CLASSES, FEATURES).double()
    pool = Pool(x=batch["x"], y=batch["y"])
    sums, observations = Averager(model).step(start, plan, batch["w"], pool)
    output: Output = model(batch["w"], batch["x"])
    expected = torch.ones(CLASSES, FEATURES).double()
    expected[0] += output.features[5] + output.features[0]
    expected[1] += output.features[4]
    assert torch.allclose(sums, expected)
    assert torch.allclose(observations[0, 0], (output.features[5] + output.features[0]) / 2)
    assert torch.allclose(observations[1, :2], output.features[[0, 4]])
    assert not observations[0, 1:].any()
