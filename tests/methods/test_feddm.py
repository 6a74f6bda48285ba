"""FedDM and its control: what travels, which classes, the ball, the weights of images, one round, and Figure 1."""

import csv
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import methods, models, storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Answers
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.core.work import gradient
from fedgist.data.client_data import ClientData
from fedgist.engines import executor
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import resolve
from fedgist.experiments.runner import run
from fedgist.families import surrogate
from fedgist.families.surrogate import Images
from fedgist.options import build
from fedgist.synthesis import trust_region
from fedgist.synthesis.pixels import dequantise, quantise
from fedgist.synthesis.trust_region import project

SHAPE, CLASSES = (1, 8, 8), 4
QUICK = {"ipc": 2, "min_class": 3, "server_epochs": 2, "server_batch": 4}
HELD = {"0": [0, 1, 3], "1": [2], "2": []}
"""The classes of which each client below has at least three samples."""


def clients() -> dict[str, ClientData]:
    rng, counts = Rng(4), {"0": (7, 3, 2, 9), "1": (0, 2, 5, 0), "2": (1, 0, 2, 2)}
    labels = {id: torch.arange(CLASSES).repeat_interleave(torch.tensor(n)) for id, n in counts.items()}
    return {id: ClientData(rng(id).uniform(len(y), *SHAPE), y, CLASSES) for id, y in labels.items()}


def federation(name: str, ledger: Ledger | None = None, dtype: Any = torch.float32, **settings: Any) -> LocalEngine:
    model = settings.pop("model", "mlp")
    nets = {name: models.build(name, SHAPE, CLASSES) for name in (model, "mlp")}
    task = Task(SHAPE, CLASSES, (0.0,), (1.0,), nets, model)
    method = methods.find(name)
    built = method(build(method.Config, {**QUICK, **settings}), task)
    info = {"1": {"model": "mlp"}}  # whatever a client would use for itself
    run_on = executor("sequential", dtype=dtype)
    return LocalEngine(built, clients(), seed=0, executor=run_on, ledger=ledger, info=info)


def after(engine: LocalEngine, rounds: int = 1) -> Any:
    for _ in range(rounds):
        engine.run_round()
    return engine.state["w"]


