"""predict and export, as a user types them."""

import csv
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from typer.testing import CliRunner

import fedgist
from fedgist import storage
from fedgist.cli import app
from fedgist.data import datasets

COMMON = (
    "--dataset",
    "digits",
    "--clients",
    "3",
    "--alpha",
    "1",
    "--rounds",
    "2",
    "--set",
    "steps=10",
    "--quiet",
    "--json",
)


def fedgist_says(*words: str, code: int = 0) -> tuple[str, str]:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


@pytest.fixture
def test_file() -> str:
    return str(datasets.export("digits", "data") / "test.npz")


def test_a_global_model_predicts_as_well_as_the_run_says(test_file: str) -> None:
    said = json.loads(fedgist_says("run", "fedavg", *COMMON, "--model", "cnn", "--out", "run")[0])
    rows, accuracy = fedgist_says("predict", "run", test_file)
    assert accuracy == f"accuracy  {said['accuracy']:.4f} ({round(said['accuracy'] * 359)} of 359)\n"
    table = list(csv.DictReader(rows.splitlines()))
    assert sum(row["label"] == row["truth"] for row in table) / len(table) == said["accuracy"]
    assert sum(float(table[0][f"p{label}"]) for label in range(10)) == pytest.approx(1, abs=1e-5)
    fedgist_says("export", "run", "--out", "elsewhere/best.safetensors")
    exported = json.loads(fedgist_says("predict", "elsewhere/best.safetensors", test_file, "--format", "json")[0])
    assert exported["accuracy"] == said["accuracy"]
    card = Path("run/MODEL_CARD.md").read_text("utf-8")
    assert f"| {said['accuracy']:.4f} | 359 test samples of digits |" in card and "No differential privacy." in card


def test_a_run_is_finished_later(test_file: str) -> None:
    plain = json.loads(fedgist_says("run", "fedavg", *COMMON, "--alpha", "0.1", "--out", "run")[0])
    said = json.loads(fedgist_says("finish", "run", "gist+scattering:grid=2:scales=1", "--json", "--out", "done")[0])
    assert said["accuracy"] > plain["accuracy"] + 0.05 and said["bytes_up"] > plain["bytes_up"]
    rows, accuracy = fedgist_says("predict", "done", test_file)
    assert accuracy == f"accuracy  {said['accuracy']:.4f} ({round(said['accuracy'] * 359)} of 359)\n"
    sure = [max(float(row[f"p{label}"]) for label in range(10)) for row in csv.DictReader(rows.splitlines())]
    assert sum(sure) / len(sure) == pytest.approx(said["accuracy"], abs=0.08)  # 0.25 if scores passed as they are
    assert "and the finish `gist+scattering:grid=2:scales=1`" in Path("done/MODEL_CARD.md").read_text("utf-8")
    assert "choose another folder with --out" in fedgist_says("finish", "run", "--out", "done", code=2)[1]
    assert "finish must be gist" in fedgist_says("finish", "run", "fedavg", code=2)[1]


def test_the_clients_models_predict_as_well_as_the_run_says(test_file: str) -> None:
    said = json.loads(fedgist_says("run", "repshare", *COMMON, "--model", "mlp:hidden=16", "--out", "run")[0])
    scores = []
    for id in "012":
        fedgist_says("predict", "run", test_file, "--client", id, "--format", "json", "--out", f"{id}.json")
        scores.append(json.loads(Path(f"{id}.json").read_text("utf-8"))["accuracy"])
    assert scores == [json.loads(Path(f"run/clients/{id}.json").read_text("utf-8"))["accuracy"] for id in "012"]
    assert statistics.fmean(scores) == pytest.approx(said["accuracy"], abs=1e-7)  # which travelled as float32
    assert f"{statistics.fmean(scores):.4f}" == f"{said['accuracy']:.4f}"
    assert "name one of 0, 1, 2 as client (--client)" in fedgist_says("predict", "run", test_file, code=2)[1]
    assert (
        "unknown client with a model in run '7'"
        in fedgist_says("export", "run", "--client", "7", "--out", "x", code=2)[1]
    )


