"""One of three sites lies about what it computed: it is named and left out, and the run goes on as without it.

Real hosts and the real engine of the server in one process; what site b sends is opened, changed and sealed again.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgist import methods
from fedgist.core.codec import Codec, Leaves, to_bytes
from fedgist.engines import executor
from fedgist.engines.engine import outliers
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.families.global_model import Local
from fedgist.federation.protocol import remote_engine
from fedgist.federation.protocol.envelope import Refusal, Reply, seal, unseal
from fedgist.federation.protocol.policy import opened
from fedgist.federation.protocol.remote_engine import Lost, Patience, RemoteEngine
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL
from fedgist.options import options
from fedgist.words import plain

Lie = Callable[[Leaves], Any]


@cache
def toy(method: str) -> tuple[RunConfig, Inputs]:
    """The method's toy profile on 150 real digits over three sites, all of which are asked."""
    known = {"method": method, "dataset": "digits", "limit": 150, "clients": 3, "device": "cpu"}
    everybody = {"active": 0} if "active" in options(methods.find(method).Config) else {}
    config = resolve({**known, **everybody}, profile="toy")
    return config, from_dataset(config)


class Sites:
    """Three hosts, of which one tells lies about replies of one type."""

    def __init__(self, folder: Path, config: RunConfig, inputs: Inputs, type: str, lie: Lie):
        self.method = methods.find(config.method)(config.options, inputs.task)
        self.liar = sorted(inputs.sites)[1]
        self.type, self.lie, self.told = type, lie, 0
        rules = opened(self.method, TRIAL)
        self.hosts = {
            id: SiteHost(id, folder / id, lambda start, d=data: (self.method, d), executor("sequential"), rules)
            for id, data in inputs.sites.items()
        }

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes | Lost]:
        return {id: self._pass_on(id, self.hosts[id].handle(data)) for id, data in requests.items()}

    def _pass_on(self, id: str, data: bytes) -> bytes:
        header, payload = unseal(data)
        if id != self.liar or not isinstance(header, Reply) or header.type.split(".")[-1] != self.type:
            return data
        reply = next(h.reply for h in self.method.handlers.values() if h.reply.__name__ == self.type)
        leaves = Codec(self.method.bounds(self.method.task.model)).read(reply, payload)
        self.lie(leaves)
        self.told += 1
        return seal(header, to_bytes(reply, leaves))


def scaled(name: str, factor: float) -> Lie:
    def lie(leaves: Leaves) -> None:
        for key, leaf in leaves.items():
            if key.split("/")[0] == name:
                leaves[key] = leaf * factor

    return lie


def filled(name: str, value: float) -> Lie:
    return lambda leaves: [leaf.fill_(value) for key, leaf in leaves.items() if key.split("/")[0] == name]


LIES: list[tuple[str, str, Lie, str]] = [
    *((method, "Local", filled("p", value), "Local.p ") for method in ("fedavg", "fedprox") for value in (-1.0, 2.0)),
    ("fedavg", "Local", filled("p", float("nan")), "Local.p holds a number that is not finite"),
    ("fedavg", "Local", filled("pw", float("inf")), "not finite"),
    ("fedavg", "Local", scaled("pw", 1e6), "pw <so many> times as large"),
    ("fedavg", "Local", filled("p", 0.0), "pw of no p"),
    ("scaffold", "Changes", filled("p", float("nan")), "Changes.p holds a number that is not finite"),
    ("scaffold", "Changes", filled("joined", 7), "Changes.joined holds 7, above the 1 that it may be"),
    ("scaffold", "Changes", scaled("dc", 1e6), "dc <so many> times as large"),
    ("fedadam", "Update", scaled("delta", 1e5), "delta <so many> times as large"),
    ("fednova", "Normalised", filled("pa", -3.0), "Normalised.pa holds -3, below the 0"),
    ("feddm", "Images", filled("labels", 10), "Images.labels holds 10, above the 9"),
    ("feddm", "Images", filled("labels", -1), "Images.labels holds -1"),
    ("feddm", "Images", lambda leaves: leaves.update(images=leaves["images"][:, :, :4].contiguous()), "does not fit"),
    ("tofu", "Upload", filled("p", 3e38), "Upload.p holds 3e+38"),
    ("fedgen", "Upload", filled("own_counts", -5.0), "own_counts"),
    ("codream", "SoftLabels", scaled("outputs", 1e6), "outputs <so many> times as large"),
    ("codream", "Trained", filled("p", float("nan")), "Trained.p"),
    ("repshare", "Representations", scaled("sums", 1e6), "sums <so many> times as large"),
    (
        "repshare",
        "Representations",
        lambda leaves: leaves.update({name: leaves[name][..., :3].contiguous() for name in ("sums", "observations")}),
        "does not fit",
    ),
    ("feddistill", "Local", filled("holders", -1.0), "Local.holders"),
]


