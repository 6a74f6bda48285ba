"""FedGen, and what it has in common with the methods beside it: wire sizes, odd users, partial sharing, protocols."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import methods, models, storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.method import who_sees_what
from fedgist.core.rng import Rng
from fedgist.data.client_data import ClientData
from fedgist.data.datasets import load
from fedgist.options import build
from toys import CLASSES, SHAPE, apart, clients, federation, play

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}
SMALL: dict[str, Any] = LOCAL | {"hidden": 8, "noise_size": 4, "generator_steps": 4}


def some_test() -> tuple[Tensor, Tensor]:
    return Rng(5)("test").normal(30, *SHAPE), Rng(5)("labels").integers(CLASSES, 30)


def users(*sizes: int, **about: Any) -> dict[str, ClientData]:
    return clients(*sizes, test=30, seed=5, **about)


@pytest.mark.parametrize("loss", ["code", "paper"])
@pytest.mark.parametrize("batch_norm", ["aggregate", "local"])
def test_without_guidance_it_is_fedavg(loss: str, batch_norm: str) -> None:
    """α = β = 0 leaves FedAvg; its heads are averaged from what the server sees, its extractors from sums."""
    local = {"steps": 3, "batch": 8, "lr": 0.1, "active": 2, "batch_norm": batch_norm}
    plain = play(federation("fedavg", users(7, 20, 3), "cnn", dtype=torch.float64, **local), 2).state["w"]
    settings = {**SMALL, **local, "loss": loss, "guidance": 0.0, "echo": 0.0}
    same = play(federation("fedgen", users(7, 20, 3), "cnn", dtype=torch.float64, **settings), 2).state["w"]
    other = play(federation("fedgen", users(7, 20, 3), "cnn", dtype=torch.float64, **settings | {"guidance": 1.0}), 2)
    assert list(same) == list(plain)
    assert apart(same, plain) < 1e-5 * float(tree.norm(plain))  # the wire is float32
    assert apart(other.state["w"], plain) > 1e-3


def test_the_first_round_is_not_guided() -> None:
    sites = users(20, 20)
    plain = play(federation("fedavg", sites, "cnn", steps=3, batch=8, lr=0.1), 1).state["w"]
    guided = play(federation("fedgen", sites, "cnn", **SMALL), 1).state["w"]
    assert apart(plain, guided) < 1e-5


def test_guidance_stops_after_the_guided_steps() -> None:
    """loss="code" guides 20 local steps and no more; with guided_steps=0 nothing is left of it."""
    sites = users(20, 20)
    plain = play(federation("fedavg", sites, "cnn", steps=3, batch=8, lr=0.1), 2).state["w"]
    assert apart(plain, play(federation("fedgen", sites, "cnn", **SMALL, guided_steps=0), 2).state["w"]) < 1e-5
    two, all = (play(federation("fedgen", sites, "cnn", **SMALL, guided_steps=n), 2).state["w"] for n in (2, 20))
    assert apart(two, all) > 1e-4


def test_weights_of_the_guidance_over_the_rounds() -> None:
    """code: max(1e-4, 10 · 0.98^(t−1)), times B_G/B for the first; paper: 1 and 0, for ever."""
    config = build(methods.find("fedgen").Config, {"generated": 64, "batch": 32, "echo": 5.0})
    assert config.guidance_at(1, 32) == (20.0, 5.0)
    assert config.guidance_at(3, 32) == pytest.approx((20 * 0.98**2, 5 * 0.98**2))
    assert config.guidance_at(10_000, 32) == (2e-4, 1e-4)
    assert build(methods.find("fedgen").Config, {"loss": "paper"}).guidance_at(50, 32) == (1.0, 0.0)


def test_all_samples_are_a_batch_of_as_many() -> None:
    """B is what a client has: B_G/B of a batch that is called all is not a number beyond all."""
    sites = users(16, 16)
    settings = {**SMALL, "generated": 5, "echo": 0.0, "batch": "all"}
    unguided = play(federation("fedgen", sites, "cnn", **settings, guidance=0.0), 2).state["w"]
    guided = play(federation("fedgen", sites, "cnn", **settings), 2).state["w"]
    assert apart(guided, unguided) > 1e-4


MNIST, EMNIST = ((1, 28, 28), 10), ((1, 28, 28), 26)


@pytest.mark.parametrize(
    ("method", "kind", "settings", "up", "down"),
    [
        ("fedgen", MNIST, {}, 26_434 + 10, 26_434 + 19_744 + 10),
        ("fedgen", MNIST, {"loss": "paper"}, 26_434 + 10, 26_434 + 19_744 + 10),
        ("fedgen", EMNIST, {}, 26_962 + 26, 26_962 + 23_840 + 26),
        ("fedgen", MNIST, {"share": "head"}, 330 + 10, 330 + 19_744 + 10),
        ("feddistill", MNIST, {}, 100, 100),
        ("feddistill", EMNIST, {}, 676, 676),
        ("feddistill+", MNIST, {}, 26_434 + 100, 26_434 + 100),
        ("feddistill+", MNIST, {"share": "head"}, 330 + 100, 330 + 100),
        ("fedensemble", MNIST, {}, 26_434 + 44, 26_434 + 44),
        ("feddf", MNIST, {}, 26_434 + 44, 26_434 + 44),
        ("feddf", MNIST, {"share": "head"}, 26_434 + 44, 330),
    ],
)
def test_numbers_on_the_wire(method: str, kind: Any, settings: Any, up: int, down: int) -> None:
    """The papers' counts; 44 are the BatchNorm statistics where a message is a model and nothing else."""
    shape, classes = kind
    small = {"steps": 1, "batch": 2} | settings | ({"distil_steps": 1} if method == "feddf" else {})
    engine = play(federation(method, users(4, 4, shape=shape, classes=classes), "cnn", **small), 1)
    totals = engine.ledger.totals()
    assert (totals.paper_up, totals.paper_down) == (2 * 4 * up, 2 * 4 * down)


