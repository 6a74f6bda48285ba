"""`fedgist.run` with a caller's own model and data."""

import inspect

import pytest
import torch
from torch import nn

import fedgist
from fedgist import methods, storage
from fedgist.core.rng import Rng
from fedgist.experiments.config import RunConfig, method_options
from fedgist.options import options

SHAPE = (1, 6, 6)


def blobs(rng, n, classes=3):
    """Images whose brightest row is their class: easy enough that two rounds learn it."""
    y = torch.arange(n) % classes
    x = 0.1 * rng.normal(n, *SHAPE)
    x[torch.arange(n), 0, 2 * y, :] += 1
    return x, y


def net(classes=3):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, classes))


CLIENTS = [blobs(Rng(i), 40) for i in range(3)]
TEST = blobs(Rng(9), 60)


def test_an_own_module_learns_own_data():
    model = net()
    before = storage.digest(dict(model.state_dict()))
    result = fedgist.run("fedavg", model, CLIENTS, TEST, rounds=5, lr=0.5, batch=8, epochs=2)
    assert isinstance(result, fedgist.Result)
    assert result.accuracy > 0.95
    assert len(result.metrics) == 5
    assert result.folder is None
    assert storage.digest(dict(model.state_dict())) == before  # the caller's module is not touched
    assert {name: w.shape for name, w in result.weights.items()} == {n: w.shape for n, w in model.state_dict().items()}
    assert result.bytes_up > 5 * 3 * 4 * sum(w.numel() for w in result.weights.values())

    trained = net()
    trained.load_state_dict(result.weights)
    correct = (trained(TEST[0]).argmax(1) == TEST[1]).float().mean().item()
    assert correct == pytest.approx(result.accuracy)


def test_the_first_weights_are_the_modules():
    """With a vanishing learning rate, what comes back is what went in."""
    model = net()
    result = fedgist.run("fedavg", model, CLIENTS, TEST, rounds=1, lr=1e-30)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(result.weights[name], weight, rtol=1e-6, atol=1e-7)


def test_a_named_model_on_own_data_and_a_module_on_named_data():
    named = fedgist.run("fedavg", "mlp:hidden=8", CLIENTS, TEST, rounds=1)
    assert named.weights["classifier.weight"].shape == (3, 8)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    on_digits = fedgist.run("fedavg", model, "digits", rounds=1, clients=3)
    assert on_digits.weights["1.weight"].shape == (10, 64)


CONV = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 3))
NORMED = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("model", "given", "engine"),
    [
        (net(), {}, "stacked"),
        (NORMED, {}, "stacked"),
        (CONV, {}, "threaded"),
        (net(), {"engine": "sequential"}, "sequential"),
        ([net(), "mlp", NORMED], {}, "stacked"),
        ([net(), "mlp", CONV], {}, "threaded"),
    ],
)
def test_the_automatic_engine_goes_by_the_layers_of_an_own_module(model, given, engine, tmp_path):
    method = "feddistill" if isinstance(model, list) else "fedavg"
    kept = fedgist.run(method, model, CLIENTS, TEST, rounds=1, device="cpu", out=tmp_path / "run", **given)
    assert f'engine = "{engine}"' in (kept.folder / "config.toml").read_text()


def test_a_resumed_run_keeps_the_engine_that_it_began_with(tmp_path):
    """An earlier version may have chosen another."""
    begun = fedgist.run("fedavg", net(), CLIENTS, TEST, rounds=1, device="cpu", engine="threaded", out=tmp_path / "run")
    fedgist.run("fedavg", net(), CLIENTS, TEST, rounds=2, device="cpu", out=tmp_path / "run", resume=True)
    assert 'engine = "threaded"' in (begun.folder / "config.toml").read_text()
    with pytest.raises(fedgist.FedgistError, match="engine was 'threaded' and is now 'stacked'"):
        fedgist.run("fedavg", net(), CLIENTS, TEST, rounds=2, engine="stacked", out=tmp_path / "run", resume=True)


def test_own_runs_can_be_kept_and_resumed(tmp_path):
    kept = fedgist.run("fedavg", net(), CLIENTS, TEST, rounds=2, out=tmp_path / "run")
    assert kept.folder == tmp_path / "run"
    again = fedgist.run("fedavg", net(), CLIENTS, TEST, rounds=2, out=tmp_path / "run", resume=True)
    assert storage.digest(again.state) == storage.digest(kept.state)
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(fedgist.FedgistError, match="was begun with other data"):
        fedgist.run("fedavg", net(), CLIENTS[::-1], TEST, rounds=2, out=tmp_path / "run", resume=True)


