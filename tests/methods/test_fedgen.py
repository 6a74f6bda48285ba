"""FedGen and the distillation methods beside it: identities, wire sizes, odd users, partial sharing, protocols."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import methods, models, storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.method import who_sees_what
from fedgist.core.rng import Rng
from fedgist.core.task import Task
from fedgist.data.client_data import ClientData
from fedgist.data.datasets import load
from fedgist.engines.local import LocalEngine
from fedgist.methods import feddf
from fedgist.options import build
from toys import CLASSES, SHAPE, clients, federation, play

LOCAL: dict[str, Any] = {"steps": 3, "batch": 8, "lr": 0.1}
SMALL: dict[str, Any] = LOCAL | {"hidden": 8, "noise_size": 4, "generator_steps": 4}


def some_test() -> tuple[Tensor, Tensor]:
    return Rng(5)("test").normal(30, *SHAPE), Rng(5)("labels").integers(CLASSES, 30)


def users(*sizes: int, **about: Any) -> dict[str, ClientData]:
    return clients(*sizes, test=30, seed=5, **about)


def run(engine: LocalEngine, rounds: int = 2) -> LocalEngine:
    play(engine, rounds)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(engine.state) if isinstance(leaf, Tensor))
    return engine


def apart(a: Any, b: Any) -> float:
    return float(tree.norm(tree.sub(a, b)))


@pytest.mark.parametrize("loss", ["code", "paper"])
@pytest.mark.parametrize("batch_norm", ["aggregate", "local"])
def test_without_guidance_it_is_fedavg(loss: str, batch_norm: str) -> None:
    """α = β = 0 leaves FedAvg; its heads are averaged from what the server sees, its extractors from sums."""
    local = {"steps": 3, "batch": 8, "lr": 0.1, "active": 2, "batch_norm": batch_norm}
    plain = run(federation("fedavg", users(7, 20, 3), "cnn", dtype=torch.float64, **local)).state["w"]
    settings = {**SMALL, **local, "loss": loss, "guidance": 0.0, "echo": 0.0}
    same = run(federation("fedgen", users(7, 20, 3), "cnn", dtype=torch.float64, **settings)).state["w"]
    other = run(federation("fedgen", users(7, 20, 3), "cnn", dtype=torch.float64, **settings | {"guidance": 1.0}))
    assert list(same) == list(plain)
    assert apart(same, plain) < 1e-5 * float(tree.norm(plain))  # the wire is float32
    assert apart(other.state["w"], plain) > 1e-3


def test_the_first_round_is_not_guided() -> None:
    sites = users(20, 20)
    plain = run(federation("fedavg", sites, "cnn", steps=3, batch=8, lr=0.1), 1).state["w"]
    guided = run(federation("fedgen", sites, "cnn", **SMALL), 1).state["w"]
    assert apart(plain, guided) < 1e-5


def test_guidance_stops_after_the_guided_steps() -> None:
    """loss="code" guides 20 local steps and no more; with guided_steps=0 nothing is left of it."""
    sites = users(20, 20)
    plain = run(federation("fedavg", sites, "cnn", steps=3, batch=8, lr=0.1)).state["w"]
    assert apart(plain, run(federation("fedgen", sites, "cnn", **SMALL, guided_steps=0)).state["w"]) < 1e-5
    two, all = (run(federation("fedgen", sites, "cnn", **SMALL, guided_steps=n)).state["w"] for n in (2, 20))
    assert apart(two, all) > 1e-4


def test_weights_of_the_guidance_over_the_rounds() -> None:
    """code: max(1e-4, 10 · 0.98^(t−1)), times B_G/B for the first; paper: 1 and 0, for ever."""
    config = build(methods.find("fedgen").Config, {"generated": 64, "batch": 32, "echo": 5.0})
    assert config.guidance_at(1) == (20.0, 5.0)
    assert config.guidance_at(3) == pytest.approx((20 * 0.98**2, 5 * 0.98**2))
    assert config.guidance_at(10_000) == (2e-4, 1e-4)
    assert build(methods.find("fedgen").Config, {"loss": "paper"}).guidance_at(50) == (1.0, 0.0)


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
    engine = run(federation(method, users(4, 4, shape=shape, classes=classes), "cnn", **small), 1)
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
    engine = run(federation("fedgen", sites, "mlp", **SMALL, loss=loss, active=1), 3)
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


def test_samples_that_only_fill_up_a_batch_are_not_counted() -> None:
    """Of 11 samples in two batches of 8, the second is filled up with five that count once."""
    sites = users(11)
    engine = run(federation("fedgen", sites, "mlp", **SMALL | {"steps": 0, "epochs": 1}), 1)
    assert engine.state["counts"].tolist() == sites["0"].counts().tolist()


def test_the_generators_rate_falls_from_round_to_round() -> None:
    """With a factor of next to nothing, only the first round moves its weights."""
    engine = run(federation("fedgen", users(20), "mlp", **SMALL, generator_decay=1e-30), 1)
    buffers = engine.method.generator.buffers  # type: ignore[attr-defined]
    found = [engine.state["generator"], run(engine, 1).state["generator"]]
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
    run(engine).evaluate(some_test())


def test_a_module_of_the_user_s_own() -> None:
    """Its last linear layer is the head; the others are the extractor."""
    with torch.random.fork_rng():
        net = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, CLASSES)
        )
    own = models.from_module(net, SHAPE, CLASSES)
    engine = federation("fedgen", users(9, 9), own, **SMALL)
    assert set(engine.method.bounds(own.name)["head"]) == {"3.weight", "3.bias"}
    run(engine)


def test_a_mistyped_layer_is_named() -> None:
    with pytest.raises(FedgistError, match="did you mean 'classifier'"):
        federation("fedgen", users(4), "cnn", latent="clasifier")


@pytest.mark.parametrize("loss", ["code", "paper"])
@pytest.mark.parametrize("sizes", [(9,), (1, 30), (0, 12, 2)], ids=["one user", "less than a batch", "an empty user"])
def test_odd_users(sizes: tuple[int, ...], loss: str) -> None:
    engine = run(federation("fedgen", users(*sizes), "cnn", **SMALL, loss=loss, published=True))
    found = engine.evaluate(some_test())
    assert found.keys() == {"accuracy", "accuracy_published"}


@pytest.mark.parametrize("method", ["fedgen", "feddf"])
def test_nobody_has_data(method: str) -> None:
    engine = federation(method, users(0, 0), "cnn", **(SMALL if method == "fedgen" else LOCAL))
    before = storage.digest(engine.state)
    assert storage.digest(run(engine, 1).state) == before


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
    alone, together = (run(federation(method, users(*sizes), "cnn", **settings)) for sizes in ((20, 9), (20, 9, 0)))
    assert storage.digest(together.state) == storage.digest(alone.state)


@pytest.mark.parametrize("method", ["fedgen", "fedavg", "feddistill+", "feddf"])
def test_partial_sharing_keeps_extractors_at_home(method: str) -> None:
    """Only heads come down, extractors differ from user to user and may even be of different architectures."""
    settings = {"steps": 3, "batch": 8, "lr": 0.1, "share": "head"}
    architectures = ("cnn:feature_size=16", "mlp:feature_size=16")
    if method == "feddf":
        settings |= {"distil_steps": 2}
    engine = run(federation(method, users(20, 20, 20), architectures, **settings))
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


def test_published_protocol() -> None:
    """Global weights with each user's own statistics, on its share of the test images of its labels, pooled.

    With one user per label and the shares of all users laid together by hand.
    """
    sites = users(20, 20, 20)
    sites = {id: ClientData(d.x, torch.full_like(d.y, int(id)), CLASSES, d.test) for id, d in sites.items()}
    engine = run(federation("fedgen", sites, "cnn", **SMALL, published=True), 3)
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
    plain, published = (run(federation(method, sites, "cnn", **settings, published=asked)) for asked in (False, True))
    assert storage.digest(plain.state) == storage.digest(published.state)


def test_aggregated_and_local_statistics_train_the_same() -> None:
    """In train mode BatchNorm uses the batch, so both protocols are evaluations of one training."""
    local, aggregated = (
        run(federation("fedgen", users(20, 20), "cnn", **SMALL, batch_norm=kind)).state["w"]
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
    engine = run(federation("fedgen", sites, "mlp", **local, **settings), 6)
    assert engine.evaluate((test.x, test.y))["accuracy"] > 0.7
    y = torch.arange(10).repeat(20)
    z = engine.method.generator.sample(engine.state["generator"], y, Rng(9).uniform(200, 32))  # type: ignore[attr-defined]
    said = engine.method.model(engine.state["w"], z, start="classifier").logits.argmax(1)
    assert (said == y).float().mean() > 0.9


# The methods beside it


def test_fedensemble_trains_as_fedavg_does() -> None:
    """Its global model is FedAvg's, and it reports that model's accuracy too."""
    settings = LOCAL | {"active": 2, "published": True}
    plain, ensemble = (run(federation(name, users(9, 20, 5), "cnn", **settings)) for name in ("fedavg", "fedensemble"))
    assert apart(plain.state["w"], ensemble.state["w"]) < 1e-5
    alone, together = plain.evaluate(some_test()), ensemble.evaluate(some_test())
    assert together["accuracy_fedavg"] == alone["accuracy"]
    assert together["accuracy_fedavg_published"] == alone["accuracy_published"]


def test_absent_users_count_as_the_global_model() -> None:
    """The logits of the 2 users who trained, and 3 times those of the model that was sent to them."""
    engine = federation("fedensemble", users(9, 20, 5, 7, 8), "mlp", **LOCAL, active=2)
    sent = run(engine, 1).state["w"]
    run(engine, 1)
    assert engine.state["shares"].tolist() == [3, 1, 1]
    assert apart(tree.index(engine.state["members"], 0), sent) == 0
    x, y = some_test()
    said = 3 * engine.method.model(sent, x).logits
    for k in (1, 2):
        said = said + engine.method.model(tree.index(engine.state["members"], k), x).logits
    assert engine.evaluate((x, y))["accuracy"] == pytest.approx(float((said.argmax(1) == y).float().mean()))


def test_fedensemble_as_published_weighs_labels_by_their_holders() -> None:
    """A test image counts once for every user that holds its label."""
    sites = users(9, 9)
    sites = {id: ClientData(d.x, d.y % (1 + int(id)), CLASSES, d.test) for id, d in sites.items()}  # {0} and {0, 1}
    engine = run(federation("fedensemble", sites, "mlp", **LOCAL, published=True), 1)
    x, y = some_test()
    said = sum(engine.method.model(tree.index(engine.state["members"], k), x).logits for k in (1, 2))
    right = said.argmax(1) == y  # type: ignore[union-attr]
    weights = torch.tensor([2, 1, 0, 0])[y]
    expected = float((right * weights).sum() / weights.sum())
    assert engine.evaluate((x, y))["accuracy_published"] == pytest.approx(expected)


def test_fedensemble_needs_whole_models() -> None:
    with pytest.raises(FedgistError, match="batch_norm=aggregate"):
        federation("fedensemble", users(5), "cnn", batch_norm="local")


@pytest.mark.parametrize("form", ["kl", "mse"])
def test_feddistill_without_pull_is_independent_learning(form: str) -> None:
    """In float64, where a learning rate that was rounded to float32 on the way would show."""
    sites, settings = users(20, 20), LOCAL | {"dtype": torch.float64}
    alone = run(federation("independent", sites, "cnn", **settings))
    same, other = (run(federation("feddistill", sites, "cnn", **settings, form=form, pull=pull)) for pull in (0.0, 1.0))
    for id in sites:
        assert apart(alone.site_states[id]["w"], same.site_states[id]["w"]) < 1e-14
        assert apart(alone.site_states[id]["w"], other.site_states[id]["w"]) > 1e-4


def test_feddistill_plus_without_pull_is_fedavg() -> None:
    sites = users(20, 7)
    plain = run(federation("fedavg", sites, "cnn", **LOCAL)).state["w"]
    same, other = (run(federation("feddistill+", sites, "cnn", **LOCAL, pull=pull)).state["w"] for pull in (0.0, 5.0))
    assert apart(plain, same) < 1e-6
    assert apart(plain, other) > 1e-4


@pytest.mark.parametrize("method", ["feddistill", "feddistill+"])
def test_absent_labels_are_absent_from_the_mean(method: str) -> None:
    """Label 0 has two holders, label 1 one, the others none: the table's rows are means over holders only."""
    sites = users(20, 20)
    sites = {id: ClientData(d.x, d.y % (1 + int(id)), CLASSES, d.test) for id, d in sites.items()}
    engine = run(federation(method, sites, "mlp", **LOCAL), 1)
    assert engine.state["known"].tolist() == [1, 1, 0, 0]
    assert torch.equal(engine.state["table"][2:], torch.zeros(2, CLASSES))
    # in the first round each client does alone what it does in company
    single = [run(federation(method, {id: sites[id]}, "mlp", **LOCAL), 1).state["table"] for id in ("0", "1")]
    assert torch.allclose(engine.state["table"][0], (single[0][0] + single[1][0]) / 2, atol=1e-5)
    assert torch.allclose(engine.state["table"][1], single[1][1], atol=1e-5)


