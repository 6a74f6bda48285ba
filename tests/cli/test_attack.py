"""`fedgist attack inversion`: from a recorded run to a table, JSON and pictures; mistakes in one line."""

import hashlib
import json
import random
import secrets
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.experiments import config as configs
from fedgist.experiments import leakage
from fedgist.experiments.folder import RunFolder
from fedgist.secure import masks

TINY = ["--model", "mlp:hidden=8", "--clients", "3", "--set", "batch=4", "--device", "cpu", "-q"]
QUICK = ["--iterations", "3"]
CUT = "cut/artifacts/transcript/00001-round-00000-0-server-global_model.Local.safetensors"


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


def record(method, *options, rounds=2, out="run", what="all"):
    call("run", method, *TINY, "--rounds", rounds, "--record", what, "--out", out, *options)


def attack(*options):
    return json.loads(call("attack", "inversion", "run", *QUICK, "--json", *options).stdout)


def images(path):
    with np.load(path) as kept:
        return dict(kept)


@pytest.mark.parametrize("local", [["steps=2"], ["epochs=2", "momentum=0.5", "limit=40"]], ids=str)
def test_the_true_images_are_rebuilt_from_the_plan_of_the_client(local):
    """The update of the rebuilt images is the one that was seen: the cosine is 1 in any round, for any client."""
    record("fedavg", *(part for one in local for part in ("--set", one)))
    for round, client in ((1, "0"), (2, "2")):
        found = attack("--round", round, "--client", client)
        assert found["cosine_seen"] == pytest.approx(1, abs=1e-5)
        assert found["images"] == (8 if local == ["steps=2"] else sum(counts(client)))
        assert found["seen"] == "only as a sum"


def counts(client):
    return json.loads(Path("run/partition.json").read_text())["clients"][client]


def test_one_image_is_found_and_shown():
    record("fedavg", "--set", "steps=1", "--set", "batch=1", "--set", "model=mlp:hidden=32", rounds=1)
    result = call("attack", "inversion", "run", "--iterations", "200", "--tv", "0.001")
    lines = result.stdout.splitlines()
    assert lines[0] == "client 0, round 1; images: 1, local steps: 1"
    assert "labels    1 of 1 right" in lines
    assert any("only in a sum over clients" in line for line in lines)
    saved = json.loads(Path("run/artifacts/inversion/round-1-client-0-cosine-steps.json").read_text())
    found = saved["similarity"]
    assert found["recovered"]["psnr"] > 25 > found["class means"]["psnr"] > found["noise"]["psnr"]
    assert f"{found['recovered']['psnr']:.1f} dB" in result.stdout
    kept = images("run/artifacts/inversion/round-1-client-0-cosine-steps.npz")
    assert kept["true"].shape == kept["recovered"].shape == (1, 1, 8, 8)
    assert np.mean((kept["true"] - kept["recovered"]) ** 2) == pytest.approx(
        10 ** (-saved["similarity"]["recovered"]["psnr"] / 10), rel=1e-2
    )
    assert Path("run/artifacts/inversion/round-1-client-0-cosine-steps.png").read_bytes()[:4] == b"\x89PNG"


