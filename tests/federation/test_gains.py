"""Fairness across machines: the server learns a histogram of gains, and each site its own."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.core.codec import Codec, add_up
from fedgist.core.errors import FedgistError
from fedgist.core.method import who_sees_what
from fedgist.core.rng import Rng
from fedgist.data import datasets
from fedgist.engines import executor
from fedgist.experiments import fairness
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.folder import RunFolder
from fedgist.experiments.progress import Silent
from fedgist.federation import gains, runs, site_setup
from fedgist.federation.gains import STEPS, Comparison, Runs, summary, told
from fedgist.federation.protocol.envelope import Start, unseal
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Patience, RemoteEngine

OPTIONS = {"model": "mlp:hidden=16", "rounds": 1, "steps": 10, "lr": 0.1}  # engine and device stay `auto`, as for users


class Sites:
    """Three sites with thirds of the digits, of which the last tests on fewer samples than its policy asks for."""

    def __init__(self, folder: Path):
        rules = dict.fromkeys("ab", Policy(min_samples_per_class=1)) | {"c": Policy(min_test_samples=1000)}
        self.folder, self.hosts = folder, {}
        for number, (id, one) in enumerate(rules.items(), 1):
            data = datasets.export("digits", folder / id, part=f"{number}/3")
            self.hosts[id] = site_setup.make_host(id, folder / id, site_setup.Settings(str(data)), one)

    def exchange(self, requests: Mapping[str, bytes], timeout: float, enough: int) -> dict[str, bytes]:
        return {id: self.hosts[id].handle(data) for id, data in requests.items()}

    def run(self, config: RunConfig, out: str, alone: RunFolder | None = None, resume: bool = False) -> RunFolder:
        @contextlib.contextmanager
        def connected() -> Iterator[Any]:
            yield self

        def asked(known: dict[str, Any]) -> Any:
            return resolve({**{"method": config.method}, **OPTIONS}, known)

        settled = runs.settle([*"abc"], asked, self.folder / out, resume)
        runs.run(settled, connected, resume, Patience(), Silent(), None, alone)
        return RunFolder(self.folder / out)


@pytest.mark.parametrize(("method", "whose"), [("fedavg", "global"), ("feddistill", "own")])
def test_sites_compare_what_they_have_with_what_they_had_alone(
    tmp_path: Path, method: str, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    sites = Sites(tmp_path)
    config = resolve({"method": method, **OPTIONS})
    alone = sites.run(fairness.alone(config), "alone")
    folder = sites.run(config, "run", alone)
    known = {
        id: json.loads(path.read_text())[whose] for id in "ab" for path in (tmp_path / id).glob("runs/*/gain.json")
    }
    assert known.keys() == {"a", "b"}  # c has too few test samples for a score to leave
    accuracies, own = [[one[name] for one in known.values()] for name in ("accuracy", "alone")]
    found = fairness.across(folder)[whose]["own labels"]
    assert fairness.across(folder).keys() == {whose}
    assert found.clients == 2 and found.mean == pytest.approx(sum(accuracies) / 2)
    each = [mine - single for mine, single in zip(accuracies, own, strict=True)]
    assert (found.gain, found.lose) == (sum(gain > 0 for gain in each), sum(gain < 0 for gain in each))
    assert found.gain_mean == pytest.approx(sum(each) / 2)
    assert found.gain_worst_tenth == pytest.approx(min(each), abs=0.005 + 1e-9)
    assert found.worst_tenth == pytest.approx(min(accuracies), abs=0.005 + 1e-9)
    said = json.loads(folder.result.read_text())["fairness"][whose]["own labels"]
    assert said["gain"] == found.gain and said["losers"] == {}
    assert f"site a: {folder_run(tmp_path / 'a', method)}: " in caplog.text and "over learning alone" in caplog.text
    assert any("over learning alone" in line for line in gains.known_gains(tmp_path / "a"))
    rows = folder.ledger.read_text().splitlines()
    assert sum("gains.Gains" in row and ",evaluation," in row for row in rows) in (3, 6)
    shown = CliRunner().invoke(app, ["table", str(folder.path), "--format", "csv"])
    assert shown.exit_code == 0 and f"{found.gain} of 2" in shown.stdout, shown.output
    sent = len(rows)
    sites.run(config, "run", alone, resume=True)  # compared already: nobody is asked again
    assert len(folder.ledger.read_text().splitlines()) == sent


@pytest.mark.parametrize("name", ["../../outside", "/{}/outside", "a\nb", ""])
def test_a_gain_is_noted_beside_a_run_and_nowhere_else(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which run is compared is an option, which a server may make what it likes; folders outside are left alone."""
    caplog.set_level("INFO")
    sites, outside = Sites(tmp_path), tmp_path / "outside"
    alone = sites.run(fairness.alone(resolve({"method": "fedavg", **OPTIONS})), "alone")
    outside.mkdir()
    task = site_setup.task_of(start_of(tmp_path / "a", gains.run_id(alone)), Policy())
    named = Comparison(Runs(name.format(tmp_path), gains.run_id(alone)), task, task.models[task.model].init(Rng(0)))
    engine = RemoteEngine(named, sites, {"a": {"model": task.model}}, seed=0, executor=executor("sequential"))
    with pytest.raises(FedgistError, match="no run can be called"):
        engine.evaluate((torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
    assert not list(outside.iterdir()) and "over learning alone" not in caplog.text


def start_of(site: Path, run: str) -> Start:
    header, _ = unseal((site / "runs" / run / "start.envelope").read_bytes())
    assert isinstance(header, Start)
    return header


def folder_run(site: Path, method: str) -> str:
    (path,) = site.glob(f"runs/{method}-*")
    return path.name


def test_the_histogram_says_who_gains_who_loses_and_the_worst_tenth() -> None:
    """Twenty sites alone at 0.5 that reach 0.30, 0.32, …, 0.68: nine gain, ten lose, one does neither."""
    each = [(0.3 + 0.02 * k, 0.5) for k in range(20)]
    codec = Codec({})
    total = codec.values(gains.Gains, add_up(gains.Gains, [codec.pack(told(*one)) for one in each]), additive=True)
    found = gains.summary(gains.Gains(**total))
    wanted = fairness.judge(
        {str(k): one[0] for k, one in enumerate(each)}, {str(k): one[1] for k, one in enumerate(each)}
    )
    for name in ("clients", "gain", "lose"):
        assert getattr(found, name) == getattr(wanted, name)
    for name in ("mean", "deviation", "gain_mean"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=1e-6)
    for name in ("worst_tenth", "gain_worst_tenth"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), abs=0.5 / STEPS + 1e-9)


@pytest.mark.parametrize(("mine", "step"), [(0.5, 0), (0.501, 1), (0.51, 1), (0.499, -1), (0.0, -50), (1.0, 50)])
def test_a_step_of_gain_is_never_zero_for_who_gains(mine: float, step: int) -> None:
    counts = told(mine, 0.5).gains
    assert int(counts.sum()) == 1 and int(torch.nonzero(counts)) - STEPS == step


@pytest.mark.parametrize(("count", "worst"), [(2**59, 0.0), (-(2**59), 0.9), (7, 0.0)])
def test_a_histogram_is_not_spread_out(count: int, worst: float) -> None:
    """Under masks a site may add what it likes; a list of as many steps would not end."""
    total = told(0.9, 0.5)
    total.accuracies[0] += count
    assert summary(total).worst_tenth == pytest.approx(worst)


def test_only_sums_leave() -> None:
    assert all(additive for _, _, _, additive in who_sees_what(Comparison))