def test_who_sees_what() -> None:
    """The server sees heads, sizes and (for its weighted loss) label counts; of extractors and statistics only sums."""
    seen = {field: additive for _, reply, field, additive in who_sees_what(methods.find("fedgen")) if reply == "Upload"}
    assert seen == {
        "head": False,
        "p": False,
        "own_counts": False,
        "extractor": True,
        "statistics": True,
        "counts": True,
    }
    for settings, visible in (({}, True), ({"loss": "paper"}, False), ({"label_weights": "uniform"}, False)):
        bounds = federation("fedgen", users(4), "cnn", **settings).method.bounds("cnn")
        assert bool(bounds["shown counts"]) == visible
        assert bool(bounds["summed counts"]) != visible


@pytest.mark.parametrize("loss", ["code", "paper"])
def test_label_prior(loss: str) -> None:
    """paper: p̂(y) is the share of a label in the round's batches; code: uniform over all labels seen so far."""
    sites = users(20, 20)
    sites = {id: ClientData(d.x, d.y % 2 + 2 * (id == "1"), CLASSES, d.test) for id, d in sites.items()}
    engine = play(federation("fedgen", sites, "mlp", **SMALL, loss=loss, active=1), 3)
    prior = engine.method.prior(engine.state["counts"])  # type: ignore[attr-defined]
    assert prior.sum().item() == pytest.approx(1.0)
    seen = {int(y) for id in sites for y in sites[id].y.unique()}
    if loss == "code":
        assert all(value in (0.0, 1 / len(seen), 0.5) for value in prior.tolist())
        assert engine.state["counts"].sum() == 3 * SMALL["steps"] * SMALL["batch"]
    else:
        assert engine.state["counts"].sum() == SMALL["steps"] * SMALL["batch"]  # of one user, in the last round
        assert torch.allclose(prior, engine.state["counts"] / engine.state["counts"].sum())
    start = federation("fedgen", sites, "mlp", **SMALL, loss=loss)
    assert start.method.prior(start.state["counts"]).tolist() == [0.25] * 4  # type: ignore[attr-defined]
    lied = start.method.prior(torch.tensor([-7.0, 5.0, 0.0, 5.0]))  # type: ignore[attr-defined]
    assert lied.tolist() == [0.0, 0.5, 0.0, 0.5]


def test_samples_that_only_fill_up_a_batch_are_not_counted() -> None:
    """Of 11 samples in two batches of 8, the second is filled up with five that count once."""
    sites = users(11)
    engine = play(federation("fedgen", sites, "mlp", **SMALL | {"steps": 0, "epochs": 1}), 1)
    assert engine.state["counts"].tolist() == sites["0"].counts().tolist()