def test_the_same_samples_in_other_files(test_file: str) -> None:
    """Bytes, fractions, rows and pictures: the same classes of the same digits."""
    fedgist_says("run", "fedavg", *COMMON, "--out", "run")
    with np.load(test_file) as held:
        pixels, labels = held["images"][:9], held["labels"][:9]
    fractions = pixels[:, None] / np.float32(16)
    np.savez("x.npz", x=fractions, y=labels)
    np.savez("bytes.npz", x=pixels)
    heading = ",".join(["label", *(f"c{i}" for i in range(64))])
    np.savetxt("x.csv", np.column_stack([labels, pixels.reshape(9, -1)]), "%d", ",", header=heading, comments="")
    Path("pictures").mkdir()
    for i, picture in enumerate(pixels):
        Image.fromarray((picture * 15.9375).round().astype(np.uint8)).save(f"pictures/{i}.png")

    def labels_in(*words: str) -> list[str]:
        return [row["label"] for row in csv.DictReader(fedgist_says("predict", "run", *words)[0].splitlines())]

    with torch.no_grad():
        wanted = fedgist.load("run", normalised=True)(torch.tensor(fractions)).argmax(1).tolist()
    assert labels_in("x.npz") == labels_in("x.csv", "--peak", "16") == labels_in("pictures") == [*map(str, wanted)]
    assert labels_in("bytes.npz", "--peak", "16") == [*map(str, wanted)]
    assert "values from 0 to 16; --peak names the value of full" in fedgist_says("predict", "run", "x.csv", code=2)[1]
    np.savetxt("short.csv", pixels[:, 0], "%d", ",")
    assert "a row has 8 values, but the model takes 64" in fedgist_says("predict", "run", "short.csv", code=2)[1]
    Path("words.csv").write_text("a,b\n1,high\n")
    assert (
        "row 2 holds 'high', which is no number; the model takes 64 numbers a row"
        in (fedgist_says("predict", "run", "words.csv", code=2)[1])
    )
    assert "clients keep no models" in fedgist_says("export", "run", "--client", "3", "--out", "x.pt", code=2)[1]
    Path("words.npz").write_text("hello")
    assert fedgist_says("predict", "run", "words.npz", code=2)[1] == (
        "fedgist: words.npz is damaged or no .npz; fetch it again, or write it with numpy.savez\n"
    )
    np.savez("far.npz", x=fractions, y=labels + 3)
    said = fedgist_says("predict", "run", "x.npz", "far.npz", code=2)[1]
    assert said == f"fedgist: far.npz: there is a label {labels.max() + 3}, but the model knows 0 to 9\n"
    Image.fromarray(np.zeros((20, 20), np.uint8)).save("large.png")
    assert "large.png: its samples have the form 1×20×20" in fedgist_says("predict", "run", "large.png", code=2)[1]
    assert "--peak must be a number above 0" in fedgist_says("predict", "run", "x.npz", "--peak", "inf", code=2)[1]


def test_categories_are_those_of_the_table() -> None:
    """Blocks of other widths would embed a part of one category with a part of the next."""
    folder = Path("data/wards")
    folder.mkdir(parents=True)
    (folder / "columns.toml").write_text(
        'target = "sick"\nclasses = ["no", "yes"]\n[numeric]\nage = {}\n'
        '[categorical]\nsex = ["f", "m"]\nward = ["a", "b", "c"]\n'
    )
    for split in ("train", "test"):
        rows = "".join(f"{20 + i},{'fm'[i % 2]},{'abc'[i % 3]},{('no', 'yes')[i % 2]}\n" for i in range(12))
        (folder / f"{split}.csv").write_text("age,sex,ward,sick\n" + rows)
    run = ("run", "fedavg", "--dataset", "wards", "--data-dir", "data", "--clients", "2", "--rounds", "1", "--quiet")
    said = fedgist_says(*run, "--model", "tabular:categories=3x2", code=2)[1]
    assert "the categories of wards are sex, ward: categories=2x3" in said
    for fitting in ("tabular", "tabular:categories=3", "tabular:categories=2x3"):
        fedgist_says(*run, "--model", fitting)


def test_what_onnx_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fedgist_says("run", "fedavg", *COMMON, "--profile", "toy", "--out", "run")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    said = fedgist_says("export", "run", "--format", "onnx", "--out", "x.onnx", code=2)[1]
    assert "pip install 'fedgist[export]'" in said and not Path("x.onnx").exists()


def test_onnx_is_asked_about_as_many_samples_as_one_likes() -> None:
    pytest.importorskip("onnxscript")
    onnx = pytest.importorskip("onnx")
    fedgist_says("run", "fedavg", *COMMON, "--profile", "toy", "--out", "run")
    fedgist_says("export", "run", "--format", "onnx", "--out", "model.onnx")
    (x,), (scores,) = (getattr(onnx.load("model.onnx").graph, side) for side in ("input", "output"))
    assert [part.type.tensor_type.shape.dim[0].dim_param for part in (x, scores)] == ["samples", "samples"]


def test_what_the_disk_refuses_is_said(test_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fedgist_says("run", "fedavg", *COMMON, "--profile", "toy", "--out", "run")
    Path("folder").mkdir()
    for words in (("predict", "run", test_file), ("export", "run", "--format", "torchscript")):
        assert fedgist_says(*words, "--out", "folder", code=2)[1] == "fedgist: folder: Is a directory\n"
    assert "or add --format torchscript or --format onnx" in fedgist_says("export", "run", "--out", "x.pt", code=2)[1]

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "save_file", full)
    said = fedgist_says("export", "run", "--out", "x.safetensors", code=2)[1]
    assert said == "fedgist: x.safetensors: No space left on device\n"
    monkeypatch.setattr(Path, "write_bytes", refused)
    said = fedgist_says("export", "run", "--format", "torchscript", "--out", "x.pt", code=2)[1]
    assert said == "fedgist: x.pt: No space left on device\n" and sorted(Path().glob(".*")) == []