@pytest.mark.parametrize(("method", "type", "lie", "why"), LIES)
def test_a_lie_in_a_round(method: str, type: str, lie: Lie, why: str, tmp_path: Path, caplog: Any) -> None:
    """Refused at the door, named in the log and in the report of the round; the server's state stays sound."""
    config, inputs = toy(method)
    wire = Sites(tmp_path, config, inputs, type, lie)
    engine = RemoteEngine(wire.method, wire, inputs.info, seed=0, executor=executor("sequential"))
    report = engine.run_round()
    assert wire.told and list(report.missing) == [wire.liar]
    said = re.sub(r"[\d.e+]+ times", "<so many> times", report.missing[wire.liar])
    assert why in said and report.missing[wire.liar] in caplog.text
    assert report.skipped is None and report.answered == 2 and not engine.diverged()


@pytest.mark.parametrize(("method", "type", "lie", "why"), LIES[4:6])
def test_without_the_door_a_lie_works(
    method: str, type: str, lie: Lie, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the test: nobody is named, and what the server learned is gone or stands still."""
    monkeypatch.setattr(Codec, "_check_values", lambda *_: None)
    monkeypatch.setattr(remote_engine, "outliers", lambda *_: {})
    config, inputs = toy(method)
    wire = Sites(tmp_path, config, inputs, type, lie)
    engine = RemoteEngine(wire.method, wire, inputs.info, seed=0, executor=executor("sequential"))
    before = engine.digest()
    assert not engine.run_round().missing
    engine.rounds_done = 0
    assert engine.diverged() or engine.digest() == before


@pytest.mark.parametrize("value", [float("nan"), 3e38, -1.0, 1.5])
def test_a_lie_about_a_score(value: float, tmp_path: Path) -> None:
    """The mean is that of the others, within 0 and 1, and the row of the metrics names who was left out."""
    config, inputs = toy("feddistill")
    honest = Sites(tmp_path / "honest", config, inputs, "Score", lambda leaves: None)
    wire = Sites(tmp_path / "lying", config, inputs, "Score", filled("accuracy", value))
    for sites in (honest, wire):
        engine = RemoteEngine(sites.method, sites, inputs.info, seed=0, executor=executor("sequential"))
        engine.run_round()
        found = engine.evaluate(inputs.test)
    assert wire.told and 0 <= found["accuracy"] <= 1
    assert "Score.accuracy" in engine.missing[wire.liar]


def test_a_score_of_nobody_is_no_score(tmp_path: Path) -> None:
    """An accuracy of 1 over 0 clients would lift the mean of the others, two of them above 1."""
    config, inputs = toy("feddistill")
    wire = Sites(tmp_path, config, inputs, "Score", lambda leaves: leaves["clients"].fill_(0))
    engine = RemoteEngine(wire.method, wire, inputs.info, seed=0, executor=executor("sequential"))
    engine.evaluate(inputs.test)
    assert "above the 0" in engine.missing[wire.liar]


def test_the_bound_of_norms_can_be_moved_and_wants_three(tmp_path: Path) -> None:
    """The test of the test: what is refused at 100 passes at 1e7; of two sites nobody can say who is right."""
    config, inputs = toy("fedavg")
    wire = Sites(tmp_path, config, inputs, "Local", scaled("pw", 1e6))
    patience = Patience(max_norm=1e7)
    engine = RemoteEngine(wire.method, wire, inputs.info, seed=0, executor=executor("sequential"), patience=patience)
    assert not engine.run_round().missing
    packed = {
        id: {"pw/w": torch.tensor([float(size)]), "p": torch.tensor(0.5)}
        for id, size in zip("abc", (1, 1e4, 2), strict=True)
    }
    assert list(outliers(Local, packed, 100)) == ["b"]
    del packed["c"]
    assert outliers(Local, packed, 100) == {}
    large = {
        id: {"pw/w": torch.tensor([float(size)]), "p": torch.tensor(float(size))}
        for id, size in zip("abc", (1, 1e4, 2), strict=True)
    }
    assert outliers(Local, large, 100) == {}  # it has more data, and for each of its samples it adds as much as others


def test_words_of_a_site_cannot_write_into_a_terminal(tmp_path: Path, caplog: Any) -> None:
    """Escape sequences, new lines and a megabyte: what reaches the log and the metrics is one short plain line."""
    config, inputs = toy("fedavg")
    wire = Sites(tmp_path, config, inputs, "Local", lambda leaves: None)
    honest = wire.exchange
    evil = Refusal(False, "\x1b[2J\x07all is well\nround 9: site a failed " + "x" * 900)
    wire.exchange = lambda *asked: {**honest(*asked), wire.liar: seal(evil)}
    engine = RemoteEngine(wire.method, wire, inputs.info, seed=0, executor=executor("sequential"))
    said = engine.run_round().missing[wire.liar]
    assert "[2J all is well round 9" in said and len(said) <= 301 and said.isprintable()
    assert "\x1b" not in caplog.text and "\nround 9" not in caplog.text
    assert plain("a\u202eb\x85c\u2028d") == "a b c d"
