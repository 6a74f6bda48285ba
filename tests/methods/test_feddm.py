"""FedDM and its control: what travels, how images begin and change, and what one round teaches."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist import storage
from fedgist.core.ledger import Ledger
from fedgist.engines.local import LocalEngine
from fedgist.experiments.config import resolve
from fedgist.experiments.runner import run
from toys import by_label, federation, play, received

SITES = by_label({"0": (7, 3, 2, 9), "1": (0, 2, 5, 0), "2": (1, 0, 2, 2)})
HELD = {"0": [0, 1, 3], "1": [2], "2": []}
"""The classes of which each client has at least three samples."""


def quick(name: str, model: str = "mlp", **given: Any) -> LocalEngine:
    """Few images and passes; client 1 would use an MLP, whatever the server has."""
    settings = {"ipc": 2, "min_class": 3, "server_epochs": 2, "server_batch": 4, **given}
    return federation(name, SITES, (model, "mlp"), **settings)


def after(engine: LocalEngine, rounds: int = 1) -> Any:
    return play(engine, rounds).state["w"]


@pytest.mark.parametrize("name", ["feddm", "real"])
@pytest.mark.parametrize(("pixels", "bytes"), [("float32", 4), ("float16", 2), ("uint8", 1)])
def test_the_ledger_has_table_2(name: str, pixels: str, bytes: int, tmp_path: Path) -> None:
    """Numbers up: classes held × ipc × pixels. Exact bytes: those numbers at their width, and eight a label."""
    ledger = Ledger(tmp_path / "ledger.csv")
    own = {"steps": 1} if name == "feddm" else {}
    engine = quick(name, ledger=ledger, pixels=pixels, **own)
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


def test_without_steps_feddm_sends_what_real_sends() -> None:
    assert storage.digest(after(quick("feddm", steps=0), 2)) == storage.digest(after(quick("real"), 2))
    assert storage.digest(after(quick("feddm", steps=2), 2)) != storage.digest(after(quick("real"), 2))


def test_real_images_are_real_and_those_of_synthesis_are_not() -> None:
    data = SITES["0"]
    for name, settings, real in (("real", {}, True), ("feddm", {"steps": 3, "init": "noise"}, False)):
        engine = quick(name, **settings)
        kept = received(engine)
        after(engine)
        for image, label in zip(kept[0]["0"].images, kept[0]["0"].labels, strict=True):
            assert bool((data.x[data.y == label] == image).all((1, 2, 3)).any()) == real


def test_noise_holds_nothing_of_the_data() -> None:
    """Without steps, images that start as noise are the same whatever the pixels are."""
    found = []
    for sign in (1, -1):
        engine = quick("feddm", steps=0, init="noise")
        engine.data = {id: replace(data, x=sign * data.x) for id, data in engine.data.items()}
        kept = received(engine)
        after(engine)
        found.append(kept[0]["0"].images)
    assert torch.equal(*found)


@pytest.mark.parametrize("redraw", [True, False])
def test_real_draws_anew_or_once(redraw: bool) -> None:
    engine = quick("real", redraw=redraw)
    kept = received(engine)
    after(engine, 2)
    assert torch.equal(kept[0]["0"].images, kept[1]["0"].images) != redraw


def test_even_shapes_give_the_same_images() -> None:
    """float32 on the wire, so a rounding of float64 may differ by one unit."""
    found = []
    for even in (False, True):
        engine = quick("feddm", steps=4, batch=4, even=even, dtype=torch.float64)
        kept = received(engine)
        after(engine)
        found.append(kept[0]["0"].images)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("model", ["convnet", "cnn"])
def test_any_server_architecture_will_do(model: str) -> None:
    engine = quick("feddm", model=model, steps=2)
    w = after(engine)
    assert w.keys() == engine.method.model.shapes.keys()
    assert all(torch.isfinite(leaf).all() for leaf in w.values())


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
