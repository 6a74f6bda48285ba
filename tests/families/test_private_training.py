"""Private local training: engines agree, a client without data tells nothing of it, what would tell more is refused."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from fedgist import methods, models
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.method import handler_for
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.core.work import Place
from fedgist.data.client_data import ClientData
from fedgist.dp.accountant import Release
from fedgist.dp.randomness import keyed
from fedgist.engines import executor
from fedgist.engines.engine import answer
from fedgist.engines.local import LocalEngine
from fedgist.engines.scheduler import drive_one
from fedgist.experiments import privacy
from fedgist.experiments.config import resolve
from fedgist.experiments.inputs import Inputs, from_dataset
from fedgist.families.global_model import Global, GlobalModelOptions
from fedgist.families.private_training import noisy_steps
from fedgist.learning.moves import move
from fedgist.learning.private_training import gradients
from fedgist.methods.fedsgd import Point
from toys import play, toy_federation

PRIVATE: dict[str, Any] = {"method": "fedavg", "epsilon": 8.0, "weighting": "uniform", "noise_multiplier": 1.0}
SMALL = {"dataset": "digits", "limit": 120, "clients": 3, "model": "mlp:hidden=8", "steps": 3, "device": "cpu"}


def setting() -> tuple[Any, Inputs]:
    """Three clients, of which one has no data."""
    config = resolve({**SMALL, **PRIVATE})
    inputs = from_dataset(config)
    first, *_ = inputs.sites
    held = inputs.sites[first]
    inputs.sites[first] = ClientData(held.x[:0], held.y[:0], held.classes)
    return methods.find("fedavg")(config.options, inputs.task), inputs


def test_stacked_and_sequential_agree() -> None:
    """Two rounds of three clients, of which one has no data."""
    found = {}
    for name in ("sequential", "stacked"):
        method, inputs = setting()
        engine = LocalEngine(method, inputs.sites, seed=3, executor=executor(name), info=inputs.info)
        for _ in range(2):
            assert engine.run_round().answered == 3
        found[name] = engine.state["w"]
    for tensor, value in found["sequential"].items():
        torch.testing.assert_close(found["stacked"][tensor], value, rtol=1e-4, atol=1e-5)


def test_a_client_without_data_sends_noise_with_the_weight_of_any() -> None:
    method, inputs = setting()
    first, *_ = inputs.sites
    alone = {first: inputs.sites[first]}
    engine = LocalEngine(method, alone, seed=3, executor=executor("sequential"), info={first: inputs.info[first]})
    before = {name: value.clone() for name, value in engine.state["w"].items()}
    engine.run_round()
    assert all(not torch.equal(value, before[name]) for name, value in engine.state["w"].items())


TRAINING = {"by DP-SGD": ("fedavg", "fedprox", "fednova", "scaffold", "fedadam", "fedensemble", "tofu", "codream")}
CHEAP: dict[str, dict[str, Any]] = {
    "tofu": {"images": 2, "iterations": 2},
    "codream": {"exchanges": 2, "dreams": 4, "warm_up": 0, "distil_steps": 2},
}


@pytest.mark.parametrize("name", TRAINING["by DP-SGD"])
def test_what_a_client_sends_depends_on_batches_and_noise_alone(name: str) -> None:
    """Two runs in which no batch holds anything: whatever the records are, the transcript is the same to the last bit.

    What would not be made of noisy steps (a count, a class, a mean, a score) would differ.
    """
    found = []
    for world in range(2):
        config = resolve({**SMALL, **PRIVATE, "method": name, "sampling": 1e-9, "epsilon": 8.0, **CHEAP.get(name, {})})
        config = replace(config, options=replace(config.options, sampling=1e-9, steps=2))
        inputs = from_dataset(config)
        for id, held in inputs.sites.items():
            if world:  # others, and fewer
                inputs.sites[id] = ClientData(
                    held.x[: held.n // 2].flip(0) * 3, held.y[: held.n // 2] * 0, held.classes
                )
        method = methods.find(name)(config.options, inputs.task)
        layer = privacy.simulated(method, inputs, config, None, torch.device("cpu"))
        engine = LocalEngine(
            method, inputs.sites, seed=3, executor=executor("sequential"), info=inputs.info, layer=layer
        )
        play(engine, 2)  # in its first, codream has nothing but the warm-up
        found.append({key: value for key, value in engine.state.items() if key in ("w", "dreams", "buffer")})
    for one, other in zip(*map(tree.leaves, found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["fedavg", "fedsgd"])
def test_how_records_of_a_secret_batch_are_moved_is_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record more has all after it take the next one's move. Who knows the run's seed must not know the moves: sums
    of 31 clipped gradients, of batches that differ by the first record, are 5 C apart and more where it does."""
    given: dict[str, Any] = {"method": name, "sampling": 1.0, "crop": 2, "flip": True, "steps": 1}
    config = resolve({**SMALL, "epsilon": 8.0, "noise_multiplier": 1.0, **given})
    inputs = from_dataset(config)
    method, who = methods.find(name)(config.options, inputs.task), "0"
    moves, make = [], type(config.options).with_moves

    def watched(*given: Any) -> Any:
        plan = make(*given)
        moves.append(plan["moves"])
        return plan

    monkeypatch.setattr(type(config.options), "with_moves", watched)
    w = method.model.init(Rng(0))
    asked: Any = Global(w) if name == "fedavg" else Point(w, 0)
    for key in (b"1" * 32, b"2" * 32, None):
        me = Site(who, 1, inputs.sites[who], {"home": {}}, Rng(config.seed), inputs.info[who])
        me.secret = key and partial(keyed, key)
        drive_one(answer(method, handler_for(method, type(asked)), me, asked), Place())
    secret, other, seeded = moves
    assert not torch.equal(secret, other) and not torch.equal(secret, seeded)
    data, net = inputs.sites[who], inputs.task.models[config.model]
    sums = []
    for start in (0, 1):
        pool = {"x": move(data.x[start:], seeded.flatten(0, 1)[: data.n - start]), "y": data.y[start:]}
        found = gradients(net, net.init(Rng(0)), pool["x"], pool["y"]).clipped_sum(torch.ones(len(pool["y"])), 1.0)
        sums.append(torch.cat([part.flatten() for part in found.values()]))
    assert data.n == 31 and torch.dist(*sums) > 5