def test_the_generators_rate_falls_from_round_to_round() -> None:
    """With a factor of next to nothing, only the first round moves its weights."""
    engine = play(federation("fedgen", users(20), "mlp", **SMALL, generator_decay=1e-30), 1)
    buffers = engine.method.generator.buffers  # type: ignore[attr-defined]
    found = [engine.state["generator"], play(engine, 1).state["generator"]]
    first, second = (storage.digest({name: w[name] for name in w if name not in buffers}) for w in found)
    assert first == second
    assert storage.digest(found[0]) != storage.digest(found[1])  # it was taught: its statistics are new


@pytest.mark.parametrize("latent", ["classifier", "fc1", "conv2", "conv1"])
@pytest.mark.parametrize("batch_norm", ["aggregate", "local"])
def test_any_layer_may_be_the_latent_one(latent: str, batch_norm: str) -> None:
    """From the classifier's features to the pixels themselves; BatchNorm inside the head travels with it."""
    engine = federation("fedgen", users(9, 9), "cnn", **SMALL, latent=latent, batch_norm=batch_norm)
    generator, model = engine.method.generator, engine.method.model  # type: ignore[attr-defined]
    assert generator.latent == model.layer_shapes[latent]
    head = engine.method.bounds("cnn")["head"]
    assert ("norm2.running_mean" in head) == (latent in ("conv1", "conv2"))
    play(engine, 2).evaluate(some_test())


def test_a_module_of_the_user_s_own() -> None:
    """Its last linear layer is the head; the others are the extractor."""
    with torch.random.fork_rng():
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, CLASSES)
        )
    own = models.from_module(net, SHAPE, CLASSES)
    engine = federation("fedgen", users(9, 9), own, **SMALL)
    assert set(engine.method.bounds(own.name)["head"]) == {"3.weight", "3.bias"}
    play(engine, 2)


def test_a_mistyped_layer_is_named() -> None:
    with pytest.raises(FedgistError, match="did you mean 'classifier'"):
        federation("fedgen", users(4), "cnn", latent="clasifier")


@pytest.mark.parametrize("loss", ["code", "paper"])
@pytest.mark.parametrize("sizes", [(9,), (1, 30), (0, 12, 2)], ids=["one user", "less than a batch", "an empty user"])
def test_odd_users(sizes: tuple[int, ...], loss: str) -> None:
    engine = play(federation("fedgen", users(*sizes), "cnn", **SMALL, loss=loss, published=True), 2)
    found = engine.evaluate(some_test())
    assert found.keys() >= {"accuracy", "accuracy_published"}


@pytest.mark.parametrize("method", ["fedgen", "feddf"])
def test_nobody_has_data(method: str) -> None:
    engine = federation(method, users(0, 0), "cnn", **(SMALL if method == "fedgen" else LOCAL))
    before = storage.digest(engine.state)
    assert storage.digest(play(engine, 1).state) == before


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedgen", SMALL),
        ("fedgen", SMALL | {"label_weights": "uniform"}),
        ("fedgen", SMALL | {"loss": "paper"}),
        ("feddf", LOCAL | {"distil_steps": 3}),
    ],
)
def test_who_holds_no_data_teaches_nothing(method: str, settings: dict[str, Any]) -> None:
    """What a user without data sends is what the server knows already: it has no say in what is learnt."""
    alone, together = (play(federation(method, users(*sizes), "cnn", **settings), 2) for sizes in ((20, 9), (20, 9, 0)))
    assert storage.digest(together.state) == storage.digest(alone.state)