def test_under_masks_there_is_no_more_to_find_than_in_noise(monkeypatch):
    """The same run plain and masked, and the control: random bytes in place of what was masked, drawn three times.

    Scores are compared client by client, for images differ in how well noise resembles them: what is left is the chance
    of a draw, whose deviation within a client is the measure. The planted leak: masks that leave the upper half of each
    number as it was. Keys are drawn from a seed here, so that scores are the same whenever this runs.
    """
    monkeypatch.setattr(secrets, "token_bytes", random.Random(0).randbytes)
    monkeypatch.setattr(masks, "derive", lambda secret, about: hashlib.sha256(about[:4] + about[-3:]).digest())
    load, kept = leakage.sources.from_dataset, []
    monkeypatch.setattr(leakage.sources, "from_dataset", lambda config: kept[0] if kept else load(config))
    one = ["--set", "steps=1", "--set", "batch=1", "--set", "model=mlp:hidden=16", "--clients", "6"]
    record("fedavg", *one, rounds=1)
    kept.append(load(configs.resolve(configs.load(Path("run/config.toml")))))
    assert attack("--iterations", "200", "--tv", "0.001")["similarity"]["recovered"]["psnr"] > 25

    def scores(clients=None):
        wanted = clients or kept[0].sites
        found = [attack("--client", client, "--iterations", "10", "--tv", "0.001") for client in wanted]
        return np.array([one["similarity"]["recovered"]["psnr"] for one in found])

    def masked():
        shutil.rmtree("run")
        record("fedavg", *one, "--secure", "masks", rounds=1)
        return sorted(Path("run/artifacts/transcript").glob("*-masked.Local.safetensors"))

    paths = masked()
    hidden, draw, control = scores(), np.random.default_rng(0), []
    for _ in range(3):
        for path in paths:
            path.write_bytes(save({name: random_like(leaf, draw) for name, leaf in load_file(path).items()}))
        control.append(scores())
    usual, deviation = np.mean(control, axis=0), np.sqrt(np.var(control, axis=0, ddof=1).mean())
    assert abs(np.mean(hidden - usual)) <= deviation
    fill = masks.Stream.fill

    def low_half(self, buffer):
        fill(self, buffer)
        np.frombuffer(buffer, np.uint32)[1::2] = 0

    monkeypatch.setattr(masks.Stream, "fill", low_half)
    masked()
    assert scores("0")[0] - usual[0] > 5 * deviation


def random_like(leaf, draw):
    return torch.frombuffer(bytearray(draw.bytes(leaf.nbytes)), dtype=leaf.dtype).reshape(leaf.shape)


def test_nothing_but_images_is_kept_with_the_images(tmp_path, monkeypatch):
    """Numpy 1.26 makes an array of every keyword, whatever its name."""
    kept = {}
    monkeypatch.setattr(np, "savez_compressed", lambda file, **arrays: kept.update(arrays))
    image, report = torch.ones(1, 1, 2, 2), {"round": 1, "client": "0", "attack": "cosine", "view": "steps"}
    leakage.write(leakage.Finding(report, image, image, None), RunFolder(tmp_path))
    assert kept.keys() == {"true", "recovered"}


def test_tofu_shows_its_proxy_images_and_its_cosine():
    """With one client, the cosine of what is decoded with the client's own update is the run's own metric."""
    options = ["--set", "steps=1", "--set", "images=3", "--set", "iterations=10", "--clients", "1"]
    record("tofu", *options)
    found = attack("--round", "2", "--attack", "dlg", "--view", "gradient")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert found["cosine_seen"] == pytest.approx(rows[1]["cosine_up"], abs=1e-4)
    assert found["seen"] == "each client's"
    assert list(found["similarity"]) == ["recovered", "proxy images", "class means", "mean image", "noise"]
    assert images("run/artifacts/inversion/round-2-client-0-dlg-gradient.npz")["proxy"].shape == (3, 1, 8, 8)
    assert "the server decodes each client's update" in call("attack", "inversion", "run", *QUICK).stdout


def test_the_same_seed_finds_the_same():
    record("fedavg", "--set", "steps=1", rounds=1)
    first, again, other = attack(), attack(), attack("--seed", "1")
    assert first == again
    assert first["similarity"]["recovered"] != other["similarity"]["recovered"]


