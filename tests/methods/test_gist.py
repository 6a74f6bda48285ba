"""Gist: however the data are split, it is the ridge classifier of the union, which numpy finds from all samples."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import methods
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.features import drawn
from fedgist.learning.ridge import moved

Parts = Sequence[Sequence[int] | Tensor]
SMALL = {"grid": 2, "orientations": 4, "ridge": "0.01"}


@cache
def digits() -> tuple[Inputs, ClientData]:
    """600 real 8×8 digits, and all of them in one place."""
    inputs = from_dataset(resolve({"method": "gist", "dataset": "digits", "limit": 600, "clients": 2, "device": "cpu"}))
    x, y = (torch.cat([getattr(data, name) for data in inputs.sites.values()]) for name in "xy")
    return inputs, ClientData(x, y, inputs.task.classes)


def federation(
    parts: Parts,
    options: Mapping[str, Any] = SMALL,
    wide: bool = False,
    ids: str = "{}",
    outage: Any = 0.0,
    delay: Any = 0,
) -> LocalEngine:
    """Clients that hold these samples; with `wide`, everything is computed in float64."""
    inputs, union = digits()
    sites = {ids.format(k): replace(union, x=union.x[part], y=union.y[part]) for k, part in enumerate(parts)}
    config = resolve({"method": "gist", **options}).options
    dtype = torch.float64 if wide else torch.float32
    info = {id: {"model": inputs.task.model} for id in sites}
    method = methods.find("gist")(config, inputs.task)
    runner = executor("sequential", "cpu", dtype)
    return LocalEngine(method, sites, seed=0, executor=runner, info=info, offline=outage, delay=delay)


def fit(*args: Any, **settings: Any) -> dict[str, Any]:
    engine = federation(*args, **settings)
    engine.run_round()
    return {**engine.state, "accuracy": engine.evaluate(digits()[0].test)["accuracy"]}


def splits() -> dict[str, Parts]:
    n, y = digits()[1].n, digits()[1].y
    shuffled = Rng(5).permutation(n)
    return {
        "one client": [range(n)],
        "ten alike": shuffled.chunk(10),
        "one class each": [(y == c).nonzero().flatten() for c in range(10)],
        "a hundred": shuffled.chunk(100),
        "one sample, nothing, the rest": [[0], [], range(1, n)],
    }


@pytest.mark.parametrize("options", [{}, {"clip": 0.25, "mirrored": True}, {"features": "model+fourier"}])
@pytest.mark.parametrize("split", splits())
def test_it_is_the_ridge_classifier_of_the_union(split: str, options: dict[str, Any]) -> None:
    """In float64 to 1e-8. With z = clip(φ − μ)/C of all samples (and of their mirror images, with half the weight),
    W = (zᵀz + λI)⁻¹ zᵀ(y − 1/c), the intercept ȳ, and μ the mean of φ."""
    engine = federation(splits()[split], {**SMALL, "wire": "float64", "dimensions": 40, **options}, wide=True)
    engine.run_round()
    union, state, config = digits()[1], engine.state, engine.method.config
    features = engine.method.features
    w = {name: tensor.double() for name, tensor in drawn(features, state["seed"]).items()}
    copies = [union.x, union.x.flip(-1)] if config.mirrored else [union.x]
    phi = np.concatenate([features(w, x.double()).numpy() for x in copies])
    labels = np.tile(np.eye(10)[union.y.numpy()], (len(copies), 1))
    apart = phi - phi.mean(0)
    length = np.linalg.norm(apart, axis=1, keepdims=True)
    assert (length > config.clip).any() == ("clip" in options)
    z = apart * np.minimum(1, config.clip / length) / config.clip
    products = z.T @ z / len(copies) + 0.01 * np.eye(features.size)
    wanted = np.linalg.solve(products, z.T @ (labels - 0.1) / len(copies))
    assert np.abs(state["mean"].numpy() - phi.mean(0)).max() < 1e-12
    assert np.abs(state["intercept"].numpy() - labels.mean(0)).max() < 1e-12
    assert np.abs(state["weight"].numpy() - wanted).max() < 1e-8 * np.abs(wanted).max()


def test_names_of_clients_change_nothing() -> None:
    """Other names sort otherwise, so that sums are made in another order."""
    parts = splits()["ten alike"]
    plain = fit(parts, {**SMALL, "wire": "float64"}, wide=True)
    renamed = fit(parts[::-1], {**SMALL, "wire": "float64"}, wide=True, ids="site {}")
    assert torch.allclose(plain["weight"], renamed["weight"], rtol=0, atol=1e-9 * plain["weight"].abs().max().item())


@pytest.mark.parametrize(("wire", "error", "points"), [("float32", 1e-3, 0.0005), ("float16", 0.5, 0.02)])
def test_narrow_numbers(wire: str, error: float, points: float) -> None:
    """Accuracy within 0.05 points in float32; float16, with 11 bits, moves W itself a good deal, accuracy little."""
    exact = fit(splits()["one client"], {**SMALL, "wire": "float64"}, wide=True)
    for parts in splits().values():
        found = fit(parts, {**SMALL, "wire": wire})
        assert (found["weight"] - exact["weight"]).norm() < error * exact["weight"].norm()
        assert abs(found["accuracy"] - exact["accuracy"]) <= points


def test_lambda_from_the_sums_is_the_same_for_every_split() -> None:
    """And good: within a point of the best of a grid on the test set, which it never sees."""
    found = [fit(parts, {**SMALL, "ridge": "sums"}) for parts in splits().values()]
    assert max(one["ridge"] for one in found) <= 1.001 * min(one["ridge"] for one in found)
    best = max(fit(splits()["one client"], {**SMALL, "ridge": str(4.0**k)})["accuracy"] for k in range(-8, 4))
    assert found[0]["accuracy"] > best - 0.01


@pytest.mark.parametrize("n", [20, 100, 250])
def test_lambda_from_the_sums_of_fewer_samples_than_features(n: int) -> None:
    """400 features. Nearly as good as the best of a grid, where W could fit every label without a ridge."""
    parts = Rng(5).permutation(n).chunk(4)
    found = fit(parts, {"orientations": 4, "ridge": "sums"})["accuracy"]
    assert found > max(fit(parts, {"orientations": 4, "ridge": str(4.0**k)})["accuracy"] for k in range(-8, 4)) - 0.02


def test_it_is_as_sure_as_it_is_right() -> None:
    """The calibration error is small for every split, and nothing is classified otherwise than by zW + ȳ."""
    inputs = digits()[0]
    for parts in splits().values():
        engine = federation(parts, {**SMALL, "ridge": "sums"})
        engine.run_round()
        assert engine.evaluate(inputs.test)["calibration_error"] < 0.06
        model, state = engine.method.model, engine.state
        w = engine.method.weights(state)
        plain = {**w, "head.weight": state["weight"], "head.bias": state["intercept"]}
        found, wanted = (model(one, inputs.test[0]).logits.argmax(1) for one in (w, plain))
        assert torch.equal(found, wanted)


def test_balance_is_the_ridge_classifier_of_labels_of_deviation_1() -> None:
    """However the data are split, in float64 to 1e-8, for the same bytes: of a union in which classes shrink from 60
    samples to 3, y less its mean, over its deviation. Scores are times √9/10, and times 10 for a softmax; the test
    set, in which all classes are as large, is better by far."""
    union = digits()[1]
    tail = [(union.y == c).nonzero().flatten()[: round(60 * 0.05 ** (c / 9))] for c in range(10)]
    every = torch.cat(tail)
    sizes, bytes_up, found = {**SMALL, "wire": "float64"}, set(), []
    for parts in ([every], tail, [[], *every[Rng(5).permutation(len(every))].chunk(10)]):
        for balance in (True, False):
            engine = federation(parts, {**sizes, "balance": balance}, wide=True)
            engine.run_round()
            bytes_up.add((len(parts), engine.ledger.totals().paper_up))
            found.append((engine.method.weights(engine.state), engine.evaluate(digits()[0].test)["accuracy"]))
    assert len(bytes_up) == 3
    w = {name: tensor.double() for name, tensor in drawn(engine.method.features, engine.state["seed"]).items()}
    z = engine.method.features(w, union.x[every].double()).numpy()
    z = (z - z.mean(0)) / 2
    labels = np.eye(10)[union.y[every].numpy()]
    labels = (labels - labels.mean(0)) / labels.std(0)
    wanted = 3 * np.linalg.solve(z.T @ z + 0.01 * np.eye(z.shape[1]), z.T @ labels)
    for (balanced, accuracy), (_, plain) in zip(found[::2], found[1::2], strict=True):
        assert np.abs(balanced["head.weight"].numpy() - wanted).max() < 1e-8 * np.abs(wanted).max()
        assert torch.equal(balanced["head.bias"], torch.ones(10).double())
        assert accuracy > plain + 0.05


def test_lambda_by_hits_of_samples_held_out() -> None:
    """The hits that clients count are those that all their held-out samples give, so λ is what they say."""
    parts = list(splits()["ten alike"])
    engine = federation(parts, {**SMALL, "ridge": "validation", "held_out": 5})
    engine.run_round()
    fitted = torch.cat([part[torch.arange(len(part)) % 5 != 4] for part in parts])
    alone = fit([fitted], {**SMALL, "ridge": str(engine.state["ridge"].item())})
    assert torch.allclose(engine.state["weight"], alone["weight"], atol=1e-3 * alone["weight"].abs().max().item())
    worst = fit([fitted], {**SMALL, "ridge": "100"})
    assert alone["accuracy"] > worst["accuracy"] + 0.02


def test_where_no_sample_is_held_out_the_sums_say_how_strong_the_ridge_is() -> None:
    """Clients with fewer samples than `held_out`: no candidate has a hit, by which the strongest would win."""
    parts = Rng(5).permutation(digits()[1].n)[:360].chunk(60)
    judged, summed = (fit(parts, {**SMALL, "ridge": ridge}) for ridge in ("validation", "sums"))
    assert judged["ridge"] == summed["ridge"] and judged["accuracy"] == summed["accuracy"] > 0.8


def test_who_was_away_is_asked_again_and_then_nobody() -> None:
    """A client that misses the first round is in the second, whose W is that of all; the third sends nothing."""
    parts = splits()["ten alike"]
    engine = federation(parts, outage=lambda id, round, exchange: id == "3" and round == 1)
    engine.run_round()
    without, sent = engine.state["weight"], engine.ledger.totals().messages
    engine.run_round()
    everybody, twice = engine.state["weight"], engine.ledger.totals().messages
    assert (sent, twice) == (4 * 9, 4 * 9 + 4 * 10)
    of_all = fit(parts)["weight"]
    assert (everybody - of_all).norm() / of_all.norm() < 1e-4  # batches are drawn anew, so that sums round otherwise
    assert (without - of_all).norm() / of_all.norm() > 1e-2
    engine.run_round()
    assert torch.equal(engine.state["weight"], everybody)
    assert engine.ledger.totals().messages == twice


def test_who_was_late_is_asked_again() -> None:
    """Products about the mean of an earlier round, whose sender is not in this one's, settle nothing for good."""
    parts = splits()["one class each"]
    engine = federation(parts, delay=lambda id, round: int(id == "2" and round < 3))
    answered = []
    for _ in range(4):
        engine.run_round()
        answered.append(engine.state["answered"])
    assert answered == [9, 9, 9, 10]  # its sums come in round 2, its products about the mean of round 2 in round 3
    wanted = fit(parts)
    for name in ("mean", "weight", "intercept"):
        assert (engine.state[name] - wanted[name]).norm() < 1e-4 * wanted[name].norm()


