"""DP-FedAvg: no client moves a sum by more than declared, an audit agrees, and few clients are refused with a sum."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner, Result

from auditing import least_mu
from fedgist import engines, methods
from fedgist.cli import app
from fedgist.core.errors import FedgistError, MixedModels
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.dp import gaussian
from fedgist.dp.accountant import CLIENT, RECORD
from fedgist.dp.budget import Book
from fedgist.dp.randomness import exact, simulated
from fedgist.dp.releases import Mechanism, Sums
from fedgist.engines.local import LocalEngine
from fedgist.engines.private import Private
from fedgist.experiments import privacy, runner
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.dp_audit import Witness
from fedgist.experiments.inputs import from_dataset
from fedgist.methods.dp_fedavg import Bound, DPFedAvg
from toys import federation

SETTINGS = {"method": "dp-fedavg", "dataset": "digits", "model": "mlp:hidden=8", "clients": 100, "device": "cpu"}
PRIVATE = {"rounds": 3, "steps": 5, "batch": 5, "epsilon": 4.0, "update_clip": 0.1, "dp_noise": "sum"}
MU = gaussian.mu(4.0, 1e-5)
N = 20_000


def config(**given: object) -> RunConfig:
    return privacy.planned(resolve({**SETTINGS, "engine": "sequential", **PRIVATE, **given}))


@cache
def method() -> DPFedAvg:
    made = config()
    return methods.find("dp-fedavg")(made.options, from_dataset(made).task)  # type: ignore[return-value]


def release() -> Sums:
    (found,) = method().releases.values()
    assert isinstance(found, Sums)
    return found


# What a client gives

WEIGHTS = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(st.lists(WEIGHTS, min_size=6, max_size=6), st.floats(1e-6, 1e6), st.booleans())
def test_no_contribution_is_longer_than_declared(weights: list[float], limit: float, single: bool) -> None:
    """Over all tensors together, and the direction stays; NaN and what has no length count as 0."""
    given = torch.tensor(weights, dtype=torch.float32 if single else torch.float64)
    w, start = {"a": given[:2], "b": given[2:].view(2, 2)}, {"a": torch.ones(2), "b": torch.zeros(2, 2)}
    sent = Bound(limit).clipped(w, start)
    moved = given.double() - torch.tensor([1.0, 1, 0, 0, 0, 0])
    norm = torch.linalg.vector_norm(moved).item()
    assert sent.dtype == torch.float64 and sent.isfinite().all()
    assert torch.linalg.vector_norm(sent).item() <= limit * (1 + 1e-12)
    wanted = moved * min(1.0, limit / max(norm, 1e-300)) if math.isfinite(norm) else torch.zeros(6).double()
    assert torch.allclose(sent, wanted, rtol=1e-9, atol=0)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38, 50.0]), st.integers(0, 9), st.integers(1, 12))
def test_no_records_make_a_client_give_more(pixel: float, label: int, count: int) -> None:
    """Whatever its data, and whatever training makes of it; a client with none gives 0."""
    for n in (count, 0):
        data = ClientData(torch.full((n, 1, 8, 8), pixel), torch.full((n,), label), 10)
        (sent,) = contributions({"0": data}).values()
        assert torch.linalg.vector_norm(sent).item() <= 0.1 * (1 + 1e-12)
        assert n or not sent.any()


def contributions(sites: dict[str, ClientData]) -> dict[str, Tensor]:
    """What clients give in the first round, before the noise."""
    made = config(few_clients=True, clients=len(sites))
    inputs = replace(from_dataset(config()), sites=sites, info={id: {"model": SETTINGS["model"]} for id in sites})
    engine = runner.in_process(method(), inputs, made, engines.executor("sequential", "cpu"))
    layer = engine.layer
    assert isinstance(layer, Private)
    seen = layer.sites = {id: Witness(site) for id, site in layer.sites.items()}  # type: ignore[assignment]
    engine.run_round()
    return {id: witness.sights[0].given["total"] for id, witness in seen.items()}  # type: ignore[attr-defined]


def test_it_is_fedavg_where_nothing_is_clipped() -> None:
    """The mean of updates is the update of the mean; a client that is away counts as one that gives 0."""
    sites = {str(i): one for i, one in enumerate(toy_clients(4))}
    options = {"steps": 3, "batch": 8, "lr": 0.2}
    ours = federation("dp-fedavg", sites, "mlp:hidden=4", update_clip=1e6, **options)
    theirs = federation("fedavg", sites, "mlp:hidden=4", weighting="uniform", **options)
    settings = {**options, "update_clip": 1e6, "server_lr": 2.0}
    away = federation("dp-fedavg", sites, "mlp:hidden=4", offline=lambda id, *when: id in ("2", "3"), **settings)
    before = ours.state["w"]
    for engine in (ours, theirs, away):
        assert engine.run_round().skipped is None
    for name, value in theirs.state["w"].items():
        assert torch.allclose(ours.state["w"][name], value, atol=1e-6)
    two = federation("fedavg", dict(list(sites.items())[:2]), "mlp:hidden=4", weighting="uniform", **options)
    two.run_round()
    for name, value in two.state["w"].items():  # half of the mean of two, at twice the rate
        assert torch.allclose(away.state["w"][name] - before[name], value - before[name], atol=1e-6)


def toy_clients(count: int) -> list[ClientData]:
    return list(from_dataset(replace(config(), clients=count)).sites.values())


# What it costs


def audited(sums: Sums, shift: float, factor: float = 1.0) -> float:
    """The μ that one round's release has at least, by N of them in worlds that are so far apart."""
    worlds = []
    for there in (0, 1):
        along = torch.full((N,), there * shift, dtype=torch.float64)
        noised = Mechanism(MU).noised(sums, {"total": along}, exact(simulated(Rng(there))))["total"]
        worlds.append(along + factor * (noised - along))
    return least_mu(*worlds)