def test_without_pillow_there_is_no_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    record("fedavg", "--set", "steps=1", rounds=1)
    assert [Path(path).suffix for path in attack()["files"]] == [".json", ".npz"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nowhere"], "there is no run in nowhere: no folder with a config.toml"),
        (["run", "--round", "9"], "the transcript in run/artifacts/transcript has no reply of client 0 in round 9; "),
        (["run", "--client", "7"], "unknown client '7'; known: 0, 1, 2"),
        (["run", "--attack", "cosin"], "--attack must be cosine or dlg, not 'cosin'"),
        (["run", "--labels", "known"], "--labels must be recovered or optimised, not 'known'"),
        (["run", "--view", "all"], "--view must be steps or gradient, not 'all'"),
        (["run", "--iterations", "0"], "--iterations must be at least 1, not 0"),
        (["run", "--tv", "-1"], "--lr must be above 0, and --tv not below it"),
        (["run", "--lr", "nan"], "--lr must be above 0, and --tv not below it, not nan and 0.03"),
        (["run", "--tv", "inf"], "--lr must be above 0, and --tv not below it, not 0.1 and inf"),
        (["bare"], "bare has no transcript; run again with --record all"),
        (["other"], "other has no transcript; run again with --record all"),
        (["."], ". holds 4 runs; name one, such as bare"),
        (["cut"], f"{CUT} cannot be read: "),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(arguments, line):
    runs = {
        "run": ("fedavg", "all"),
        "cut": ("fedavg", "all"),
        "bare": ("fedavg", None),
        "other": ("independent", None),
    }
    for out, (method, what) in runs.items():
        if out in arguments or "." in arguments:
            kept = ["--record", what] if what else []
            call("run", method, *TINY, "--rounds", "1", "--set", "steps=1", "--out", out, *kept)
    if arguments == ["cut"]:
        Path(CUT).write_bytes(Path(CUT).read_bytes()[:-4])
    result = call("attack", "inversion", *arguments, code=2)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"fedgist: {line}")


def test_images_that_are_others_in_every_step_are_refused():
    record("fedavg", "--set", "steps=1", "--set", "crop=1", rounds=1)
    line = call("attack", "inversion", "run", code=2).stderr
    assert line.startswith("fedgist: with crop or flip a client's images are others in every step")


def test_other_data_than_in_the_run_is_refused():
    record("fedavg", "--set", "steps=1", rounds=1)
    path = Path("run/config.toml")
    path.write_text(path.read_text().replace("partition_seed", "# partition_seed").replace("\nseed = 0", "\nseed = 1"))
    line = call("attack", "inversion", "run", code=2).stderr
    assert line.startswith("fedgist: the data set digits is another than when run was run")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["schedule=cosine", "horizon=1"],
            "in round 2 clients train at a rate of 0: there is nothing to find; name an",
        ),
        (["lr=1e30", "steps=3"], "the update of round 2 is not finite (NaN or infinity): name an earlier round"),
    ],
)
def test_an_update_that_says_nothing_is_explained(options, line):
    record("fedavg", *(part for one in options for part in ("--set", one)))
    result = call("attack", "inversion", "run", *QUICK, "--round", "2", code=2)
    assert result.stderr.startswith(f"fedgist: {line}")


@pytest.mark.parametrize(
    ("options", "good", "bad", "line"),
    [
        (
            ["common_start=false"],
            2,
            1,
            "with common_start=false a client's first round, 1, begins at weights of its own",
        ),
        (
            ["keep_momentum=true", "momentum=0.9"],
            1,
            2,
            "with keep_momentum=true an update depends on all rounds before",
        ),
        (
            ["keep_momentum=true", "optimiser=adam"],
            1,
            2,
            "with keep_momentum=true an update depends on all rounds before",
        ),
    ],
    ids=str,
)
def test_what_came_before_a_round_cannot_be_rebuilt_from_it(options, good, bad, line):
    """The judge would take another update for the client's own, and find that nothing leaks."""
    record("fedavg", "--set", "steps=2", *(part for one in options for part in ("--set", one)))
    assert attack("--round", good)["cosine_seen"] == pytest.approx(1, abs=1e-4)
    assert call("attack", "inversion", "run", "--round", bad, code=2).stderr.startswith(f"fedgist: {line}")