def test_a_client_makes_a_head_of_its_own() -> None:
    """The common one, moved by sums of u = (z, 1) over its own samples; up goes nothing more but that it is done. Who
    has one sample or none has the common one, and so has who has all of them; who was away has none."""
    parts = [*splits()["one class each"], [0], []]
    one = federation(parts, {**SMALL, "wire": "float64"}, wide=True)
    own = federation(parts, {**SMALL, "wire": "float64", "own": True}, wide=True)
    for engine in (one, own):
        engine.run_round()
    assert own.ledger.totals().paper_up == one.ledger.totals().paper_up
    method, state, union = own.method, own.state, digits()[1]
    assert torch.equal(state["weight"], one.state["weight"])
    common = torch.cat([state["weight"], state["intercept"][None] - 0.1])
    w = {name: tensor.double() for name, tensor in drawn(method.features, state["seed"]).items()}
    z = (method.features(w, union.x.double()) - state["mean"]) / 2
    all_u, all_y = torch.nn.functional.pad(z, (0, 1), value=1.0), torch.eye(10).double()[union.y]
    for me in own.clients():
        part = parts[int(me.id)]
        u, y = all_u[part], all_y[part]
        wanted = moved(common, u.T @ u, u.T @ (y - 0.1))
        found = torch.cat([me.state["weight"], me.state["intercept"][None] - 0.1])
        assert torch.allclose(found, wanted, rtol=0, atol=1e-8 * wanted.abs().max().item())
        assert torch.equal(found, common) == (len(part) < 2)
    accuracies = [own.evaluate(digits()[0].test)["accuracy"], one.evaluate(digits()[0].test)["accuracy"]]
    assert accuracies[0] < 0.5 < accuracies[1]  # heads of clients of one class, on the digits of all

    away = federation(parts[:3], {**SMALL, "own": True}, outage=lambda id, round, exchange: id == "1")
    away.run_round()
    models = [method.client_weights(me, {}) for me in away.clients()]
    assert [model is None for model in models] == [False, True, False]
    alone = federation(splits()["one client"], {"grid": 2, "orientations": 4, "own": True}, wide=True)
    alone.run_round()
    (me,) = alone.clients()
    assert (me.state["weight"] - alone.state["weight"]).norm() < 0.3 * alone.state["weight"].norm()


def test_a_class_that_nobody_has_is_never_guessed() -> None:
    y = digits()[1].y
    state = fit([(y > 2).nonzero().flatten(), (y == 0).nonzero().flatten()])
    assert state["intercept"][1:3].abs().max() == 0 and state["weight"][:, 1:3].norm() < 1e-4 * state["weight"].norm()
    assert 0.6 < state["accuracy"] < 0.85


def test_nobody_has_anything() -> None:
    assert fit([[], []], {**SMALL, "ridge": "sums"})["weight"].abs().max() == 0


def test_numbers_that_are_no_numbers_are_said() -> None:
    engine = federation([[0, 1], [2]])
    engine.data["0"].x[0, 0, 0, 0] = torch.nan
    with pytest.raises(FedgistError, match="not finite"):
        engine.run_round()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridge": "-1"}, "ridge must be sums, validation or a number above 0"),
        ({"ridge": "1e-300"}, "from 1e-30 to 1e30, not '1e-300'"),
        ({"features": "wavelets"}, "unknown feature map 'wavelets'"),
        ({"scales": 3}, "needs images of 16×16"),
        ({"balance": True, "own": True}, "balance is for sums without noise and for the common head alone"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FedgistError, match=message):
        federation([[0]], {**SMALL, **options})