@pytest.mark.parametrize("method", ["fedgen", "fedavg", "feddistill+", "feddf"])
def test_partial_sharing_keeps_extractors_at_home(method: str) -> None:
    """Only heads come down, extractors differ from user to user and may even be of different architectures."""
    settings = {"steps": 3, "batch": 8, "lr": 0.1, "share": "head"}
    architectures = ("cnn:feature_size=16", "mlp:feature_size=16")
    if method == "feddf":
        settings |= {"distil_steps": 2}
    engine = play(federation(method, users(20, 20, 20), architectures, **settings), 2)
    homes = {id: state["home"] for id, state in engine.site_states.items()}
    assert "conv1.weight" in homes["0"] and "fc1.weight" in homes["1"]
    assert "classifier.weight" not in homes["0"]
    assert not torch.equal(homes["0"]["conv1.weight"], homes["2"]["conv1.weight"])
    assert 0 <= engine.evaluate(some_test())["accuracy"] <= 1


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FedgistError, match="averages heads"):
        federation("fedgen", users(5, 5), ("cnn:feature_size=16", "mlp:feature_size=8"), share="head")
    with pytest.raises(FedgistError, match="averages weights"):
        federation("fedgen", users(5, 5), ("cnn:feature_size=16", "mlp:feature_size=16"))


def test_heads_must_travel() -> None:
    """From them the generator learns."""
    with pytest.raises(FedgistError, match="set share to all or head"):
        federation("fedgen", users(5, 5), "cnn", share="body")


def test_published_protocol() -> None:
    """Global weights with each user's own statistics, on its share of the test images of its labels, pooled.

    With one user per label and the shares of all users laid together by hand.
    """
    sites = users(20, 20, 20)
    sites = {id: ClientData(d.x, torch.full_like(d.y, int(id)), CLASSES, d.test) for id, d in sites.items()}
    engine = play(federation("fedgen", sites, "cnn", **SMALL, published=True), 3)
    x, y = sites["0"].test or (torch.empty(0), torch.empty(0))
    found = engine.evaluate((x, y))
    right = total = 0
    for id, state in engine.site_states.items():
        first = int(Rng(0)("test share", id).integers(3, 1))
        mine = (y == int(id)).nonzero().flatten()[first::3]
        w = {**engine.state["w"], **state["home"]}
        right += int((engine.method.model(w, x[mine]).logits.argmax(1) == y[mine]).sum())
        total += len(mine)
    assert found["accuracy_published"] == pytest.approx(right / total)
    strict = (engine.method.model(engine.state["w"], x).logits.argmax(1) == y).float().mean()
    assert found["accuracy"] == pytest.approx(float(strict))


@pytest.mark.parametrize("method", ["fedavg", "fedgen", "feddistill+", "feddf", "fedensemble"])
def test_the_published_protocol_is_only_looked_at(method: str) -> None:
    """Clients keep BatchNorm statistics of their own for it, and train from the server's all the same."""
    sites, settings = users(20, 9), SMALL if method == "fedgen" else LOCAL
    plain, published = (
        play(federation(method, sites, "cnn", **settings, published=asked), 2) for asked in (False, True)
    )
    assert storage.digest(plain.state) == storage.digest(published.state)


def test_aggregated_and_local_statistics_train_the_same() -> None:
    """In train mode BatchNorm uses the batch, so both protocols are evaluations of one training."""
    local, aggregated = (
        play(federation("fedgen", users(20, 20), "cnn", **SMALL, batch_norm=kind), 2).state["w"]
        for kind in ("local", "aggregate")
    )
    assert apart(local, {name: aggregated[name] for name in local}) == 0
    assert aggregated.keys() - local.keys() == set(models.build("cnn", SHAPE, CLASSES).buffers)


def test_it_learns_and_its_generator_speaks_for_the_users() -> None:
    """On real digits, where each user has two labels: latents mean to the global model what they were made for."""
    train, test = load("digits")
    pairs = [torch.isin(train.y, torch.tensor([2 * i, 2 * i + 1])).nonzero().flatten()[:80] for i in range(5)]
    sites = {str(i): ClientData(train.x[p], train.y[p], 10, (test.x, test.y)) for i, p in enumerate(pairs)}
    local = {"steps": 10, "batch": 16, "lr": 0.05}
    settings = {"hidden": 64, "generator_lr": 0.01, "generator_steps": 20}
    engine = play(federation("fedgen", sites, "mlp", **local, **settings), 6)
    assert engine.evaluate((test.x, test.y))["accuracy"] > 0.7
    y = torch.arange(10).repeat(20)
    z = engine.method.generator.sample(engine.state["generator"], y, Rng(9).uniform(200, 32))  # type: ignore[attr-defined]
    said = engine.method.model(engine.state["w"], z, start="classifier").logits.argmax(1)
    assert (said == y).float().mean() > 0.9