def test_logits_of_the_round_and_of_the_run() -> None:
    """memory="run" averages over all that a client ever saw: after two equal rounds, the mean of both rounds' means."""
    site = {"0": ClientData(*(t[:8] for t in (users(8)["0"].x, torch.zeros(8, dtype=torch.int64))), CLASSES)}
    tables = {}
    for memory in ("round", "run"):
        engine = federation("feddistill", site, "mlp", **LOCAL, memory=memory, pull=0.0)
        tables[memory] = [run(engine, 1).state["table"][0] for _ in range(2)]
    assert torch.equal(tables["run"][0], tables["round"][0])
    assert torch.allclose(tables["run"][1], (tables["round"][0] + tables["round"][1]) / 2, atol=1e-5)


def test_feddf_without_distillation_is_fedavg() -> None:
    sites = users(20, 7, 3)
    settings = LOCAL | {"active": 2}
    engine = federation("feddf", sites, "cnn", **settings, distil_steps=0)
    plain = federation("fedavg", sites, "cnn", **settings)
    assert apart(run(plain).state["w"], run(engine).state["w"]["cnn"]) < 1e-5


def test_feddf_needs_a_proxy_set() -> None:
    method = methods.find("feddf")
    with pytest.raises(FedgistError, match="proxy=2000"):
        method(method.Config(), Task((1, 8, 8), 2, (0.0,), (1.0,), {}, "mlp"))


