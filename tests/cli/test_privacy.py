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