def loud() -> tuple[Tensor, Tensor]:
    """What two clients give whose records say the opposite: all of it is clipped."""
    x = torch.full((12, 1, 8, 8), 8.0)
    found = contributions({str(k): ClientData(x, torch.full((12,), 7 * k), 10) for k in (0, 1)})
    assert all(math.isclose(torch.linalg.vector_norm(one).item(), 0.1) for one in found.values())
    return found["0"], found["1"]


def test_an_audit_finds_what_a_round_is_charged_and_no_more() -> None:
    """Three rounds of μ/√3 each are μ. With nine tenths or half of the noise, or a broken clip, it is more."""
    charged = 1 / Mechanism(MU).release(release()).noise
    assert charged == pytest.approx(MU / math.sqrt(3))
    shift = torch.linalg.vector_norm(loud()[0]).item()
    assert 0.9 * charged < audited(release(), shift) < charged
    for fault in ((shift, 0.9), (shift, 0.5), (3 * shift, 1.0)):
        assert audited(release(), *fault) > charged


def test_a_record_costs_twice_as_much_as_its_client() -> None:
    """It turns one contribution into another, and two may point away from each other: more than C, at most 2C."""
    first, second = loud()
    apart = torch.linalg.vector_norm(first - second).item()
    assert 0.1 < apart <= 0.2 * (1 + 1e-12)
    cost = Mechanism(MU).release(release())
    client, record = (1 / cost.counted_by(unit).noise for unit in (CLIENT, RECORD))
    assert record == pytest.approx(2 * client)
    assert client < audited(release(), 0.2) < record  # to charge it as the client's would be the fault