def sent(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> list[Answers]:
    """What the server receives, exchange after exchange."""
    kept: list[Answers] = []
    collect = engine.collect

    def keep(*given: Any) -> Any:
        kept.append(collect(*given))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(engine, "collect", keep)
    return kept


@pytest.mark.parametrize("name", ["feddm", "real"])
@pytest.mark.parametrize(("pixels", "bytes"), [("float32", 4), ("float16", 2), ("uint8", 1)])
def test_the_ledger_has_table_2(name: str, pixels: str, bytes: int, tmp_path: Path) -> None:
    """Numbers up: classes held × ipc × pixels. Exact bytes: those numbers at their width, and eight a label."""
    ledger = Ledger(tmp_path / "ledger.csv")
    own = {"steps": 1} if name == "feddm" else {}
    engine = federation(name, ledger, pixels=pixels, **own)
    after(engine, 2)
    ledger.close()
    with open(tmp_path / "ledger.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["direction"] == "up"]
    assert len(rows) == 6
    for row in rows:
        images = len(HELD[row["sender"]]) * 2
        assert int(row["paper_bytes"]) == 4 * images * 64
        assert int(row["payload_bytes"]) == images * (64 * bytes + 8)
    assert engine.ledger.totals().paper_down == 2 * 3 * 4 * engine.method.model.size


def test_only_classes_with_enough_samples_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = federation("feddm", steps=2)
    kept = sent(engine, monkeypatch)
    after(engine)
    for id, held in HELD.items():
        assert kept[0][id].labels.tolist() == [c for c in held for _ in range(2)]
        assert kept[0][id].images.shape == (2 * len(held), *SHAPE)
        assert kept[0][id].counts == {}


def test_without_steps_feddm_sends_what_real_sends() -> None:
    assert storage.digest(after(federation("feddm", steps=0), 2)) == storage.digest(after(federation("real"), 2))
    assert storage.digest(after(federation("feddm", steps=2), 2)) != storage.digest(after(federation("real"), 2))


def test_images_that_travel_as_bytes_lose_only_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching stays inside the range, so nothing is clamped: half a level of 255 is all that may change."""
    engine = federation("feddm", steps=5, lr=20.0, pixels="uint8", model="convnet")
    kept, seen = sent(engine, monkeypatch), []
    monkeypatch.setattr(surrogate, "quantise", lambda x, *ends: seen.append(x) or quantise(x, *ends))
    after(engine)
    assert kept[0]["0"].images.dtype == torch.uint8
    before, received = torch.cat(seen), torch.cat([kept[0][id].images for id in kept[0]])
    assert (dequantise(received, (0.0,), (1.0,)) - before).abs().max() < 0.5 / 255 + 1e-6
    assert ((before == 0) | (before == 1)).any()  # the constraint was needed


def test_real_images_are_real_and_those_of_synthesis_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    data = clients()["0"]
    for name, settings, real in (("real", {}, True), ("feddm", {"steps": 3, "init": "noise"}, False)):
        engine = federation(name, **settings)
        kept = sent(engine, monkeypatch)
        after(engine)
        for image, label in zip(kept[0]["0"].images, kept[0]["0"].labels, strict=True):
            assert bool((data.x[data.y == label] == image).all((1, 2, 3)).any()) == real


def test_a_class_gives_different_samples_as_long_as_it_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five images each of classes with 7, 3 and 9 samples: five different ones, all three (two of them twice), five."""
    engine = federation("real", ipc=5)
    kept = sent(engine, monkeypatch)
    after(engine)
    for images, times in zip(kept[0]["0"].images.split(5), ([1] * 5, [1, 2, 2], [1] * 5), strict=True):
        assert sorted(images.unique(dim=0, return_counts=True)[1].tolist()) == times


def test_noise_holds_nothing_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without steps, images that start as noise are the same whatever the pixels are."""
    found = []
    for sign in (1, -1):
        engine = federation("feddm", steps=0, init="noise")
        engine.data = {id: replace(data, x=sign * data.x) for id, data in engine.data.items()}
        kept = sent(engine, monkeypatch)
        after(engine)
        found.append(kept[0]["0"].images)
    assert torch.equal(*found)


@pytest.mark.parametrize("redraw", [True, False])
def test_real_draws_anew_or_once(redraw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = federation("real", redraw=redraw)
    kept = sent(engine, monkeypatch)
    after(engine, 2)
    assert torch.equal(kept[0]["0"].images, kept[1]["0"].images) != redraw


def test_even_shapes_give_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 on the wire, so a rounding of float64 may differ by one unit."""
    found = []
    for even in (False, True):
        engine = federation("feddm", steps=4, batch=4, even=even, dtype=torch.float64)
        kept = sent(engine, monkeypatch)
        after(engine)
        found.append(kept[0]["0"].images)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


def test_projection_finds_the_nearest_point_of_the_ball() -> None:
    rng = Rng(0)
    centre = {"a": rng("a").normal(3, 2), "b": rng("b").normal(4), "mean": torch.zeros(2)}
    far = {"a": centre["a"] + 3.0, "b": centre["b"] - 2.0, "mean": torch.ones(2)}
    back = project(far, centre, 0.5, frozenset({"mean"}))
    moved = {name: back[name] - centre[name] for name in ("a", "b")}
    assert abs(tree.norm(moved) - 0.5) < 1e-6
    # nearest: what is cut off points along the radius
    rest = {name: far[name] - back[name] for name in moved}
    assert tree.dot(rest, moved) > (1 - 1e-6) * tree.norm(rest) * tree.norm(moved)
    assert torch.equal(back["mean"], far["mean"])
    near = project(back, centre, 0.6, frozenset({"mean"}))
    assert tree.norm(tree.sub(near, back)) < 1e-6
    assert storage.digest(project(centre, centre, 0.5, frozenset())) == storage.digest(centre)


def test_the_server_stays_in_the_ball() -> None:
    moved = {}
    for rho in (0.05, 50.0):
        engine = federation("real", rho=rho, server_lr=0.5, server_epochs=5)
        start = engine.state["w"]
        moved[rho] = tree.norm(tree.sub(after(engine), start)).item()
    assert abs(moved[0.05] - 0.05) < 1e-6
    assert 0.1 < moved[50.0] < 50.0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_full_batch_step_descends_the_pooled_loss(weighting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """w − lr ∇ Σ_i ω_i ℓ_i / n with ω = 1, or ω_i ∝ n_k,c / ipc so that they are 1 on average (Eq. 10)."""
    settings = {"server_epochs": 1, "server_batch": 64, "server_lr": 0.1, "server_momentum": 0.0}
    engine = federation("real", dtype=torch.float64, weighting=weighting, server_weight_decay=0.0, **settings)
    w, model, kept = engine.state["w"], engine.method.model, sent(engine, monkeypatch)
    moved = after(engine)
    x, y = (torch.cat([getattr(kept[0][id], part) for id in kept[0]]) for part in ("images", "labels"))
    assert y.tolist() == [0, 0, 1, 1, 3, 3, 2, 2]
    weight = torch.tensor([7.0, 7, 3, 3, 9, 9, 5, 5] if weighting == "samples" else [1.0] * 8).double()

    def loss(w: dict[str, Tensor]) -> tuple[Tensor, tuple[()]]:
        losses = F.cross_entropy(model(w, x).logits, y, reduction="none")
        return (losses * weight).sum() / weight.sum(), ()

    with torch.no_grad():
        expected = tree.sub(w, tree.scale(gradient(loss, w)[0], 0.1))
    assert tree.norm(tree.sub(moved, expected)) < 1e-9
    assert tree.norm(tree.sub(expected, w)) > 1e-3


def test_the_servers_rate_falls_in_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps on all images, the second a quarter as long."""
    settings = {"server_epochs": 2, "server_batch": 64, "server_lr": 0.1, "server_decay": 0.25}
    free = {"server_momentum": 0.0, "server_weight_decay": 0.0}
    engine = federation("real", dtype=torch.float64, **settings, **free)
    w, model, kept = engine.state["w"], engine.method.model, sent(engine, monkeypatch)
    moved = after(engine)
    x, y = (torch.cat([getattr(kept[0][id], part) for id in kept[0]]) for part in ("images", "labels"))
    with torch.no_grad():
        for lr in (0.1, 0.025):
            w = tree.sub(w, tree.scale(gradient(lambda w: (F.cross_entropy(model(w, x).logits, y), ()), w)[0], lr))
    assert tree.norm(tree.sub(moved, w)) < 1e-9


def test_the_server_may_see_its_images_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrored images, and no others: a step on all of them mirrored is the step that the server makes."""
    monkeypatch.setattr(trust_region, "Change", lambda numbers, like: lambda x: x.flip(3))
    settings = {"server_epochs": 1, "server_batch": 64, "server_momentum": 0.0, "server_weight_decay": 0.0}
    made = {}
    for kinds in ((), ("flip",)):
        engine = federation("real", dtype=torch.float64, server_augmentation=kinds, **settings)
        w, model, kept = engine.state["w"], engine.method.model, sent(engine, monkeypatch)
        made[kinds] = after(engine)
        x, y = (torch.cat([getattr(kept[0][id], part) for id in kept[0]]) for part in ("images", "labels"))
        seen = x.flip(3) if kinds else x

        def loss(w: dict[str, Tensor], x: Tensor = seen, y: Tensor = y, model: Any = model) -> Any:
            return F.cross_entropy(model(w, x).logits, y), ()

        with torch.no_grad():
            expected = tree.sub(w, tree.scale(gradient(loss, w)[0], 0.01))
        assert tree.norm(tree.sub(made[kinds], expected)) < 1e-9
    assert tree.norm(tree.sub(made[()], made["flip",])) > 1e-5


@pytest.mark.parametrize("model", ["convnet", "cnn"])
def test_any_server_architecture_will_do(model: str) -> None:
    engine = federation("feddm", model=model, steps=2)
    w = after(engine)
    assert w.keys() == engine.method.model.shapes.keys()
    assert all(torch.isfinite(leaf).all() for leaf in w.values())


def test_bytes_that_make_no_sense_are_refused() -> None:
    method = federation("feddm").method
    for images, labels, complaint in (
        (torch.zeros(1, 1, 4, 4), torch.tensor([0]), "client 7 sent images of shape"),
        (torch.zeros(1, *SHAPE), torch.tensor([4]), "client 7 sent labels"),
    ):
        answers = Answers(("7",), None, {"7": Images(images, labels, {})})
        with pytest.raises(FedgistError, match=complaint):
            method.pool(answers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", [(), ("color", "crop")])
def test_nobody_holds_enough_of_anything(changes: tuple[str, ...]) -> None:
    engine = federation("feddm", min_class=50, server_augmentation=changes)
    start = storage.digest(engine.state["w"])
    assert storage.digest(after(engine)) == start


def test_one_round_of_feddm_teaches_all_classes() -> None:
    """One shot, on real 8×8 digits whose clients hold about three classes each; alone they cannot pass 0.5."""
    ground = {"dataset": "digits", "alpha": 0.1, "partition": "dirichlet-balanced", "rounds": 1, "model": "mlp"}
    own = {"method": "feddm", "steps": 10, "ipc": 10, "server_epochs": 30, "server_batch": 64, "server_lr": 0.1}
    taught = {pixels: run(resolve({**ground, **own, "pixels": pixels})) for pixels in ("float32", "uint8")}
    alone = run(resolve({**ground, "method": "independent", "steps": 60, "lr": 0.1}))
    assert alone.accuracy < 0.5
    assert taught["float32"].accuracy > 0.85
    assert taught["uint8"].accuracy > taught["float32"].accuracy - 0.02
    assert taught["uint8"].bytes_up < 0.4 * taught["float32"].bytes_up  # labels and headers are not divided by four


TOY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "feddm_toy.py"))


@pytest.mark.parametrize("seed", range(3))
def test_the_surrogate_of_appendix_c_follows_the_loss(seed: int) -> None:
    """Figure 1. From real points the surrogate is at least six times nearer than the tangent.

    From noise it is nearer too, but not by that much: matching means with a linear feature moves all points of a class
    alike, so that their spread, and with it the curvature, stays what the noise had.
    """
    found = TOY["curves"](seed)
    surrogate, tangent = (TOY["distance"](found, name) for name in ("surrogate", "tangent"))
    assert surrogate < tangent / 6
    assert TOY["distance"](TOY["curves"](seed, init="noise"), "surrogate") < 0.8 * tangent
    # minimising the surrogate is minimising the loss, nearly; the tangent has no minimum
    reached = found["loss"][found["surrogate"].argmin()]
    assert reached - found["loss"].min() < 0.02


def test_the_toy_example_draws_its_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    TOY["main"](str(tmp_path / "toy.svg"))
    assert "surrogate: 0.0" in capsys.readouterr().out
    assert (tmp_path / "toy.svg").stat().st_size > 5000