def test_clients_without_data_are_clients():
    nothing = (torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64))
    result = fedgist.run("fedavg", net(), [*CLIENTS, nothing], TEST, rounds=1)
    assert result.metrics[0]["answered"] == 4


def test_classes_that_do_not_occur():
    result = fedgist.run("fedavg", net(5), CLIENTS, TEST, classes=5, rounds=1)
    assert result.weights["3.weight"].shape == (5, 16)


X, Y = TEST


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"test": None}, r"data of your own needs a test set: test=\(x, y\)"),
        ({"data": []}, r"data must be a list of \(x, y\) pairs, one a client, with at least one sample"),
        ({"data": [(X[:, 0, 0, 0], Y)]}, r"client 0: inputs must be floating-point .* not float32 \[60\]"),
        ({"data": [((255 * X).byte(), Y)]}, "client 0: inputs must be floating-point .* not uint8"),
        ({"data": [([[0.0], [0.0, 1.0]], [0, 1])]}, "client 0: inputs must be floating-point .* not what is no array"),
        ({"data": [CLIENTS[0], (X.log(), Y)]}, "client 1: sample 0 .* value that is not finite .* as have 60 of 60"),
        ({"test": (X / 0, Y)}, "the test set: sample 0 has a value that is not finite"),
        ({"data": [(X, list("abc" * 20))]}, "client 0: labels must be 60 whole numbers from 0, one for each input"),
        ({"data": [(X, Y[:5])]}, "client 0: labels must be 60 whole numbers from 0, one for each input"),
        ({"data": [(X, Y - 1)]}, "client 0: labels must be 60 whole numbers from 0"),
        ({"data": [(X[..., :5], Y)]}, r"client 0 has inputs of shape \(1, 6, 5\), the test set of \(1, 6, 6\)"),
        ({"test": (X[:0], Y[:0])}, "the test set is empty"),
        ({"classes": 2}, "there is a label 2, but classes = 2 allows 0 to 1"),
        ({"data": "digits"}, "data set 'digits' has its own test set and classes"),
        ({"seeds": 3}, "fedgist.run makes one run; for several seeds call it with seed=0, seed=1"),
        ({"dataset": "mnist"}, "fedgist.run takes a data set as data='mnist', not as dataset"),
        ({"rouns": 3}, "unknown option 'rouns'; did you mean 'rounds'"),
        ({"method": "fedprx"}, "unknown method 'fedprx'; did you mean 'fedprox'"),
        (
            {"data": TEST},
            r"client 0 must be a pair .*, a Dataset or a DataLoader, not Tensor; data is a list",
        ),
        ({"clients": 3}, "data of your own says who the clients are, one a pair: leave out clients"),
        ({"alpha": 0.1}, "data of your own says who the clients are, one a pair: leave out alpha"),
        ({"limit": 5}, "data of your own is taken as it is: leave out limit"),
        ({"normalise": "train"}, "data of your own is taken as it is, or normalise='sums', not 'train'"),
        ({"model": 3}, "model must be a module or the name of a model, not int"),
        ({"model": "mlpp"}, "unknown model 'mlpp'; did you mean 'mlp'"),
    ],
)
def test_mistakes_are_named(changes, sentence):
    call = {"method": "fedavg", "model": "mlp", "data": CLIENTS, "test": TEST, "rounds": 1, **changes}
    with pytest.raises(fedgist.FedgistError, match=sentence):
        fedgist.run(**call)


def test_arrays_lists_and_tables_are_what_tensors_are():
    """Also an array that may not be written, one that runs backwards, and what pandas makes of the same numbers."""
    pandas = pytest.importorskip("pandas")
    rows, labels = X.flatten(1), Y
    locked, backwards = rows.numpy().copy(), rows.numpy()[::-1].copy()[::-1]
    locked.flags.writeable = False
    found = []
    for x, y in (
        (rows, labels),
        (locked, labels.numpy()),
        (backwards, labels.tolist()),
        (rows.tolist(), list(labels)),
        (pandas.DataFrame(rows.numpy()), pandas.Series(labels.numpy(), index=range(60, 120))),
    ):
        found.append(fedgist.run("fedavg", "mlp", [(x, y)], (x, y), rounds=1).weights)
    assert all(torch.equal(one[name], found[0][name]) for one in found for name in one)