def test_what_is_charged_is_what_was_sent(tmp_path: Path) -> None:
    """A line a round in every book, of the noise that is in the sum: a chi-square of it, within one in a million."""
    made = config()
    engine = runner.in_process(method(), from_dataset(made), made, engines.executor("sequential", "cpu"))
    layer = engine.layer
    assert isinstance(engine, LocalEngine) and isinstance(layer, Private)
    witnesses = {id: Witness(site) for id, site in layer.sites.items()}
    for id, site in layer.sites.items():
        site.book = Book(tmp_path / f"{id}.jsonl")
    layer.sites = witnesses  # type: ignore[assignment]
    for _ in range(made.rounds):
        engine.run_round()
    for turn in range(made.rounds):
        sights = [witness.sights[turn] for witness in witnesses.values()]
        noise = sum(sight.sent["total"] - sight.given["total"] for sight in sights)
        spread = (noise / (0.1 * made.options.noise_multiplier)).square().sum().item()
        assert 1e-6 < stats.chi2.cdf(spread, method().model.size) < 1 - 1e-6
    for id in witnesses:
        rows = [json.loads(line) for line in (tmp_path / f"{id}.jsonl").read_text().splitlines()]
        assert [(row["noise"], row["unit"]) for row in rows] == [(made.options.noise_multiplier, "client")] * 3
    assert layer.spent() == pytest.approx(4.0)


def test_without_noise_it_declares_nothing_to_be_private() -> None:
    bare = DPFedAvg(replace(method().config, noise_multiplier=0.0), method().task)
    with pytest.raises(FedgistError, match="set noise_multiplier"):
        _ = bare.releases


def test_models_that_it_cannot_average() -> None:
    task = method().task
    other = from_dataset(config(model="mlp:hidden=4", few_clients=True)).task
    with pytest.raises(MixedModels, match="the same model"):
        DPFedAvg(method().config, replace(task, models={**task.models, **other.models}))
    with pytest.raises(FedgistError, match="BatchNorm's variances"):
        DPFedAvg(method().config, from_dataset(config(model="mlp:hidden=4:norm=batch")).task)


# On the command line


def run(out: Path, *words: str) -> Result:
    given = ["run", "dp-fedavg", "--dataset", "digits", "--model", "mlp:hidden=8", "--device", "cpu", "--rounds", "2"]
    options = ["--set", "steps=5", "--set", "batch=5", "--set", "update_clip=0.05", "--engine", "stacked"]
    return CliRunner().invoke(app, [*given, *options, *words, "--out", str(out)])


ONCE = ["--epsilon", "4", "--set", "dp_noise=sum"]


def test_too_few_clients_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    """z = √2/μ = 1.53 on 610 numbers of 10 clients, √610/10 times that in the mean, √2 times that in two rounds."""
    z, n = math.sqrt(2) / MU, 10
    few = run(tmp_path / "few", *ONCE, "--clients", str(n))
    assert few.exit_code == 2 and not (tmp_path / "few").exists()
    mean, enough = z * math.sqrt(610) / n, math.ceil(math.sqrt(610) / MU)
    for part in (
        "10 clients are too few to hide each of them with all of its records at ε = 4",
        f"noise of {z:.3g} C in a round's sum of 610 numbers moves their mean by {mean:.3g} C",
        f"and the model by {mean * math.sqrt(2):.3g} C in 2 rounds",
        "updates of norm C move it by 2 C at most",
        f"{enough} clients could move it as far as the noise",
        "few_clients=true",
    ):
        assert part in few.stderr, (part, few.stderr)
    assert run(tmp_path / "r", *ONCE, "--clients", str(enough - 1)).exit_code == 2
    assert run(tmp_path / "r", *ONCE, "--clients", str(enough)).exit_code == 0
    local = run(tmp_path / "local", "--epsilon", "4", "--clients", str(enough))  # √n times the noise
    assert local.exit_code == 2 and f"{math.ceil(610 / MU**2)} clients could move it" in local.stderr
    assert "dp_noise=sum" in local.stderr


def test_who_wants_to_see_it_fail_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(tmp_path / "r", *ONCE, "--clients", "10", "--set", "few_clients=true")
    assert done.exit_code == 0 and "10 clients are too few" in caplog.text and "runs all the same" in caplog.text
    told = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]
    assert told["noise over the most that clients can move"] == pytest.approx(math.sqrt(610) / MU / 10)


