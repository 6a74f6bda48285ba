"""fedgist privacy: noise for a budget, and what a book says was spent."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedgist.cli import app
from fedgist.dp import accountant
from fedgist.dp.accountant import Release
from fedgist.dp.budget import Book, Limit, Plan


def test_plan_and_spent(tmp_path: Path) -> None:
    """Ten releases need √10 times the noise of one; what they cost is read off the book."""
    done = CliRunner().invoke(app, ["privacy", "plan", "--epsilon", "1", "--releases", "10"])
    assert done.exit_code == 0 and "11.7973 times the sensitivity" in done.stdout, done.output
    assert "one record, added or removed" in done.stdout and "delta 1e-05" in done.stdout
    for client in ("0", "1"):
        for release in range(10):
            Book(tmp_path / "privacy" / f"{client}.jsonl").charge(str(release), Release(11.7973), Limit(2, 1e-5))
    done = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path), "--json"])
    rows = json.loads(done.stdout)
    assert [(row["data"], row["releases"]) for row in rows] == [("0", 10), ("1", 10)]
    assert rows[0]["epsilon"] == pytest.approx(1, abs=1e-4)


def test_a_sampled_plan_is_written(tmp_path: Path) -> None:
    words = ["privacy", "plan", "--epsilon", "4", "--rate", "0.1", "--releases", "20", "--out", str(tmp_path / "p")]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    planned = json.loads((tmp_path / "p").read_text())
    assert planned["releases"] == [{"noise": json.loads(done.stdout)["noise"], "rate": 0.1, "times": 20}]
    assert planned["epsilon"] <= 4 and "record" in planned["neighbours"]


PRIVATE = ["run", "gist", "--dataset", "digits", "--clients", "3", "--epsilon", "8", "--device", "cpu"]


def test_a_private_run_says_what_holds(tmp_path: Path) -> None:
    """On the progress line, in the metrics, the result and the books: ε with all that belongs to it."""
    small = ["grid=1", "scales=1", "orientations=2", "clip=0.3", "dp_noise=sum"]
    words = [*PRIVATE, "--rounds", "2"]
    done = CliRunner().invoke(
        app, [*words, "--engine", "sequential", "--out", str(tmp_path / "r"), *(w for s in small for w in ("--set", s))]
    )
    assert done.exit_code == 0, done.output
    assert "round 1/2" in done.stderr and "ε 8" in done.stderr
    assert "δ = 1e-05 is more than 1/(10 n)" not in done.stderr  # about 480 records each
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == pytest.approx([8, 8])  # the second round asks nobody
    promise = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]
    assert promise["delta"] == 1e-5 and promise["unit"] == "one record, added or removed" and promise["simulated"]
    assert "sums over 3 or more sites" in promise["against"]
    spent = json.loads(CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "r"), "--json"]).stdout)
    assert [row["epsilon"] for row in spent] == pytest.approx([8, 8, 8]) and len(spent) == 3


def test_scores_on_held_out_samples_are_said_not_to_be_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are of clients' records, without noise: how the model does on them is in the metrics."""
    words = [*PRIVATE, "--rounds", "1"]
    small = [word for one in ("grid=1", "scales=1", "orientations=2") for word in ("--set", one)]
    for share, apart in (("0", False), ("0.2", True)):
        out = tmp_path / share
        done = CliRunner().invoke(app, [*words, *small, "--set", f"validation={share}", "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert ("ε does not count scores on samples of the clients' own" in caplog.text) is apart
        assert ("not counted" in json.loads((out / "result.json").read_text())["privacy"]) is apart
        card = (out / "MODEL_CARD.md").read_text()
        assert ("not counted are scores on samples of the clients' own" in card) is apart


def test_noise_in_a_secure_sum(tmp_path: Path) -> None:
    """Three clients, of which a secure sum is opened to all three: noise as of one trusted party; four need three."""
    words = [
        "run",
        "gist",
        "--dataset",
        "digits",
        "--rounds",
        "1",
        "--epsilon",
        "8",
        "--device",
        "cpu",
        "--secure",
        "masks",
    ]
    small = ["grid=1", "scales=1", "orientations=2", "clip=0.3", "dp_noise=sum"]
    words += ["--engine", "sequential", "--quiet", *(word for one in small for word in ("--set", one))]
    for clients, factor in ((3, 1.0), (4, (4 / 3) ** 0.5)):
        done = CliRunner().invoke(app, [*words, "--clients", str(clients), "--out", str(tmp_path / str(clients))])
        assert done.exit_code == 0, done.output
        promise = json.loads((tmp_path / str(clients) / "result.json").read_text())["privacy"]
        assert promise["noise over that of one trusted party"] == pytest.approx(factor)
        assert "sums over 3 or more sites" in promise["against"] and promise["epsilon"] == pytest.approx(8)


UNIFORM = ["--set", "weighting=uniform", "--set", "noise_multiplier=1"]
PINNED = [2.8545, 3.5908]
"""ε of 10 and 20 steps with σ = 1 and q = 0.1 at δ = 1e-5, by dp-accounting 0.6's PLD."""
TRAINING = ["weighting=uniform", "steps=10", "batch=48", "lr=0.5"]


def train(out: Path, *given: str, rounds: int = 2) -> Result:
    words = ["run", "fedavg", "--dataset", "digits", "--clients", "3", "--rounds", str(rounds), "--epsilon", "8"]
    words += ["--device", "cpu", "--engine", "stacked", "--out", str(out)]
    return CliRunner().invoke(app, [*words, *(word for one in (*TRAINING, *given) for word in ("--set", one))])


def test_clients_train_in_private(tmp_path: Path) -> None:
    """DP-SGD at 3 clients: 20 steps, q = 0.1, σ = 1 cost 3.59 by dp-accounting's PLD, on the books and on the line."""
    done = train(tmp_path / "r", "noise_multiplier=1")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == pytest.approx(PINNED, rel=1e-4)
    assert rows[-1]["accuracy"] > 0.6
    told = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]
    assert told["simulated"] and told["against"].endswith("who see all that a site sends, but not the batches")
    spent = CliRunner().invoke(app, ["privacy", "spent", str(tmp_path / "r")]).stdout
    assert spent.count(f"epsilon {rows[-1]['epsilon']:.6g} at delta 1e-05, 20 releases") == 3
    assert "does not know the batches" in spent


def test_training_ends_with_its_budget(tmp_path: Path) -> None:
    done = train(tmp_path / "r", "noise_multiplier=0.6", "sampling=1")
    assert done.exit_code == 2 and "the privacy budget of this run is spent: ε = 0 of 8" in done.stderr
    assert "before round 1" in done.stderr


def test_a_plan_stands_in_for_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and cost are those of the plan; without one, the install line."""
    noise, plan = 1.0, tmp_path / "plan.json"
    Plan((Release(noise, 0.1, 20),), PINNED[1], 1e-5).write(plan)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    accountant._epsilon.cache_clear()
    missing = train(tmp_path / "r")
    assert missing.exit_code == 2 and "pip install 'fedgist[privacy]'" in missing.stderr
    done = train(tmp_path / "r", f"plan={plan}")
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]["epsilon"] == PINNED[1]
    assert f"noise_multiplier = {noise}" in (tmp_path / "r" / "config.toml").read_text()
    longer = train(tmp_path / "longer", f"plan={plan}", rounds=3)
    assert longer.exit_code == 2 and "the plan has no 30 releases at a rate of 0.1" in longer.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fedavg", "--set", "noise_multiplier=1"], "set weighting to uniform in a private run"),
        (["fedavg", *UNIFORM, "--model", "cnn:norm=batch"], "BatchNorm mixes the records of a batch"),
        (["fedavg", *UNIFORM, "--set", "dp_noise=sum"], "set dp_noise to local"),
        (["feddistill"], "feddistill has no differentially private form"),
        (["fedgen"], "fedgen has no differentially private form"),
        (["gist", "--set", "normalise=train"], "normalise=train tells the mean of all training data"),
        (["gist", "--set", "ridge=validation"], "set ridge to sums and own to false in a private run"),
        (["gist", "--set", "own=true"], "set ridge to sums and own to false in a private run"),
        (["gist", "--set", "dp_noise=sum", "--set", "colluders=10"], "colluders must be fewer than the 10"),
        (["gist", "--dataset", "wine"], "no mean and deviation of wine are public"),
        (["gist", "--set", "dp_noise=sum", "--set", "defence=median"], "a defence looks at single replies"),
        (["gist", "--set", "dp_noise=sum", "--set", "adversary=noise:2", "--set", "colluders=1"], "set colluders to 2"),
        (["gist", "--set", "dp_noise=sum", "--secure", "masks:bits=32:step=20"], "32 bits have no room"),
        (["fedsgd", "--set", "tf32=true", "--set", "noise_multiplier=1"], "tf32 rounds what was clipped"),
        (["gist", "--set", "spend=0.5,0.1,0.1,0.1"], "must add up to 1, not to 0.8"),
    ],
)
def test_what_cannot_be_private_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    out = ["--epsilon", "1", "--out", str(tmp_path / "r"), "--device", "cpu"]
    done = CliRunner().invoke(app, ["run", "--dataset", "digits", *words, *out])
    assert done.exit_code == 2 and says in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--epsilon", "0"], "--epsilon must be above 0"),
        (["plan", "--epsilon", "1", "--delta", "1"], "--delta must be above 0 and below 1"),
        (["plan", "--epsilon", "1", "--rate", "2"], "--rate must be above 0 and at most 1"),
        (["plan", "--epsilon", "1", "--releases", "0"], "--releases must be at least 1"),
        (["spent", "nowhere"], "nothing was released under differential privacy in nowhere"),
    ],
)
def test_mistakes(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["privacy", *words])
    assert done.exit_code == 2 and says in done.stderr