def test_feddf_teaches_the_mean_of_all_users_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three users of two architectures: a third of what each says, whatever its group; one user's prototype is its."""
    said: list[Tensor] = []

    async def listen(model: Any, w: Any, x: Tensor, teacher: Tensor, *rest: Any) -> Any:
        said.append(teacher)
        return w

    monkeypatch.setattr(feddf, "distil", listen)
    nets, proxy = ("mlp", "cnn:norm=none"), Rng(1).normal(20, *SHAPE)
    sites, settings = users(20, 9, 7), LOCAL | {"proxy": proxy}
    run(federation("feddf", sites, nets, **settings), 1)
    logits = []
    for away in ({"1", "2"}, {"0", "1"}, {"0", "2"}):  # one user at a time, the others without data
        alone = {id: ClientData(d.x[:0], d.y[:0], CLASSES) if id in away else d for id, d in sites.items()}
        engine = run(federation("feddf", alone, nets, **settings), 1)
        (name,) = {engine.info[id]["model"] for id in sites if id not in away}
        logits.append(engine.method.task.models[name](engine.state["w"][name], proxy).logits)
    torch.testing.assert_close(said[0], sum(logits) / 3, rtol=1e-5, atol=1e-6)


def test_feddf_with_two_prototypes_beats_fedavg_on_both() -> None:
    """Real digits, two labels a client, an MLP and a CNN: each prototype ends above the average of its own clients."""
    train, test = load("digits")
    labels = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (0, 5), (2, 7), (4, 9), (1, 6), (3, 8)]
    parts = [torch.isin(train.y, torch.tensor(pair)).nonzero().flatten()[:60] for pair in labels]
    sites = {str(i): ClientData(train.x[p], train.y[p], 10, (test.x, test.y)) for i, p in enumerate(parts)}
    found = {}
    for steps in (0, 40):
        engine = federation(
            "feddf",
            sites,
            ("mlp", "cnn:norm=none"),
            proxy=train.x[-300:],
            steps=10,
            batch=16,
            lr=0.1,
            distil_steps=steps,
        )
        found[steps] = run(engine, 4).evaluate((test.x, test.y))
    for name in ("accuracy_mlp", "accuracy_cnn:norm=none"):
        assert found[40][name] > found[0][name], found
    assert found[40]["accuracy"] == pytest.approx((found[40]["accuracy_mlp"] + found[40]["accuracy_cnn:norm=none"]) / 2)
