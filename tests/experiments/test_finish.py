"""The finish: the head of a run's model becomes the ridge classifier of everybody's data on the features it learned."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedgist
from fedgist.core.errors import FedgistError
from fedgist.experiments import exporting, finishing, runner
from fedgist.experiments.config import RunConfig, resolve
from fedgist.experiments.folder import RunFolder, read_json
from fedgist.experiments.inputs import from_dataset
from fedgist.experiments.results import Result

LAYER = {"dataset": "digits", "limit": 300, "clients": 4, "alpha": 0.1, "device": "cpu", "engine": "sequential"}
TRAINED = {**LAYER, "method": "fedavg", "model": "mlp:hidden=16:norm=batch", "rounds": 2, "steps": 5}


def config(**changes: Any) -> RunConfig:
    return resolve({**TRAINED, **changes})


def logits(result: Result) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = result.model(from_dataset(config()).test[0])
        return found


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_the_head_is_the_ridge_solution_on_all_data(engine: str) -> None:
    """With h what enters the last layer, W = (z'z + 0.01 I)⁻¹ z'(y − 1/c), z = h − mean h; scores c(zW + mean y)."""
    inputs = from_dataset(config())
    plain = runner.run(config(engine=engine))
    found = runner.run(config(engine=engine, finish="gist:ridge=0.01:wire=float64"))
    net, w = inputs.task.models[inputs.task.model], plain.weights or {}
    union = [torch.cat([getattr(data, name) for data in inputs.sites.values()]) for name in "xy"]
    h, tested = (net(w, x).features.double().numpy() for x in (union[0], inputs.test[0]))
    y = np.eye(10)[union[1].numpy()]
    z = h - h.mean(0)
    wanted = np.linalg.solve(z.T @ z + 0.01 * np.eye(16), z.T @ (y - 0.1))
    np.testing.assert_allclose(logits(found).numpy(), 10 * ((tested - h.mean(0)) @ wanted + y.mean(0)), atol=2e-3)
    assert found.accuracy > plain.accuracy + 0.1
    assert (found.weights or {}).keys() == w.keys()  # the same architecture, of which only the last layer is another
    assert all(torch.equal(value, w[name]) for name, value in (found.weights or {}).items() if "classifier" not in name)


@pytest.mark.parametrize("finish", ["gist", "gist+scattering:grid=2:scales=1"])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_clients_that_share_all_but_the_head_end_with_heads_of_their_own(
    engine: str, finish: str, tmp_path: Path
) -> None:
    """On the body that all have, each client's is the exact head of everybody's data, moved by its own samples, and
    better on what is held out of that client than the one that it trained. With own=false all have the exact one."""
    own = {"share": "body", "engine": engine, "client_test": "own-share", "validation": 0.2}
    plain = runner.run(config(**own), tmp_path / "plain")
    later = finishing.begin(RunFolder(tmp_path / "plain"), tmp_path / "run", {"finish": finish})
    result = runner.run(later, tmp_path / "run", resume=True)
    assert result.accuracy > plain.accuracy
    before, after = ([fedgist.load(tmp_path / name, id) for id in "0123"] for name in ("plain", "run"))
    x = from_dataset(config()).test[0]
    assert len({tuple(module(x).argmax(1).tolist()) for module in after}) == 4
    if finish == "gist":  # the same nets, of which nothing but the last layer is another
        bodies = [
            {name: value for name, value in module.state_dict().items() if "classifier" not in name}
            for module in (*before, *after)
        ]
        assert all(torch.equal(body[name], bodies[0][name]) for body in bodies for name in bodies[0])
    told = [read_json(tmp_path / "run" / "clients" / f"{id}.json")["accuracy"] for id in "0123"]
    assert np.mean(told) == pytest.approx(result.accuracy)

    common = runner.run(config(**own, finish=f"{finish}:own=false"), tmp_path / "common")
    assert "deviation_between_clients" not in common.metrics[-1]
    assert not (tmp_path / "common" / "clients").exists()


def test_nothing_is_trained_again(tmp_path: Path) -> None:
    """A run that is finished later is the one that was finished at once, and the ledger has one exchange more."""
    once = runner.run(config(finish="gist"), tmp_path / "once")
    runner.run(config(), tmp_path / "plain")
    before = (tmp_path / "plain" / "model.safetensors").read_bytes()
    later = finishing.begin(RunFolder(tmp_path / "plain"), tmp_path / "later", {"finish": "gist"})
    result = runner.run(later, tmp_path / "later", resume=True)
    assert (tmp_path / "later" / "model.safetensors").read_bytes() == (tmp_path / "once/model.safetensors").read_bytes()
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == before
    assert result.accuracy == once.accuracy and [row["round"] for row in result.metrics] == [1, 2, 3]
    totals = [read_json(tmp_path / name / "result.json") for name in ("plain", "once", "later")]
    assert totals[1]["bytes_up"] == totals[2]["bytes_up"] > totals[0]["bytes_up"]
    assert totals[1]["messages"] == totals[0]["messages"] + 4 * 4  # two asks of four clients, and their replies

    again = runner.run(config(finish="gist+scattering:grid=2:scales=1"), tmp_path / "plain", resume=True)
    assert again.accuracy > result.accuracy and len(again.metrics) == 3
    with pytest.raises(FedgistError, match="finish was 'gist' and is now None"):
        runner.run(config(), tmp_path / "once", resume=True)
    with pytest.raises(FedgistError, match="is there already"):
        finishing.begin(RunFolder(tmp_path / "plain"), tmp_path / "later", {"finish": "gist"})


def test_stopped_within_the_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runner.run(config(finish="gist"), tmp_path / "whole")
    make = finishing.method
    calls: list[int] = []

    def stopped(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first is the check before the rounds
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setattr(finishing, "method", stopped)
    with pytest.raises(runner.Interrupted, match="2 of 2 rounds are kept"):
        runner.run(config(finish="gist"), tmp_path / "stopped")
    result = runner.run(config(finish="gist"), tmp_path / "stopped", resume=True)
    assert result.accuracy == whole.accuracy and len(calls) == 4
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped")]
    assert same[0] == same[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"finish": "gist+scattering:grid=2:scales=1"},
        {"method": "gist", "features": "model+fourier", "grid": 2, "scales": 1, "dimensions": 20, "clip": 0.4},
        {"method": "gist", "features": "scattering", "grid": 2, "scales": 1},
    ],
)
def test_a_model_on_fixed_features_comes_out(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its files give back what was judged; TorchScript of it takes any number of images."""
    known = {key: value for key, value in TRAINED.items() if changes.get("method") is None or key != "steps"}
    result = runner.run(resolve({**known, "rounds": 1, **changes}), tmp_path / "run")
    x, y = from_dataset(config()).test
    module = fedgist.load(tmp_path / "run")
    assert (module(x).argmax(1) == y).double().mean().item() == pytest.approx(result.accuracy)
    script = exporting.export(tmp_path / "run", tmp_path / "model.pt", "torchscript")
    with pytest.warns(DeprecationWarning, match=r"torch\.jit\.load"):
        again = torch.jit.load(str(script))
    torch.testing.assert_close(again(x), module(x), rtol=0, atol=1e-5)
    assert "gist:features=" in (tmp_path / "run" / "MODEL_CARD.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"method": "repshare"}, "clients of repshare have features of their own.*the server has no fc1.weight"),
        ({"method": "dfedavg"}, "clients of dfedavg have features of their own"),
        ({"share": "head"}, "clients of fedavg have features of their own.*the server has no fc1.weight"),
        ({"batch_norm": "local"}, "clients of fedavg have features of their own.*the server has no norm1.running_mean"),
        ({"batch_norm": "local", "share": "body"}, "the server has no norm1.running_mean for all"),
        ({"method": "gist"}, "gist has the exact head already"),
        ({"epsilon": 8.0}, "would spend a budget of its own"),
        ({"finish": "fedavg"}, "finish must be gist"),
        ({"finish": "gist:grit=3"}, "unknown option 'grit'"),
        ({"finish": "gist+wavelets"}, "unknown feature map 'wavelets'"),
        ({"finish": "gist+scattering:clip=0"}, "clip = 0 is for features = learned alone"),
    ],
)
def test_what_cannot_be_finished(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Said before anything is trained, and nothing is left behind."""
    known = {key: value for key, value in TRAINED.items() if changes.get("method") is None or key != "steps"}
    with pytest.raises(FedgistError, match=why):
        runner.run(resolve({**known, "finish": "gist", **changes}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_learned_features_are_for_a_finish() -> None:
    with pytest.raises(FedgistError, match="run a method with --finish gist"):
        runner.run(resolve({**LAYER, "method": "gist", "features": "learned"}))
