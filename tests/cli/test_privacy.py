"""fedgist privacy: noise for a budget, and what a book says was spent."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.dp.accountant import Release
from fedgist.dp.budget import Book, Limit


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


def test_a_private_run_says_what_holds(tmp_path: Path) -> None:
    """On the progress line, in the metrics, the result and the books: ε with all that belongs to it."""
    small = ["grid=1", "scales=1", "orientations=2", "clip=0.3", "dp_noise=sum"]
    words = [
        "run",
        "gist",
        "--dataset",
        "digits",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--epsilon",
        "8",
        "--device",
        "cpu",
    ]
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fedgen"], "fedgen has no differentially private form"),
        (["gist", "--set", "normalise=train"], "normalise=train tells the mean of all training data"),
        (["gist", "--set", "ridge=validation"], "set ridge to sums in a private run"),
        (["gist", "--set", "dp_noise=sum", "--set", "colluders=10"], "colluders must be fewer than the 10"),
        (["gist", "--set", "spend=0.5,0.1,0.1,0.1"], "must add up to 1, not to 0.8"),
    ],
)
def test_what_cannot_be_private_is_refused(words: list[str], says: str, tmp_path: Path) -> None:
    out = ["--dataset", "digits", "--epsilon", "1", "--out", str(tmp_path / "r"), "--device", "cpu"]
    done = CliRunner().invoke(app, ["run", *words, *out])
    assert done.exit_code == 2 and says in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "--epsilon", "0"], "--epsilon must be above 0"),
        (["plan", "--epsilon", "1", "--delta", "1"], "--delta must be above 0 and below 1"),
        (["plan", "--epsilon", "1", "--rate", "2"], "--rate must be above 0 and at most 1"),
        (["plan", "--epsilon", "1", "--releases", "0"], "--releases must be 1 or more"),
        (["spent", "nowhere"], "nothing was released under differential privacy in nowhere"),
    ],
)
def test_mistakes(words: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["privacy", *words])
    assert done.exit_code == 2 and says in done.stderr
