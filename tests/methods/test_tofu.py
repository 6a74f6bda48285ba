"""TOFU: with an exact encoder it is FedAvg; everybody stays in step; exact bytes; the switches; who missed rounds."""

import csv
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedgist import methods, models, storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.core.work import Place, stacked
from fedgist.data.client_data import ClientData
from fedgist.engines.local import LocalEngine
from fedgist.engines.scheduler import drive_one
from fedgist.options import build
from fedgist.synthesis.encoding import Encoder
from toys import CLASSES, SHAPE, clients, federation, play, task_of

SMALL, SITES = "mlp:hidden=6", clients(7, 20, 3)
QUICK: dict[str, Any] = {"steps": 2, "batch": 4, "lr": 0.1, "images": 2, "iterations": 2}


@dataclass(frozen=True)
class Exact(Encoder):
    """The pixels are the update itself: TOFU without its loss."""

    def step(self, carry: Any, x: Any, w: Any, direction: Any, norms: Any) -> Any:
        variables, state = carry
        flat = torch.cat([part * norm for part, norm in zip(direction.split(self.layers), norms, strict=True)])
        pixels = F.pad(flat, (0, variables["images"].numel() - flat.numel()))
        return {**variables, "images": pixels.view_as(variables["images"])}, state

    def decode(self, sent: Any, w: Any) -> Any:
        names = self.names
        flat = sent["images"].flatten()[: sum(self.layers)]
        parts = flat.split([w[name].numel() for name in names])
        return {name: part.view_as(w[name]) for name, part in zip(names, parts, strict=True)}


def devices(name: str = "tofu", model: str = SMALL, sites: Any = SITES, **given: Any) -> LocalEngine:
    return federation(name, sites, model, **given)


def after(engine: LocalEngine, rounds: int) -> Any:
    return play(engine, rounds).state["w"]


def rows(path: Path, ledger: Ledger) -> list[dict[str, str]]:
    ledger.close()
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_with_an_exact_encoder_it_is_fedavg(weighting: str) -> None:
    """w − Σ p_k (w − w_k) / Σ p_k = Σ p_k w_k / Σ p_k: equal to the rounding of float32 on the wire."""
    settings: dict[str, Any] = {"steps": 3, "batch": 4, "lr": 0.3, "momentum": 0.9, "weighting": weighting}
    numbers = models.build("mlp", SHAPE, CLASSES).size
    count = math.ceil(numbers / math.prod(SHAPE))
    plain = after(devices("fedavg", "mlp", dtype=torch.float64, **settings), 3)
    start = devices("fedavg", "mlp", dtype=torch.float64).state["w"]
    ours = devices(
        "tofu",
        "mlp",
        parts={"encoder": Exact(task_of("mlp").models["mlp"])},
        dtype=torch.float64,
        images=count,
        iterations=1,
        **settings,
    )
    found = after(ours, 3)
    assert tree.norm(tree.sub(found, plain)) < 1e-6 * tree.norm(tree.sub(plain, start))
    assert tree.norm(tree.sub(plain, start)) > 0.1


def watch(engine: LocalEngine, rounds: int) -> list[Any]:
    """The server's weights by version; after every round, each client's weights are the server's of its version."""
    versions = [engine.state["w"]]
    for _ in range(rounds):
        engine.run_round()
        if engine.state["version"] == len(versions):
            versions.append(engine.state["w"])
        for state in engine.site_states.values():
            assert storage.digest(state["w"]) == storage.digest(versions[state["version"]])
    return versions