def test_what_a_round_costs() -> None:
    """Steps are public: those given, or epochs over the rate; never a count of records."""
    options = GlobalModelOptions(weighting="uniform", noise_multiplier=2.0, sampling=0.05, epochs=3)
    assert noisy_steps(options, (), options.private_steps).release == Release(2.0, 0.05, 60)
    assert replace(options, steps=7).private_steps == 7


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
@pytest.mark.parametrize(("given", "says"), [({"batch": "all"}, "batch=all tells"), ({"clip": 1.0}, "set record_clip")])
def test_what_clips_records_has_no_use_for_it(method: str, given: dict[str, Any], says: str) -> None:
    """Also where nothing is promised: sums of gradients divided by 2^63, or a bound that nobody looks at."""
    with pytest.raises(FedgistError, match=says):
        play(toy_federation(method, clients=3, noise_multiplier=1.0, **given))


def test_a_net_with_dropout_is_refused_by_the_name_of_what_it_keeps() -> None:
    with torch.random.fork_rng(devices=[]):
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 10))
    model = models.from_module(net, (1, 8, 8), 10)
    method = methods.find("fedsgd")
    with pytest.raises(FedgistError, match=r"without dropout\.draws, not Sequential"):
        method(method.Config(), Task((1, 8, 8), 10, (0.0,), (1.0,), {"m": model}, "m"))


@pytest.mark.parametrize("method", ["fedsgd", "dp-fedavg", "feddm-released"])
def test_noise_that_nobody_would_add_is_refused(method: str) -> None:
    """The noise of their sums is the layer's, which a run without epsilon does not have."""
    with pytest.raises(FedgistError, match="set epsilon, or leave out noise_multiplier"):
        toy_federation(method, clients=3, noise_multiplier=1.0)
    toy_federation(method, clients=3, noise_multiplier=0.0)


@pytest.mark.parametrize(
    ("given", "model", "says"),
    [
        ({"weighting": "samples"}, "mlp", "set weighting to uniform"),
        ({"share": "head"}, "mlp", "score models on data of their own"),
        ({"share": "body"}, "mlp", "score models on data of their own"),
        ({"clip": 1.0}, "mlp", "set record_clip instead"),
        ({"batch": "all"}, "mlp", "batch=all tells how many records"),
        ({"noise_multiplier": 0.0}, "mlp", "training without noise is not private"),
        ({}, "mlp:norm=batch", "BatchNorm mixes the records"),
    ],
)
def test_what_would_tell_more_is_refused(given: dict[str, Any], model: str, says: str) -> None:
    config = resolve({**PRIVATE, **given})
    name, _, norm = model.partition(":")
    net = models.build(name, (1, 8, 8), 10, **({"norm": "batch"} if norm else {}))
    method = methods.find("fedavg")(config.options, Task((1, 8, 8), 10, (0.0,), (1.0,), {"m": net}, "m", private=True))
    with pytest.raises(FedgistError, match=says):
        method.releases  # type: ignore[attr-defined]  # noqa: B018
