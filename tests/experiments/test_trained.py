"""What comes out of a run: files that give the very model back, whatever method and architecture it was."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedgist
from fedgist import methods, models
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.experiments import exporting, trained
from fedgist.experiments.api import loaded
from fedgist.experiments.config import OWN, resolve
from fedgist.experiments.runner import run
from fedgist.experiments.trained import About
from fedgist.models import Model
from fedgist.models.registry import ARCHITECTURES

SHAPE = (3, 32, 32)
WIDE = ("convnet", "vgg13", "resnet9", "resnet18", "resnet18-thesis")
SMALL: dict[str, dict[str, Any]] = {name: {"width": 4} for name in WIDE} | {
    "mlp": {"hidden": (20, 10), "norm": "batch"},
    "tabular": {"categories": (2,)},
}
SHAPES = {"tabular": (3,), "cnn1d": (3, 20)}


def about(spec: str, **other: Any) -> About:
    known: dict[str, Any] = {"model": spec, "module": "net", "input_shape": SHAPE, "classes": 4, "class_names": None}
    known |= {"columns": None, "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "low": (-1.0,) * 3, "high": (1.0,) * 3}
    known |= {"method": "fedavg", "dataset": "digits", "client": None, "seed": 0, "rounds": 1, "accuracy": 0.5}
    return About(**{**known, "measured_on": "5 test samples", "fedgist": "0"} | other)


def drawn(model: Model) -> dict[str, Tensor]:
    """Weights with statistics that are not those of the start."""
    return {name: value + 0.1 * Rng(7, name).uniform(*value.shape) for name, value in model.init(Rng(0)).items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_built_in_model_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    shape = SHAPES.get(name, SHAPE)
    model = models.build(name, shape, 4, **SMALL.get(name, {}))
    w, x = drawn(model), Rng(1).uniform(3, *shape)
    spec = models.spell_out(name, **SMALL.get(name, {}))
    trained.save(models.as_module(model, w), about(spec, input_shape=shape), tmp_path / "model")

    module = fedgist.load(tmp_path)
    assert {key: tuple(value.shape) for key, value in module.state_dict().items()} == model.shapes
    assert torch.equal(module(x), model(w, x).logits) and not module.training
    mean, std = (
        torch.tensor(values).view(-1, *[1] * (len(shape) - 1)) for values in ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
    )
    assert torch.equal(fedgist.load(tmp_path, normalised=True)(x), model(w, (x - mean) / std).logits)

    script = exporting.export(tmp_path, tmp_path / "model.pt", "torchscript")
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.load"):
        again = torch.jit.load(str(script))
    torch.testing.assert_close(again(x), module(x), rtol=0, atol=1e-6)


def test_a_built_in_module_can_be_trained_on() -> None:
    """In train mode it normalises by the batch and moves its statistics, as torch's own BatchNorm does."""
    model = models.build("mlp", (1, 4, 4), 3, hidden=(5,), norm="batch")
    w, x = drawn(model), Rng(1).normal(8, 1, 4, 4)
    module = models.as_module(model, w).train()
    module(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    new = model(w, x, train=True).buffers
    assert {name: torch.equal(module.get_buffer(name), new[name]) for name in new} == dict.fromkeys(new, True)


def test_onnx_computes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = models.build("cnn", SHAPE, 4)
    trained.save(models.as_module(model, drawn(model)), about(models.spell_out("cnn")), tmp_path / "model")
    path = exporting.export(tmp_path, tmp_path / "model.onnx", "onnx", normalised=True)
    x = Rng(1).uniform(5, *SHAPE)
    (scores,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(scores), fedgist.load(tmp_path, normalised=True)(x), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_becomes_onnx_takes_any_number_of_samples(name: str) -> None:
    """Without the packages of ONNX: a module of which only as many as in the example could be asked is refused."""
    shape = SHAPES.get(name, SHAPE)
    model = models.build(name, shape, 4, **SMALL.get(name, {}))
    said = about(models.spell_out(name), input_shape=shape)
    module = trained.normalising(models.as_module(model, drawn(model)), said)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as `export` does
        graph = exporting.of_any_number(module.requires_grad_(False), torch.zeros(2, *shape)).module()
    x = Rng(1).uniform(5, *shape)
    torch.testing.assert_close(graph(x), module(x), rtol=1e-6, atol=1e-6)


def test_onnx_computes_what_gist_learned(tmp_path: Path) -> None:
    """Scattering is written for ONNX without the functions that it lacks."""
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    fedgist.run("gist", data="digits", clients=2, rounds=1, grid=2, scales=1, out=tmp_path / "run")
    path = exporting.export(tmp_path / "run", tmp_path / "model.onnx", "onnx", normalised=True)
    x = Rng(1).uniform(3, 1, 8, 8)
    (scores,) = reference.ReferenceEvaluator(str(path)).run(None, {"x": x.numpy()})
    with torch.no_grad():
        wanted = fedgist.load(tmp_path / "run", normalised=True)(x)
    torch.testing.assert_close(torch.tensor(scores), wanted, rtol=1e-4, atol=1e-4)


class Counting(nn.Module):
    """Two linear layers and BatchNorm, whose count of batches is a whole number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.body(x))
        return scores


def counting() -> Counting:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Counting()


@pytest.mark.parametrize("method", ["fedavg", "independent"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_module_of_ones_own_comes_back(method: str, kept: bool, tmp_path: Path) -> None:
    out = tmp_path / "run" if kept else None
    result = fedgist.run(method, counting(), "digits", clients=2, rounds=1, steps=2, out=out)
    client = None if method == "fedavg" else "1"
    module = result.model if client is None else result.client_models[client]
    assert isinstance(module, Counting) and module.state_dict().keys() == counting().state_dict().keys()
    if client is None:
        assert all(torch.equal(value, module.state_dict()[name]) for name, value in (result.weights or {}).items())
    if out is None:
        assert torch.equal(fedgist.load(result, client).state_dict()["last.weight"], module.state_dict()["last.weight"])
        return
    again = fedgist.load(out, client, module=counting())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())
    with pytest.raises(FedgistError, match=r"your own module Counting: fedgist.load\(…, module=…\) fills it"):
        fedgist.load(out, client)


@pytest.mark.parametrize("name", sorted(methods.available().keys() - {"gist"}))  # φ and W are no architecture of a run
def test_every_method_has_a_model_to_show(name: str, tmp_path: Path) -> None:
    """The server's, or one of every client; whole, and as good as the run says where it is what the run judges."""
    config = resolve({"method": name, "clients": 2, "rounds": 1}, profile="toy")
    result = run(config, tmp_path / "run")
    found = trained.stems(tmp_path / "run")
    assert "server" in found or len(found) == (1 if name == "centralized" else 2)
    abouts = [loaded(tmp_path / "run", None if who == "server" else who)[1] for who in found]
    if name not in (
        "fedensemble",
        "codream",
    ):  # the first judges an ensemble; of the second the clients have models too
        assert sum(one.accuracy or 0 for one in abouts) / len(abouts) == pytest.approx(result.accuracy)


def test_parts_that_stay_with_clients_complete_their_models(tmp_path: Path) -> None:
    """Heads travel, bodies of two architectures stay: every client has a whole model, the server none."""
    given = {
        "method": "fedavg",
        "share": "head",
        "clients": 4,
        "rounds": 1,
        "architectures": "mlp:hidden=20x16,mlp:hidden=16",
    }
    result = run(resolve({**given, "model": "mlp:hidden=16"}, profile="toy"), tmp_path / "run")
    abouts = [loaded(tmp_path / "run", id)[1] for id in "0123"]
    assert not (tmp_path / "run" / "model.json").exists()
    assert [one.model.split(":")[1] for one in abouts] == ["hidden=20x16", "hidden=16"] * 2
    assert sum(one.accuracy or 0 for one in abouts) / 4 == pytest.approx(result.accuracy)
    with pytest.raises(FedgistError, match="every client has a model of its own: name one of 0, 1, 2, …"):
        fedgist.load(result)


WRONG = {
    "model": ["resnet99", "mlp:hidden=99999999", "os.system", 3, OWN * 400],
    "input_shape": [[0, 2, 2], [3, 32], "abc", [2**20, 2**20, 3]],
    "classes": [0, 2.5, True, 10**12],
    "accuracy": [1.5, "high"],
    "class_names": [["a"], 4],
    "client": [3, ""],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_description_that_cannot_be_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    model = models.build("lenet5", SHAPE, 4)
    trained.save(models.as_module(model, drawn(model)), about("lenet5"), tmp_path / "model")
    said = json.loads((tmp_path / "model.json").read_text("utf-8"))
    (tmp_path / "model.json").write_text(json.dumps({**said, field: value}), "utf-8")
    with pytest.raises(FedgistError):
        fedgist.load(tmp_path)


@pytest.mark.parametrize(
    "model",
    ["mlp:hidden=32768", "gist:features=learned:net=mlp;hidden=32768", "gist:features=fourier:dimensions=32768"],
)
def test_a_model_is_made_once_its_tensors_are_known_to_be_there(model: str, tmp_path: Path) -> None:
    """A description of one line may be of terabytes; the tensors beside it are a few."""
    trained.save(nn.BatchNorm1d(1), about("lenet5"), tmp_path / "model")
    said = json.loads((tmp_path / "model.json").read_text("utf-8"))
    normalisation = dict.fromkeys(said["normalisation"])
    large = {"model": model, "input_shape": [2**26], "classes": 2**20, "class_names": None, "columns": None}
    (tmp_path / "model.json").write_text(json.dumps({**said, **large, "normalisation": normalisation}), "utf-8")
    with pytest.raises(FedgistError, match=r"that its \.json names: it (lacks '|holds 5 numbers)"):
        fedgist.load(tmp_path)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    model = models.build("lenet5", SHAPE, 4)
    trained.save(models.as_module(model, drawn(model)), about("lenet5"), tmp_path / "model")
    tensors = tmp_path / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-7])
    with pytest.raises(FedgistError, match=r"model.safetensors cannot be read .*; copy the model again"):
        fedgist.load(tmp_path)
    other = models.build("lenet5", (3, 28, 28), 4)
    trained.save(models.as_module(other, drawn(other)), about("lenet5"), tmp_path / "model")
    with pytest.raises(FedgistError, match=r"'fc1.weight' is float32 \[120, 400\], not float32 \[120, 576\]"):
        fedgist.load(tmp_path)
    trained.save(nn.BatchNorm1d(1), about("lenet5"), tmp_path / "model")
    with pytest.raises(FedgistError, match=r"that its \.json names: it lacks 'conv1.weight'"):
        fedgist.load(tmp_path)
