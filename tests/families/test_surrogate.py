"""A server that trains on images that clients send: which are sent, what is refused, its loss, its steps, its ball."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.codec import Codec
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Answers
from fedgist.core.message import WireError
from fedgist.core.work import gradient
from fedgist.engines.local import LocalEngine
from fedgist.families import surrogate
from fedgist.families.surrogate import Images
from fedgist.synthesis import trust_region
from fedgist.synthesis.pixels import dequantise, quantise
from toys import SHAPE, by_label, federation, play, received

SITES = by_label({"0": (7, 3, 2, 9), "1": (0, 2, 5, 0), "2": (1, 0, 2, 2)})
HELD = {"0": [0, 1, 3], "1": [2], "2": []}
"""The classes of which each client has at least three samples."""


def quick(name: str, model: str = "mlp", **given: Any) -> LocalEngine:
    """Few images and passes; client 1 would use an MLP, whatever the server has."""
    settings = {"ipc": 2, "min_class": 3, "server_epochs": 2, "server_batch": 4, **given}
    return federation(name, SITES, (model, "mlp"), **settings)


def after(engine: LocalEngine, rounds: int = 1) -> Any:
    return play(engine, rounds).state["w"]


def test_only_classes_with_enough_samples_are_sent() -> None:
    engine = quick("feddm", steps=2)
    kept = received(engine)
    after(engine)
    for id, held in HELD.items():
        assert kept[0][id].labels.tolist() == [c for c in held for _ in range(2)]
        assert kept[0][id].images.shape == (2 * len(held), *SHAPE)
        assert kept[0][id].counts == {}


def test_a_class_gives_different_samples_as_long_as_it_has_any() -> None:
    """Five images each of classes with 7, 3 and 9 samples: five different ones, all three (two of them twice), five."""
    engine = quick("real", ipc=5)
    kept = received(engine)
    after(engine)
    for images, times in zip(kept[0]["0"].images.split(5), ([1] * 5, [1, 2, 2], [1] * 5), strict=True):
        assert sorted(images.unique(dim=0, return_counts=True)[1].tolist()) == times


def test_images_that_travel_as_bytes_lose_only_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matching stays inside the range, so nothing is clamped: half a level of 255 is all that may change."""
    engine = quick("feddm", steps=5, lr=20.0, pixels="uint8", model="convnet")
    kept, seen = received(engine), []
    monkeypatch.setattr(surrogate, "quantise", lambda x, *ends: seen.append(x) or quantise(x, *ends))
    after(engine)
    assert kept[0]["0"].images.dtype == torch.uint8
    before, sent = torch.cat(seen), torch.cat([kept[0][id].images for id in kept[0]])
    assert (dequantise(sent, (0.0,), (1.0,)) - before).abs().max() < 0.5 / 255 + 1e-6
    assert ((before == 0) | (before == 1)).any()  # the constraint was needed


def test_bytes_that_make_no_sense_are_refused() -> None:
    method = quick("feddm").method
    codec = Codec(method.bounds("mlp"))
    with pytest.raises(WireError, match=r"images: shape \(1, 1, 4, 4\) does not fit \('images', 1, 8, 8\)"):
        codec.pack(Images(torch.zeros(1, 1, 4, 4), torch.tensor([0]), {}))
    answers = Answers(("7",), None, {"7": Images(torch.zeros(1, *SHAPE), torch.tensor([4]), {})})
    with pytest.raises(FedgistError, match="client 7 sent labels"):
        method.pool(answers)  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", [(), ("color", "crop")])
@pytest.mark.parametrize("nothing", [{"min_class": 50}, {"server_epochs": 0}])
def test_without_images_or_without_passes_the_server_stays(nothing: dict[str, int], changes: tuple[str, ...]) -> None:
    engine = quick("feddm", server_augmentation=changes, **nothing)
    start = storage.digest(engine.state["w"])
    assert storage.digest(after(engine)) == start


def test_a_round_without_any_image_says_so(caplog: pytest.LogCaptureFixture) -> None:
    after(quick("feddm"))
    assert not caplog.records
    after(quick("feddm", min_class=50))
    assert "no client that answered holds min_class=50 samples of any class" in caplog.text


def test_the_server_stays_in_the_ball() -> None:
    moved = {}
    for rho in (0.05, 50.0):
        engine = quick("real", rho=rho, server_lr=0.5, server_epochs=5)
        start = engine.state["w"]
        moved[rho] = tree.norm(tree.sub(after(engine), start)).item()
    assert abs(moved[0.05] - 0.05) < 1e-6
    assert 0.1 < moved[50.0] < 50.0


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_one_full_batch_step_descends_the_pooled_loss(weighting: str) -> None:
    """w − lr ∇ Σ_i ω_i ℓ_i / n with ω = 1, or ω_i ∝ n_k,c / ipc so that they are 1 on average (Eq. 10)."""
    settings = {"server_epochs": 1, "server_batch": 64, "server_lr": 0.1, "server_momentum": 0.0}
    engine = quick("real", dtype=torch.float64, weighting=weighting, server_weight_decay=0.0, **settings)
    w, model, kept = engine.state["w"], engine.method.model, received(engine)
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


def test_the_servers_rate_falls_in_the_second_half() -> None:
    """Two steps on all images, the second a quarter as long."""
    settings = {"server_epochs": 2, "server_batch": 64, "server_lr": 0.1, "server_decay": 0.25}
    free = {"server_momentum": 0.0, "server_weight_decay": 0.0}
    engine = quick("real", dtype=torch.float64, **settings, **free)
    w, model, kept = engine.state["w"], engine.method.model, received(engine)
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
        engine = quick("real", dtype=torch.float64, server_augmentation=kinds, **settings)
        w, model, kept = engine.state["w"], engine.method.model, received(engine)
        made[kinds] = after(engine)
        x, y = (torch.cat([getattr(kept[0][id], part) for id in kept[0]]) for part in ("images", "labels"))
        seen = x.flip(3) if kinds else x

        def loss(w: dict[str, Tensor], x: Tensor = seen, y: Tensor = y, model: Any = model) -> Any:
            return F.cross_entropy(model(w, x).logits, y), ()

        with torch.no_grad():
            expected = tree.sub(w, tree.scale(gradient(loss, w)[0], 0.01))
        assert tree.norm(tree.sub(made[kinds], expected)) < 1e-9
    assert tree.norm(tree.sub(made[()], made["flip",])) > 1e-5
