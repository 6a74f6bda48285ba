"""A user's own nn.Module against itself."""

import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import fedgist
from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.models import build, from_module
from fedgist.models.torch_module import DRAWS

RNG = Rng(5)("modules")
SHAPE = (1, 8, 8)


class Net(nn.Module):
    """A net with a branch, BatchNorm, a frozen layer and an integer buffer that takes part in the computation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)
        self.project = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.embed = nn.Linear(64, 6)
        self.output = nn.Linear(6, 3)
        self.register_buffer("order", torch.arange(63, -1, -1))
        for name, p in self.named_parameters():
            p.data.copy_(RNG("start", name).normal(*p.shape) / 4)

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x)))
        h = (h + self.project(h)).flatten(1)[:, self.order]
        return self.output(torch.tanh(self.embed(h)))


def images(count, *path):
    return RNG("images", *path).normal(count, *SHAPE).double()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# constructors of modules draw from the global generator
own_generator = torch.random.fork_rng(devices=[])


@own_generator
def net():
    return Net()


def test_tensors_and_start():
    module = net()
    state = torch.get_rng_state()
    model = from_module(module, SHAPE, 3)
    w = model.init(Rng(0))
    assert torch.equal(torch.get_rng_state(), state)
    floats = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    assert w.keys() == floats.keys() == model.shapes.keys()
    assert all(torch.equal(w[name], floats[name]) for name in w)
    assert model.buffers == {"norm.running_mean", "norm.running_var", "project.weight", "project.bias"}
    assert model.size == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert (model.name, model.classifier, model.feature_size) == ("Net", "output", 6)
    assert model.names_from(model.classifier) == {"output.weight", "output.bias"}
    assert not any(tensor.requires_grad for tensor in w.values())
    # copies: neither the user's module nor the next start feels what happens to them
    w["output.weight"].zero_()
    assert module.output.weight.any()
    with torch.no_grad():
        module.output.bias.fill_(9.0)
    assert model.init(Rng(1))["output.weight"].any()
    assert not (model.init(Rng(1))["output.bias"] == 9.0).any()


def test_equals_the_module_over_several_training_steps():
    module = net().double()
    model = from_module(module, SHAPE, 3)
    w = model.init(Rng(0))
    for i in range(3):
        x = images(5, i)
        before = {name: tensor.clone() for name, tensor in w.items()}
        out = model(w, x, train=True)
        close(out.logits, module.train()(x))
        assert out.buffers.keys() == {"norm.running_mean", "norm.running_var"}
        assert all(torch.equal(w[name], before[name]) for name in w)
        w |= out.buffers
        close(w["norm.running_mean"], module.norm.running_mean)
        close(w["norm.running_var"], module.norm.running_var)
        out = model(w, x)
        close(out.logits, module.eval()(x))
        assert out.buffers == {}
        close(out.logits, nn.functional.linear(out.features, w["output.weight"], w["output.bias"]))
        close(model.head(w, out.features), out.logits)
        close(model(w, out.features, start="output").logits, out.logits)


@own_generator
def test_gives_a_model_of_layers_back():
    """The same net as a module and as layers is the same function, tap included."""
    layered = build("cnn", SHAPE, 3)
    w = {name: tensor.double() for name, tensor in layered.init(RNG("layers")).items()}
    module = nn.Sequential()
    for name, part in {
        "conv1": nn.Conv2d(1, 6, 3, 2, 1),
        "norm1": nn.BatchNorm2d(6),
        "relu1": nn.ReLU(),
        "conv2": nn.Conv2d(6, 16, 3, 2, 1),
        "norm2": nn.BatchNorm2d(16),
        "relu2": nn.ReLU(),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(64, 32),
        "classifier": nn.Linear(32, 3),
    }.items():
        module.add_module(name, part)
    model = from_module(module, SHAPE, 3)
    assert model.shapes == layered.shapes
    assert model.buffers == layered.buffers
    x = images(4)
    ours, theirs = Tap(), Tap()
    a, b = layered(w, x, tap=ours), model(w, x, tap=theirs)
    close(a.features, b.features)
    close(a.logits, b.logits)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        for p, q in zip(one, other, strict=True):
            close(p, q)
    for name in theirs.entering:
        close(ours.entering[name], theirs.entering[name])


def test_vmap_of_grad_equals_a_loop():
    model = from_module(net().double(), SHAPE, 3)
    start = model.init(Rng(0))
    stacked = {
        k: torch.stack([v + 0.1 * RNG(k, i).uniform(*v.shape) for i in range(3)])
        for k, v in start.items()
        if k not in model.buffers
    }
    state = {k: v for k, v in start.items() if k in model.buffers}
    x, y = torch.stack([images(4, i) for i in range(3)]), torch.tensor([[0, 1, 2, 0]] * 3)

    def loss(w, x, y):
        out = model(w | state, x, train=True)
        return cross_entropy(out.logits, y), out.buffers

    gradients, buffers = vmap(grad(loss, has_aux=True))(stacked, x, y)
    for i in range(3):
        alone, new = grad(loss, has_aux=True)({k: v[i] for k, v in stacked.items()}, x[i], y[i])
        for name in alone:
            close(gradients[name][i], alone[name])
        for name in new:
            close(buffers[name][i], new[name])


@own_generator
def test_two_threads_at_once():
    """Each thread runs its own weights; both are inside the model at once, which the barrier in forward enforces."""
    meeting = threading.Barrier(2)

    class Meeting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 3)

        def forward(self, x):
            h = torch.relu(self.first(x.flatten(1)))
            if x.shape[0] == 5:  # not the single probe at the start
                meeting.wait(timeout=10)
            return self.second(h)

    model = from_module(Meeting().double(), SHAPE, 3)
    start = model.init(Rng(0))
    results = {}

    def work(client):
        w = {name: tensor + client for name, tensor in start.items()}
        results[client] = [model(w, images(5, client, step)).logits for step in range(20)]

    threads = [threading.Thread(target=work, args=(client,)) for client in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in (0, 1):
        w = {name: tensor + client for name, tensor in start.items()}
        for step in range(20):
            x = images(5, client, step)
            h = torch.relu(nn.functional.linear(x.flatten(1), w["first.weight"], w["first.bias"]))
            close(results[client][step], nn.functional.linear(h, w["second.weight"], w["second.bias"]))


@own_generator
def test_other_buffers_are_copied_before_a_module_changes_them():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.output = nn.Linear(64, 3)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            if self.training:
                self.seen += x.shape[0]
            return self.output(x.flatten(1))

    model = from_module(Counting(), SHAPE, 3)
    w = model.init(Rng(0))
    out = model(w, images(5).float(), train=True)
    assert out.buffers == {"seen": torch.tensor([5.0])}
    assert w["seen"] == 0
    assert model(w, images(5).float()).buffers == {}


@own_generator
def test_features_of_a_named_submodule():
    head = nn.Sequential(nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 3))
    model = from_module(nn.Sequential(nn.Flatten(), head), SHAPE, 3, classifier="1")
    assert model.feature_size == 64
    assert model.names_from(model.classifier) == {"1.0.weight", "1.0.bias", "1.2.weight", "1.2.bias"}
    w, x = model.init(Rng(0)), images(2).float()
    out = model(w, x)
    assert torch.equal(out.features, x.flatten(1))
    assert torch.equal(out.logits, functional_call(head, {k[2:]: v for k, v in w.items()}, (out.features,)))


def flat(*parts):
    return nn.Sequential(nn.Flatten(), *parts)


@pytest.mark.parametrize(
    ("module", "classifier", "message"),
    [
        (lambda: nn.Linear(8, 3), None, "put it into an nn.Sequential"),
        (lambda: nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), None, "Sequential has no nn.Linear"),
        (lambda: flat(nn.Linear(64, 3)), "head", "unknown submodule of Sequential 'head'"),
        (lambda: flat(nn.Linear(64, 4)), None, r"a score for each of 3 classes, .* gave shape \(2, 4\)"),
        (lambda: flat(nn.Linear(60, 3)), None, "cannot run on inputs of 1×8×8"),
        (lambda: flat(nn.Linear(64, 3), nn.Softmax(1)), None, "does not return what its layer '1' gives"),
        (lambda: nn.Sequential(nn.Linear(8, 3), nn.AvgPool2d((8, 1)), nn.Flatten()), None, "layer '0' .* is not given"),
        (
            lambda: flat(nn.AlphaDropout(0.5), nn.Linear(64, 3)),
            None,
            "layer '1' is AlphaDropout, which draws from torch's global .* set its p to 0",
        ),
        (
            lambda: flat(nn.MultiheadAttention(64, 2, dropout=0.1), nn.Linear(64, 3)),
            None,
            "layer '1' is MultiheadAttention, which draws .* set its dropout to 0",
        ),
        (lambda: flat(nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 3)), None, "layer '1' averages its statistics"),
    ],
)
@own_generator
def test_mistakes_are_named(module, classifier, message):
    with pytest.raises(FedgistError, match=message):
        from_module(module(), SHAPE, 3, classifier)


def test_a_shape_without_a_side_is_refused():
    with pytest.raises(FedgistError, match=r"must be 1 to 8 positive whole numbers, .* not \(\)"):
        from_module(net(), (), 3)


def test_can_be_cut_only_at_the_classifier():
    model = from_module(net(), SHAPE, 3)
    with pytest.raises(FedgistError, match="cut only at its classifier 'output', not at 'conv'"):
        model(model.init(Rng(0)), images(1).float(), start="conv")


def test_equal_only_to_itself():
    module = net()
    one, other = from_module(module, SHAPE, 3), from_module(module, SHAPE, 3)
    assert len({one, one, other}) == 2


def test_clients_with_a_module_of_the_users_own_are_stacked_on_a_cpu(caplog):
    """The worker threads meet the module for the first time under vmap, where torch lets nobody move it."""
    with torch.random.fork_rng():
        own = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    clients = [(RNG("x", i).uniform(6, 1, 8, 8), torch.arange(6)) for i in range(4)]
    made = [
        fedgist.run("fedavg", own, clients, clients[0], classes=10, rounds=1, engine=engine, device="cpu").weights
        for engine in ("stacked", "sequential")
    ]
    assert "cannot be stacked" not in caplog.text
    for name, weight in made[0].items():
        torch.testing.assert_close(weight, made[1][name])


@own_generator
@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout(0.25), (4, 5, 6)), (nn.Dropout1d(0.25), (4, 5, 1))])
def test_dropout_drops_what_its_counter_says(layer, shape):
    """A share p of the values or channels, the rest divided by 1 − p; another set at every step; none when judged."""
    model = from_module(nn.Sequential(layer, nn.Flatten(), nn.Linear(30, 3)), (5, 6), 3)
    w = model.init(Rng(5))
    x = torch.ones(400, 5, 6)
    before = torch.get_rng_state()
    first = model(w, x, train=True)
    values = first.features.view(400, 5, 6)
    torch.testing.assert_close(values.unique(), torch.tensor([0.0, 1 / 0.75]))
    whole = values[:, :, :1].expand_as(values)
    assert torch.equal(values, whole) == (shape[2] == 1)
    assert abs((values == 0).float().mean() - 0.25) < 4 * (0.25 * 0.75 / (400 * 5 * shape[2])) ** 0.5
    assert first.buffers == {DRAWS: w[DRAWS] + 1}
    assert torch.equal(model(w, x, train=True).features, first.features)
    assert not torch.equal(model({**w, **first.buffers}, x, train=True).features, first.features)
    assert torch.equal(model(w, x).features, x.flatten(1)) and torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(model.init(Rng(6))[DRAWS], w[DRAWS])
    assert DRAWS not in model.module(w).state_dict()