class Attending(nn.Module):
    """Rows of an image as a sequence, one head of attention over them, Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 1, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.output = nn.Linear(36, 3)

    def forward(self, x):
        rows = x[:, 0]
        return self.output(self.drop((rows + self.attention(rows, rows, rows)[0]).flatten(1)))


def attending():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Attending()


def test_attention_and_dropout_learn_and_repeat():
    given = {"rounds": 5, "lr": 0.3, "batch": 8, "epochs": 2}
    one, two = (fedgist.run("fedavg", attending(), CLIENTS, TEST, **given) for _ in range(2))
    assert one.accuracy > 0.9
    assert storage.digest(one.state) == storage.digest(two.state)
    stacked = fedgist.run("fedavg", attending(), CLIENTS, TEST, engine="stacked", **given)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(stacked.weights[name], tensor, rtol=1e-3, atol=1e-4)


class Pairs(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def test_named_clients_bring_data_sets_and_loaders():
    x, y = CLIENTS[2]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, shuffle=True)
    wards = {"north": CLIENTS[1], "east": Pairs(*CLIENTS[0]), "south": loader}
    ordered = {"a": CLIENTS[0], "b": CLIENTS[1], "c": CLIENTS[2]}
    one = fedgist.run("independent", "mlp:hidden=8", wards, Pairs(*TEST), rounds=2, lr=0.5, batch=8)
    two = fedgist.run("independent", "mlp:hidden=8", ordered, TEST, rounds=2, lr=0.5, batch=8)
    assert list(one.client_models) == ["east", "north", "south"]
    assert abs(one.accuracy - two.accuracy) < 0.2  # other names are other random streams, and nothing else


def test_every_client_has_a_module_of_its_own():
    nets = [net(), attending(), net()]
    listed = fedgist.run("independent", nets, CLIENTS, TEST, rounds=1)
    assert [type(m).__name__ for m in listed.client_models.values()] == ["Sequential", "Attending", "Sequential"]
    wards = dict(zip(("x", "y", "z"), CLIENTS, strict=True))
    by_name = {"z": "mlp:hidden=8", "x": nets[0], "y": nets[1]}
    named = fedgist.run("independent", by_name, wards, TEST, rounds=1)
    kinds = {name: type(m).__name__ for name, m in named.client_models.items()}
    assert kinds == {"x": "Sequential", "y": "Attending", "z": "Net"}


@pytest.mark.parametrize(
    ("model", "data", "sentence"),
    [
        ([net(), net()], CLIENTS, "there are 2 models for 3 clients: give one, or one for each"),
        ([], CLIENTS, "model is an empty list"),
        ({"0": net(), "1": net()}, CLIENTS, "model has none for the client '2'"),
        ({**dict.fromkeys("012", "mlp"), "3": "mlp"}, CLIENTS, "unknown client with a model '3'"),
        ({"0": "mlp"}, "digits", "model by clients' names needs data by clients' names"),
        ("mlp", {"../etc": CLIENTS[0]}, "a client's name is 1 to 60 letters, .* not '../etc'"),
        ("mlp", [Pairs(CLIENTS[0][0], ["a"] * 40)], "client 0: every item of its data set must be"),
    ],
)
def test_mistakes_in_several_models_and_clients_are_named(model, data, sentence):
    with pytest.raises(fedgist.FedgistError, match=sentence):
        fedgist.run("independent", model, data, None if isinstance(data, str) else TEST, rounds=1)


def test_features_of_a_module_that_was_trained_elsewhere():
    """Fed3R's and AFL's case: gist on the frozen features of a user's net is the ridge classifier on them."""
    result = fedgist.run("gist", net(), CLIENTS, TEST, features="model", ridge="0.1", wire="float64")
    with torch.no_grad():
        z = nn.functional.normalize(net()[:3](torch.cat([x for x, _ in CLIENTS]))).double()
    y = nn.functional.one_hot(torch.cat([y for _, y in CLIENTS]), 3).double()
    z = (z - z.mean(0)) / 2
    wanted = torch.linalg.solve(z.T @ z + 0.1 * torch.eye(16).double(), z.T @ (y - 1 / 3))
    assert torch.allclose(result.state["weight"].double(), wanted, atol=1e-5)
    assert result.accuracy > 0.95


def test_every_option_can_be_given_from_python():
    """An option with the name of a parameter of `fedgist.run` would never reach its method."""
    taken = {p.name for p in inspect.signature(fedgist.run).parameters.values() if p.kind is not p.VAR_KEYWORD}
    assert taken & options(RunConfig).keys() == {"method", "model"}  # which are what the options of these names say
    for name in methods.available():
        assert not taken & method_options(name).keys(), name
    result = fedgist.run("repshare", net(), CLIENTS, TEST, rounds=1, steps=1, released=(0, 2))
    assert result.bytes_up
