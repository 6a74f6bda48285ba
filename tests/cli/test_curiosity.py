"""`fedgist attack all` and `controls`: attacks find what is planted for them, and are judged beside blind guesses."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedgist import methods
from fedgist.cli import app
from fedgist.core.message import schema_of
from fedgist.core.rng import Rng
from fedgist.privacy.attacks import ATTACKS, Judge
from fedgist.privacy.attacks.interface import auc, tpr

TINY = ["--model", "mlp:hidden=8", "--rounds", "2", "--record", "all", "--device", "cpu", "-q", "--alpha", "0.1"]
LEAST = {  # found at least, and above the blind guess by at least
    "inversion": (20, 5),
    "first layer": (25, 10),
    "membership": (0.8, 0.2),
    "trajectory": (0.65, 0.12),
    "images": (0.8, 0.3),
    "copies": (1.0, 0.9),
    "moments": (0.99, 0.4),
    "reconstruction": (16, 2),
    "presence": (0.99, 0.4),
    "shares": (0.99, 0.4),
    "differencing": (0.9, 0.9),
}


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def found(*arguments):
    rows = json.loads(call("attack", "all", "run", "--json", *arguments).stdout)["attacks"]
    return {(row["attack"], row["level"]): row for row in rows}


def test_every_attack_finds_what_is_planted_for_it():
    rows = {row["attack"]: row for row in json.loads(call("attack", "controls", "--effort", "150", "--json").stdout)}
    assert rows.keys() == ATTACKS.keys() == LEAST.keys()
    for name, (least, above) in LEAST.items():
        assert rows[name]["value"] >= least, rows[name]
        assert rows[name]["value"] - rows[name]["control"] >= above, rows[name]


def test_a_run_is_attacked_at_both_levels_and_its_numbers_are_kept():
    call("run", "fedavg", *TINY, "--clients", "4", "--set", "steps=3", "--set", "limit=200", "--out", "run")
    names = "membership,presence,images,differencing"
    rows = found("--only", names)
    assert rows["membership", "replies"]["seen"] == "weights of 4 clients"
    assert rows["membership", "sums"]["seen"] == "the model that came out"
    # How a client's first update pulls at the classifier tells its classes; the sum tells only everybody's.
    assert rows["presence", "replies"]["value"] > 0.9 > rows["presence", "sums"]["value"]
    assert rows["images", "replies"]["why"] == "no images are shared"
    assert rows["differencing", "replies"]["why"] == "who sees each reply needs no sums"
    kept = json.loads(Path("run/artifacts/attacks/attacks.json").read_text())
    assert kept == list(rows.values())
    table = call("attack", "all", "run", "--only", "presence").stdout
    assert f"{rows['presence', 'replies']['value']:.3f}" in table and "pull at the classifier" in table


def test_images_are_shown_beside_the_nearest_ones():
    call("run", "feddm", *TINY, "--clients", "2", "--set", "steps=2", "--set", "min_class=2", "--set", "ipc=2", "--set",
         "server_epochs=1", "--set", "limit=200", "--rounds", "1", "--out", "run")  # fmt: skip
    rows = found("--only", "copies,images")
    assert rows["copies", "replies"]["nearer"] > 0.7 > rows["copies", "replies"]["nearer, blind"]
    assert Path("run/artifacts/attacks/copies-replies.png").read_bytes()[:4] == b"\x89PNG"
    call("report", "run")
    page = Path("run/report.html").read_text()
    assert "What an honest but curious server learns" in page and "row 2: nearest that a client holds" in page


def test_masked_replies_tell_no_classes():
    """Ring elements as they look, in place of counts that give everything away; their sums are in no message."""
    call("run", "gist", *TINY, "--clients", "4", "--secure", "masks", "--set", "limit=200", "--out", "run")
    rows = found("--only", "presence")
    assert 0.2 < rows["presence", "replies"]["value"] < 0.8
    assert "run it without --secure" in rows["presence", "sums"]["why"]


def test_mistakes_are_one_line():
    call("run", "gist", "--rounds", "1", "--set", "limit=50", "--device", "cpu", "-q", "--out", "run")
    for arguments, line in (
        (("--only", "inversoin"), "unknown attack 'inversoin'; did you mean 'inversion'?"),
        (("--effort", "0"), "--effort must be at least 1"),
        ((), "has no transcript; run again with --record all"),
    ):
        assert line in call("attack", "all", "run", *arguments, code=2).stderr


@pytest.mark.parametrize("name", methods.available())
def test_every_method_declares_what_its_replies_hold(name):
    """What no attack and no defence knows of would be left out of the tables in silence."""
    known = {"ends", "weights", "scales", "cosine", "pa"}  # beside images, and what goes along with a mean
    for handler in methods.find(name).handlers.values():
        if handler.reply.__module__.endswith("families.evaluation"):
            continue
        for field, (kind, wire) in schema_of(handler.reply).items():
            if kind not in (int,) and wire.dtypes != (torch.int64,) and field not in known:
                assert wire.holds or field in ("joined_p",), f"{handler.reply.__name__}.{field}"


def test_noised_counts_are_judged_as_the_distribution_that_is_nearest():
    """Below zero there is nothing: a guess of −3, 1 and 3 is a quarter and three quarters, not an overlap of −2.5."""
    x, y = torch.zeros(8, 1), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    judge = Judge({"0": (x, y)}, (x, y), torch.zeros(1), torch.ones(1), Rng(0))
    assert judge.shares({"0": torch.tensor([-3.0, 1.0, 3.0])}) == pytest.approx(0.25 + 0.25)
    assert judge.shares({"0": torch.tensor([-1.0, -1.0, -1.0])}) == 0


def test_areas_and_rates_by_hand():
    inside, outside = torch.tensor([3.0, 2.0, 2.0]), torch.tensor([1.0, 2.0])
    assert auc(inside, outside) == pytest.approx((2 + 1.5 + 1.5) / 6)
    many = torch.arange(200.0)
    assert tpr(torch.tensor([197.0, 197.5, 198.0, 199.0]), many) == pytest.approx(3 / 4)  # two of 200 may be above
    assert tpr(inside, outside) is None
