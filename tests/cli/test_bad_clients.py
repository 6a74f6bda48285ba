"""`--adversary` and `--defence`: what they do to a run, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedgist.cli import app


def run(*arguments, code=0):
    settings = ["--model", "mlp:hidden=16", "--device", "cpu", "--json", "--set", "eval_every=0"]
    result = CliRunner().invoke(app, ["run", *arguments, *settings, "--out", "run", "--overwrite"])
    assert result.exit_code == code, result.output
    return result


def test_three_bad_of_ten_do_harm_that_a_median_undoes():
    common = ("fedavg", "--rounds", "4", "--set", "lr=0.2", "--alpha", "100")
    honest, bad, held = (
        json.loads(run(*common, *more).stdout)["accuracy"]
        for more in (
            (),
            ("--adversary", "scale:3:strength=-5"),
            ("--adversary", "scale:3:strength=-5", "--defence", "median"),
        )
    )
    assert honest > 0.65 and bad < 0.4 and held > honest - 0.15


def test_a_backdoor_is_told_beside_the_accuracy():
    common = ("fedavg", "--rounds", "2", "--set", "lr=0.2", "--alpha", "100")
    told = []
    for more in ((), ("--adversary", "backdoor:9")):
        run(*common, *more)
        told.append(json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1]))
    assert "backdoor" not in told[0] and told[1]["backdoor"] > 0.5


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("fedavg", "--adversary", "sing-flip:3"), "unknown kind of bad client 'sing-flip'; did you mean 'sign-flip'?"),
        (("fedavg", "--adversary", "sign-flip:x"), "adversary is written KIND:CLIENTS, as in sign-flip:3"),
        (("fedavg", "--adversary", "sign-flip:10"), "10 bad clients of 10 leave no honest one"),
        (("fedavg", "--adversary", "alie:1"), "alie is what several clients agree upon"),
        (("fedavg", "--defence", "mean"), "unknown defence 'mean'"),
        (("fedavg", "--defence", "filter"), "is for images with labels, which fedavg does not share"),
        (("feddm", "--defence", "median"), "feddm shares images, of which there is no median: there is defence=filter"),
        (("real", "--defence", "filter", "--finish", "gist"), "defence=filter looks at images alone: leave out one"),
        (("fedavg", "--adversary", ""), "unknown kind of bad client ''"),
        (("fedavg", "--defence", ""), "unknown defence ''"),
        (("tofu", "--defence", "krum"), "tofu shares images, of which there is no krum: there is no defence yet"),
        (("fedavg", "--defence", "median", "--secure", "masks"), "looks at single replies, which a secure sum hides"),
        (("fedavg", "--adversary", "collude:2", "--secure", "masks"), "which a secure sum hides"),
    ],
)
def test_what_cannot_be_is_refused(arguments, line):
    assert line in run(*arguments, code=2).stderr