@pytest.mark.parametrize("pixels", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("model", [SMALL, "cnn"])
def test_everybody_stays_in_step_bit_for_bit(pixels: str, model: str) -> None:
    """Also with BatchNorm (cnn), and also when half of the clients are away in any round."""
    engine = devices(model=model, pixels=pixels, offline=0.5, **QUICK)
    versions = watch(engine, 5)
    assert len(versions) > 3
    assert {state["version"] for state in engine.site_states.values()} != {0}
    for before, after in pairwise(versions):
        assert storage.digest(before) != storage.digest(after)


def test_images_of_odd_sizes_keep_everybody_in_step() -> None:
    """Of several updates in a message only the first lies where torch would put it, and products round by that."""
    data = {id: replace(client, x=client.x[..., :5, :5]) for id, client in SITES.items()}
    engine = devices(model="mlp:hidden=33", sites=data, offline=0.5, **{**QUICK, "images": 3})
    assert len(watch(engine, 8)) > 5


def test_clients_decode_one_by_one_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stack's kernels round otherwise, and the weights of clients and server would drift apart."""
    seen: list[tuple[str, bool]] = []

    def watched(name: str) -> Callable[..., Any]:
        plain = getattr(Encoder, name)

        def call(self: Encoder, *given: Any) -> Any:
            seen.append((name, stacked()))
            return plain(self, *given)

        return call

    for name in ("decode", "finish"):
        monkeypatch.setattr(Encoder, name, watched(name))
    watch(devices(engine="stacked", **QUICK), 3)
    assert {("decode", False), ("finish", True)} <= set(seen)
    assert ("decode", True) not in seen


def test_batch_norm_statistics_are_averaged() -> None:
    """One client: the server's statistics are those that its training left; a gradient could not have told them."""
    sites = clients(20)
    engine = devices(model="cnn", sites=sites, **QUICK)
    plain = devices("fedavg", model="cnn", sites=sites, steps=2, batch=4, lr=0.1)
    ours, theirs = after(engine, 1), after(plain, 1)
    for name in engine.method.model.buffers:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pixels", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("model", [SMALL, "cnn"])
def test_bytes_and_the_papers_count(pixels: str, model: str, tmp_path: Path) -> None:
    """Pixels as chosen (bytes with two ends an image); labels, weights, norms, statistics and p are four bytes each.

    The paper counts N · (pixels + classes + 1) numbers, whatever their type, and nothing else.
    """
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    engine = devices(model=model, pixels=pixels, ledger=ledger, **QUICK)
    after(engine, 2)
    net = engine.method.model
    width, ends = {"float32": (4, 0), "float16": (2, 0), "uint8": (1, 8)}[pixels]
    layers = len({name.rpartition(".")[0] for name in net.shapes})
    statistics = sum(math.prod(net.shapes[name]) for name in net.buffers)
    update = 2 * (64 * width + ends + 4 * (CLASSES + 1)) + 4 * layers + 4 * statistics
    found = {
        (row["round"], row["direction"], row["type"]): (int(row["payload_bytes"]), int(row["paper_bytes"]))
        for row in rows(path, ledger)
    }
    paper = 4 * 2 * (64 + CLASSES + 1)
    assert found == {
        ("1", "down", "tofu.Start"): (4 * (net.size + statistics) + 8, 0),
        ("1", "up", "tofu.Upload"): (update + 8 + 4 + 4, paper),
        ("2", "down", "tofu.Updates"): (update, paper),
        ("2", "up", "tofu.Upload"): (update + 8 + 4 + 4, paper),
    }


def test_who_missed_rounds_gets_the_updates_or_the_weights_if_they_are_smaller(tmp_path: Path) -> None:
    """mlp:hidden=6 has 418 weights; an update of 2 images 140 numbers: two fit into the weights, three do not."""
    away = {"0": {3}, "1": {2, 3, 4}}
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    engine = devices(ledger=ledger, offline=lambda id, round, exchange: round in away.get(id, ()), **QUICK)
    assert engine.method.model.size == 418
    assert engine.method.encoder.payload(2) == 4 * 140
    watch(engine, 5)
    down = {
        (row["round"], row["receiver"]): (row["type"], int(row["payload_bytes"]))
        for row in rows(path, ledger)
        if row["direction"] == "down"
    }
    assert down["4", "0"] == ("tofu.Updates", 2 * 4 * 140)
    assert down["4", "2"] == ("tofu.Updates", 4 * 140)
    assert down["5", "1"] == ("tofu.Weights", 4 * 418 + 8)
    assert len(engine.state["past"]["scales"]) == 418 // 140


def test_a_late_reply_is_left_out() -> None:
    """Client 1 answers round 1 in round 3, at weights that are gone: the others' updates alone count."""
    late = devices(delay=lambda id, round: 2 if (id, round) == ("1", 1) else 0, **QUICK)
    away = devices(offline=lambda id, round, exchange: id == "1", **QUICK)
    watch(late, 3)
    watch(away, 3)
    assert storage.digest(late.state["w"]) == storage.digest(away.state["w"])
    assert late.state["held"]["1"] == 0
    watch_on = after(late, 1)
    assert storage.digest(watch_on) != storage.digest(after(away, 1))


@pytest.mark.parametrize("model", [SMALL, "cnn"])
def test_a_single_device_hears_nothing_back_and_stays_in_step(model: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    ledger = Ledger(path)
    engine = devices(model=model, sites=clients(20), single=True, ledger=ledger, **QUICK)
    for _ in range(3):
        engine.run_round()
        assert storage.digest(engine.site_states["0"]["w"]) == storage.digest(engine.state["w"])
    assert engine.state["version"] == 3
    down = [row for row in rows(path, ledger) if row["direction"] == "down"]
    assert [(row["type"], row["payload_bytes"]) for row in down[1:]] == [("tofu.Updates", "0")] * 2


def test_a_single_device_is_one() -> None:
    with pytest.raises(FedgistError, match="single = true is for one client, not 3: set clients = 1"):
        devices(single=True, **QUICK).run_round()


def test_after_switch_2_it_is_fedavg() -> None:
    """From the weights that the images gave: the same batches, the same sums, the same bits."""
    engine = devices(switch2=2, **QUICK)
    after(engine, 2)
    plain = devices("fedavg", steps=2, batch=4, lr=0.1)
    plain.rounds_done, plain.states = 2, {"server": {"w": engine.state["w"]}}
    assert storage.digest(after(engine, 2)) == storage.digest(after(plain, 2))
    assert not any("cosine" in name for name in engine.evaluate((SITES["0"].x, SITES["0"].y)))


def test_who_was_late_at_switch_2_is_asked_again() -> None:
    """Client 1's images of round 2 are due when nobody asks for images any more: they are lost, the client is not."""
    engine = devices(switch2=2, delay=lambda id, round: int((id, round) == ("1", 2)), **QUICK)
    assert [engine.run_round().answered for _ in range(4)] == [3, 3, 2, 3]
    assert engine.under_way == {}


def test_a_fork_with_full_rounds_starts_where_the_images_ended() -> None:
    """A snapshot of a run without switch₂, restored into a run with it, goes on as if it had been set."""
    images_only, whole = devices(**QUICK), devices(switch2=2, **QUICK)
    after(images_only, 2)
    fork = devices(switch2=2, **QUICK)
    fork.restore(images_only.snapshot())
    assert storage.digest(after(fork, 1)) == storage.digest(after(whole, 3))


def encode(update: Any, residual: Any, w: Any, round: int, **settings: Any) -> Any:
    """What is sent, what is decoded from it, what that loses, and the cosine."""
    method: Any = devices(**{**QUICK, **settings}).method

    async def both_ends() -> Any:
        aimed, sent, cosine = await method.encode(update, residual, w, Rng(1), round)
        decoded = await method.decode(sent, w)
        return sent, decoded, method.lost(aimed, decoded), cosine

    return drive_one(both_ends(), Place())


def some_update() -> tuple[Any, Any]:
    model = task_of(SMALL).models[SMALL]
    return model.init(Rng(0)), model.init(Rng(1))


def test_error_feedback_keeps_what_an_encoding_lost() -> None:
    """Decoded + kept = the update + what was kept before, so that over the rounds nothing is lost."""
    w, update = some_update()
    _, decoded, kept, _ = encode(update, {}, w, 1, feedback=True)
    torch.testing.assert_close(tree.add(decoded, kept), update)
    assert tree.norm(kept) > 0.1
    _, decoded, more, _ = encode(update, kept, w, 2, feedback=True)
    torch.testing.assert_close(tree.add(decoded, more), tree.add(update, kept))
    assert encode(update, {}, w, 1)[2] == {}


def test_switch_1_scales_by_the_cosine() -> None:
    w, update = some_update()
    before, _, _, cosine = encode(update, {}, w, 2, switch1=2, objective="global", iterations=20)
    after, _, _, same = encode(update, {}, w, 3, switch1=2, objective="global", iterations=20)
    method = devices(objective="global", **QUICK).method
    with torch.no_grad():
        encoder = method.encoder  # type: ignore[attr-defined]
        whole = encoder.cosines(encoder.synthetic(before, w), *encoder.aim(update))[1]
    assert 0.05 < whole < 0.95
    assert same == cosine
    torch.testing.assert_close(after["scales"], before["scales"] * whole)


def test_a_message_larger_than_the_weights_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """LeNet5 on MNIST: 64 images have 50,880 numbers, 96 have 76,320, the weights 61,706."""
    lenet = models.build("lenet5", (1, 28, 28), 10)
    task = Task((1, 28, 28), 10, (0.0,), (1.0,), {"lenet5": lenet}, "lenet5")
    tofu = methods.find("tofu")
    with caplog.at_level(logging.WARNING):
        for images, said in ((64, 0), (96, 1)):
            method: Any = tofu(build(tofu.Config, {"images": images}), task)
            assert method.encoder.payload(images) == 4 * (images * (784 + 10 + 1) + 5)
            assert len(caplog.records) == said
    line = "an encoded update has 305300 bytes, the weights only 246824; 77 images would be smaller"
    assert line in caplog.text  # 77 · 795 + 5 = 61,220, and 78 · 795 + 5 = 62,015


def test_the_command_line_says_it_too(tmp_path: Path) -> None:
    """In a process of its own, because a test's own logging would keep the line from standard error."""
    options = (
        "--model mlp:hidden=8 --clients 2 --rounds 1 --set steps=1 --set iterations=1 --set images=64 --device cpu"
    )
    command = [
        sys.executable,
        "-m",
        "fedgist",
        "run",
        "tofu",
        *options.split(),
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = "tofu: an encoded update has 19208 bytes, the weights only 2440; 8 images would be smaller"
    assert done.stderr.splitlines() == [line]  # 75 numbers an image, 2 norms; 610 weights


@pytest.mark.parametrize(("sizes", "single"), [((0, 0), False), ((0,), True)])
def test_nobody_has_data(sizes: tuple[int, ...], single: bool) -> None:
    engine = devices(sites=clients(*sizes), single=single, **QUICK)
    before = storage.digest(engine.state["w"])
    for _ in range(2):
        assert engine.run_round().skipped is None
    assert storage.digest(engine.state["w"]) == before
    assert engine.state["held"] == {id: state["version"] for id, state in engine.site_states.items()}


def test_more_samples_than_the_reference_are_refused() -> None:
    with pytest.raises(FedgistError, match="client 1 holds 20 samples: set n_ref"):
        devices(n_ref=10, **QUICK).run_round()


def test_different_models_are_refused() -> None:
    with pytest.raises(FedgistError, match="one model for all"):
        federation("tofu", SITES, ("mlp", "cnn"))


@pytest.mark.parametrize("settings", [{}, {"prior": "half", "pixels": "uint8"}], ids=str)
def test_it_learns_from_synthetic_images_alone(settings: dict[str, Any]) -> None:
    rng = Rng(0)
    y = torch.arange(120) % CLASSES
    x = rng("noise").normal(120, *SHAPE) * 0.1
    x[torch.arange(120), 0, 2 * y, 2 * y] += 3
    sites = {str(i): ClientData(x[i::2], y[i::2], CLASSES) for i in range(2)}
    engine = devices(model="mlp:hidden=16", sites=sites, steps=8, batch=16, lr=0.1, images=8, iterations=40, **settings)
    after(engine, 6)
    metrics = engine.evaluate((x, y))
    assert metrics["accuracy"] > 0.75  # four classes
    assert 0.3 < metrics["cosine_up"] < 1 and 0.3 < metrics["cosine_down"] < 1
