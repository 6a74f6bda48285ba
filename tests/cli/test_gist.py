"""Gist by its commands: heads of clients' own, the finish of other runs, and who may join or leave a model of sums."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedgist
from fedgist.cli import app
from fedgist.experiments.folder import RunFolder

TINY = ["--dataset", "digits", "--clients", "3", "--set", "limit=200", "--device", "cpu", "-q"]
SMALL = ["--set", "grid=2", "--set", "scales=1", "--set", "orientations=2"]
TRAINED = ["--model", "mlp:hidden=8", "--rounds", "1", "--set", "steps=2"]


def call(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return " ".join(done.stderr.split())


def test_a_finish_at_once_or_later_and_with_heads_of_clients_own() -> None:
    """Where all but the head is shared, a client's net has a head of its own, then and later alike."""
    own = ["run", "fedavg", *TINY, *TRAINED, "--set", "share=body"]
    call(*own, "--out", "plain")
    call(*own, "--finish", "gist", "--out", "once")
    call("finish", "plain", "gist", "--out", "later", "-q")
    for id in "012":
        heads = [fedgist.load(Path(out), id).state_dict()["classifier.weight"] for out in ("plain", "once", "later")]
        assert heads[1].equal(heads[2]) and not heads[0].equal(heads[1])
    sent = [json.loads(Path(out, "result.json").read_text())["bytes_up"] for out in ("plain", "once", "later")]
    assert sent[0] < sent[1] == sent[2]


@pytest.mark.parametrize("method", ["repshare", "fedtgp", "independent"])
def test_sums_of_unlike_features_are_refused_in_a_sentence(method: str) -> None:
    call("run", method, *TINY, "--model", "mlp:hidden=8", "--rounds", "1", "--out", "run")
    said = call("finish", "run", code=2)
    assert f"clients of {method} have features of their own, sums of which mean nothing" in said
    assert RunFolder(Path("run")).finished


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--epsilon", "8"], "noise and masks are over a set of clients"),
        (["--secure", "masks"], "noise and masks are over a set of clients"),
        (["--set", "clip=0.3"], "nothing is clipped"),
        (["--set", "mirrored=true"], "nothing is clipped"),
        (["--set", "ridge=validation"], "nothing is clipped"),
        (["--set", "own=true"], "nothing is clipped (clip from 2), mirrored, held out or a client's own"),
    ],
)
def test_what_cannot_be_joined_or_left(options: list[str], why: str) -> None:
    call("run", "gist", *TINY, *SMALL, *options, "--out", "run")
    for change in ("add", "remove"):
        assert why in call("gist", change, "run", "site", "--out", "changed", code=2)
    assert not Path("changed").exists()
    if "clip=0.3" in options:  # the model itself says so, at a site that has nothing else
        assert why in call("gist", "sums", "run", "site", "--out", "site.sums", code=2)


def test_counts_of_hits_get_no_noise() -> None:
    for option in ("own=true", "ridge=validation"):
        said = call("run", "gist", *TINY, *SMALL, "--epsilon", "8", "--set", option, "--out", "run", code=2)
        assert "set ridge to sums and own to false" in said