def test_a_server_across_machines_refuses_them_too() -> None:
    with pytest.raises(FedgistError, match="5 clients are too few"):
        privacy.across(method(), config(clients=5, dp_noise="local"), None)


def test_every_output_says_that_a_client_is_the_unit(tmp_path: Path) -> None:
    """Beside ε: on the line, in the metrics, the result, the report, the card, the books and what was spent."""
    done = run(tmp_path / "r", *ONCE, "--clients", "40")
    assert done.exit_code == 0 and "ε 4 for a client" in done.stderr, done.output
    unit = "one client with all of its records, added or removed"
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [row["unit"] for row in rows] == ["client"] * 2 and rows[-1]["epsilon"] == pytest.approx(4)
    assert json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]["unit"] == unit
    assert f"unit {unit}" in (tmp_path / "r" / "report.html").read_text()
    assert f"unit: {unit}" in (tmp_path / "r" / "MODEL_CARD.md").read_text()
    spent = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "r")]).stdout
    assert "00: epsilon 4 at delta 1e-05, 2 releases, for a client" in spent and unit in spent
    as_record = gaussian.epsilon(2 * MU, 1e-5)
    assert f"00: epsilon {as_record:.6g} at delta 1e-05, 2 releases, for a record" in spent
    rows = json.loads(CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "r"), "--json"]).stdout)
    assert len(rows) == 80 and [row["unit"] for row in rows[:2]] == ["client", "record"]


def test_noise_in_a_secure_sum(tmp_path: Path) -> None:
    """Sums over 27 of 40 are opened: √(40/27) times the noise of one trusted party."""
    done = run(tmp_path / "r", *ONCE, "--clients", "40", "--secure", "masks")
    assert done.exit_code == 0, done.output
    told = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]
    assert "sums over 27 or more sites" in told["against"] and told["epsilon"] == pytest.approx(4)
    factor = math.sqrt(40 / 27)
    assert told["noise over that of one trusted party"] == pytest.approx(factor)
    assert told["noise over the most that clients can move"] == pytest.approx(factor * math.sqrt(610) / MU / 40)


def test_a_delta_too_large_for_so_many_clients_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run(tmp_path / "r", *ONCE, "--delta", "0.01", "--clients", "40")
    assert done.exit_code == 0 and "1/(10 n) for 40 clients: a mechanism that gives a whole client away" in caplog.text


@pytest.mark.parametrize("noise", ["local", "sum"])
@pytest.mark.parametrize("fault", ["none", "half the noise", "a broken clip"])
def test_the_audit_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: str, fault: str) -> None:
    """Clients are the canaries: with their records or with none."""
    few = ["--epsilon", "8", "--clients", "120", "--set", f"dp_noise={noise}", "--set", "few_clients=true"]
    assert run(tmp_path / "r", *few).exit_code == 0
    sigma, clipped = Mechanism.sigma, Bound.clipped
    if fault == "half the noise":
        monkeypatch.setattr(Mechanism, "sigma", lambda self, one, sums: sigma(self, one, sums) / 2)
    elif fault == "a broken clip":
        monkeypatch.setattr(Bound, "clipped", lambda self, w, start: 3 * clipped(self, w, start))
    done = CliRunner().invoke(app, ["audit", "dp", str(tmp_path / "r"), "--json"])
    found = json.loads(done.stdout)
    assert found["promised"] == pytest.approx(8) and found["unit"] == "client" and found["canaries"] == 120
    assert found["broken"] is (fault != "none") and done.exit_code == found["broken"], found
    assert found["least"] > 2


def test_what_a_client_keeps_does_not_tell_whether_it_has_records() -> None:
    """A reply says whether there is a new state to go on from: with momentum that is kept, in the second round there is
    one where there are records, and none where there are none; no noise hides that."""
    given = config(momentum=0.9, keep_momentum=True)
    with pytest.raises(FedgistError, match="leave out keep_momentum"):
        _ = DPFedAvg(given.options, from_dataset(given).task).releases
