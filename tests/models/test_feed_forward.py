"""Every model against torch's own modules, against a loop under vmap, and cut in two at every layer."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Tap
from fedgist.models import build
from fedgist.models import model as layered
from fedgist.models.layers import bind_all
from fedgist.models.registry import ARCHITECTURES

RNG = Rng(7)("models")

# every architecture, as small as its form allows, and every kind of norm
SMALL = {
    "mlp": ("mlp", (1, 4, 4), {"hidden": (6, 5)}),
    "mlp-batch": ("mlp", (1, 4, 4), {"hidden": (6,), "feature_size": 5, "norm": "batch"}),
    "mlp-group": ("mlp", (1, 4, 4), {"hidden": (6,), "norm": "group"}),
    "mlp-volume": ("mlp", (2, 3, 2, 2), {"hidden": (6,)}),
    "tabular": ("tabular", (9,), {"hidden": (6, 5), "categories": (3, 2), "embedding": 2, "norm": "batch"}),
    "tabular-numeric": ("tabular", (9,), {"hidden": (6,)}),
    "cnn1d": ("cnn1d", (2, 13), {"depth": 2, "width": 4, "kernel": 3}),
    "cnn1d-batch": ("cnn1d", (1, 8), {"depth": 2, "width": 4, "kernel": 3, "norm": "batch"}),
    "cnn": ("cnn", (1, 8, 8), {}),
    "cnn-instance": ("cnn", (1, 8, 8), {"norm": "instance"}),
    "lenet5": ("lenet5", (1, 12, 12), {}),
    "lenet5-batch": ("lenet5", (1, 12, 12), {"norm": "batch"}),
    "lenet5-thesis": ("lenet5-thesis", (1, 8, 8), {"feature_size": 5}),
    "lenet5-thesis-batch": ("lenet5-thesis", (1, 8, 8), {"feature_size": 5, "norm": "batch"}),
    "convnet": ("convnet", (1, 8, 8), {"width": 4}),
    "convnet-batch": ("convnet", (3, 8, 8), {"width": 4, "norm": "batch"}),
    "convnet-group": ("convnet", (3, 8, 8), {"width": 4, "norm": "group"}),
    "vgg13": ("vgg13", (3, 32, 32), {"width": 1}),
    "vgg13-batch": ("vgg13", (3, 32, 32), {"width": 1, "norm": "batch"}),
    "resnet9": ("resnet9", (1, 16, 16), {"width": 2, "feature_size": 5}),
    "resnet18": ("resnet18", (3, 8, 8), {"width": 2}),
    "resnet18-group": ("resnet18", (3, 8, 8), {"width": 2, "norm": "group"}),
    "resnet18-none": ("resnet18", (3, 8, 8), {"width": 2, "norm": "none"}),
    "resnet18-thesis": ("resnet18-thesis", (3, 8, 8), {"width": 2, "feature_size": 5}),
}


def make(case):
    name, shape, options = SMALL[case]
    return build(name, shape, 3, **options)


def weights(model, *path):
    """Float64, and norm layers away from 1 and 0, where a forgotten weight would not show."""
    rng = RNG(model.name, *path)
    w = {name: tensor.double() for name, tensor in model.init(rng).items()}
    for name in w:
        if w[name].dim() == 1:
            w[name] = w[name] + rng("shift", name).uniform(*w[name].shape).double()
    return w


def images(model, count, *path):
    return RNG("images", *path).normal(count, *model.input_shape).double()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_all_architectures_are_covered():
    assert {name for name, _, _ in SMALL.values()} == set(ARCHITECTURES)


# --- torch.nn as the oracle -------------------------------------------------------------------------------------------


def chain(**parts):
    return nn.Sequential(OrderedDict(parts))


def mlp_oracle():
    return chain(
        flatten=nn.Flatten(),
        fc1=nn.Linear(16, 6),
        norm1=nn.BatchNorm1d(6),
        relu1=nn.ReLU(),
        fc2=nn.Linear(6, 5),
        norm2=nn.BatchNorm1d(5),
        relu2=nn.ReLU(),
        classifier=nn.Linear(5, 3),
    )


class Columns(nn.Module):
    """Four numbers, then one-hot blocks of three and two, each through an `nn.Embedding` by its index."""

    def __init__(self):
        super().__init__()
        self.tables = [nn.Embedding(3, 2).double(), nn.Embedding(2, 2).double()]
        for i, table in enumerate(self.tables):
            self.register_parameter(str(i), table.weight)

    def forward(self, x):
        blocks = x[:, 4:7], x[:, 7:9]
        return torch.cat(
            [x[:, :4], *(table(block.argmax(1)) for table, block in zip(self.tables, blocks, strict=True))], 1
        )


def tabular_oracle():
    with_norms = dict(list(mlp_oracle().named_children())[2:])
    return chain(columns=Columns(), fc1=nn.Linear(8, 6), **with_norms)


def cnn1d_oracle():
    return chain(
        conv1=nn.Conv1d(2, 4, 3, padding=1),
        norm1=nn.GroupNorm(2, 4),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool1d(2),
        conv2=nn.Conv1d(4, 4, 3, padding=1),
        norm2=nn.GroupNorm(2, 4),
        relu2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool1d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(4, 3),
    )


def cnn_oracle():
    return chain(
        conv1=nn.Conv2d(1, 6, 3, stride=2, padding=1),
        norm1=nn.BatchNorm2d(6),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(6, 16, 3, stride=2, padding=1),
        norm2=nn.BatchNorm2d(16),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64, 32),
        classifier=nn.Linear(32, 3),
    )


def lenet5_oracle():
    return chain(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        classifier=nn.Linear(84, 3),
    )


def lenet5_thesis_oracle():
    return chain(
        conv1=nn.Conv2d(1, 6, 5, padding=2),
        norm1=nn.BatchNorm2d(6),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5, padding=2),
        norm2=nn.BatchNorm2d(16),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(16, 120, 3, padding=1),
        norm3=nn.BatchNorm2d(120),
        relu3=nn.ReLU(),
        pool3=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc1=nn.Linear(120, 5),
        tanh=nn.Tanh(),
        classifier=nn.Linear(5, 3),
    )


def convnet_oracle():
    """Dataset condensation's "instance norm" is GroupNorm with one channel a group."""
    parts = {}
    for i in (1, 2, 3):
        parts[f"conv{i}"] = nn.Conv2d(1 if i == 1 else 4, 4, 3, padding=3 if i == 1 else 1)
        parts[f"norm{i}"] = nn.GroupNorm(4, 4)
        parts[f"relu{i}"] = nn.ReLU()
        parts[f"pool{i}"] = nn.AvgPool2d(2, 2)
    return chain(**parts, flatten=nn.Flatten(), classifier=nn.Linear(4, 3))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride, thesis):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.thesis, self.stride = thesis, stride
        if stride > 1:
            self.conv_shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.norm_shortcut = nn.BatchNorm2d(outputs)

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        shortcut = self.norm_shortcut(self.conv_shortcut(x)) if self.stride > 1 else x
        return torch.relu(y) + shortcut if self.thesis else torch.relu(y + shortcut)


def resnet18_oracle(thesis):
    parts = {"conv1": nn.Conv2d(3, 2, 3, padding=1, bias=False), "norm1": nn.BatchNorm2d(2), "relu1": nn.ReLU()}
    widths = [2, 2, 2, 4, 4, 8, 8, 16, 16]
    for i in range(8):
        parts[f"block{i + 1}"] = Block(widths[i], widths[i + 1], widths[i + 1] // widths[i], thesis)
    parts |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    if thesis:
        parts |= {"fc1": nn.Linear(16, 5), "tanh": nn.Tanh()}
    return chain(**parts, classifier=nn.Linear(5 if thesis else 16, 3))


@pytest.mark.parametrize(
    ("case", "oracle"),
    [
        ("mlp-batch", mlp_oracle),
        ("tabular", tabular_oracle),
        ("cnn1d", cnn1d_oracle),
        ("cnn", cnn_oracle),
        ("lenet5", lenet5_oracle),
        ("lenet5-thesis-batch", lenet5_thesis_oracle),
        ("convnet", convnet_oracle),
        ("resnet18", lambda: resnet18_oracle(thesis=False)),
        ("resnet18-thesis", lambda: resnet18_oracle(thesis=True)),
    ],
)
def test_equals_the_same_net_of_torch_modules(case, oracle):
    model = make(case)
    with torch.random.fork_rng(devices=[]):  # constructors of modules draw from the global generator
        module = oracle().double()
    w = weights(model)
    counters = {name: torch.tensor(0) for name in module.state_dict() if name.endswith("num_batches_tracked")}
    module.load_state_dict(w | counters)
    x = images(model, 6)
    if case == "tabular":
        x[:, 4:7], x[:, 7:9] = torch.eye(3)[[0, 2, 1, 1, 0, 2]], torch.eye(2)[[1, 0, 1, 1, 0, 0]]
    out = model(w, x)
    close(out.logits, module.eval()(x))
    close(out.features, module[:-1](x))
    assert out.buffers == {}
    out = model(w, x, train=True)
    close(out.logits, module.train()(x))
    assert out.buffers.keys() == model.buffers
    state = module.state_dict()
    for name, tensor in out.buffers.items():
        close(tensor, state[name])


# --- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL)
def test_vmap_of_grad_in_train_mode_equals_a_loop(case):
    model = make(case)
    clients = 3
    stacked = {k: torch.stack([weights(model, i)[k] for i in range(clients)]) for k in model.shapes}
    x = torch.stack([images(model, 4, i) for i in range(clients)])
    y = torch.tensor([[0, 1, 2, 0], [1, 1, 2, 2], [0, 0, 0, 0]])

    def loss(trained, state, x, y):
        out = model(trained | state, x, train=True)
        return cross_entropy(out.logits, y), out.buffers

    trained = {k: v for k, v in stacked.items() if k not in model.buffers}
    state = {k: v for k, v in stacked.items() if k in model.buffers}
    gradients, buffers = vmap(grad(loss, has_aux=True))(trained, state, x, y)
    for i in range(clients):
        leaves = {k: v[i].clone().requires_grad_() for k, v in trained.items()}
        value, new = loss(leaves, {k: v[i] for k, v in state.items()}, x[i], y[i])
        expected = torch.autograd.grad(value, list(leaves.values()))
        for name, g in zip(leaves, expected, strict=True):
            close(gradients[name][i], g)
        for name in model.buffers:
            close(buffers[name][i], new[name])


@pytest.mark.parametrize("train", [False, True])
def test_vmap_with_weights_shared_by_all(train):
    """The first step of a round: one broadcast model, many data sets. torch's in-place BatchNorm cannot do this."""
    model = make("cnn")
    w, x = weights(model), torch.stack([images(model, 4, i) for i in range(3)])
    together = vmap(lambda x: model(w, x, train))(x)
    for i in range(3):
        alone = model(w, x[i], train)
        close(together.logits[i], alone.logits)
        for name in alone.buffers:
            close(together.buffers[name][i], alone.buffers[name])


@pytest.mark.parametrize("case", ["convnet-batch", "convnet"])
def test_gradient_of_a_gradient_equals_finite_differences(case):
    """TOFU differentiates a gradient with respect to the images; central differences in float64 agree to O(h²)."""
    model = make(case)
    w, x = weights(model), images(model, 4)
    y, direction = torch.tensor([0, 1, 2, 0]), images(model, 4, "direction")

    def gradient_norm(x):
        g = grad(lambda w: cross_entropy(model(w, x, train=True).logits, y))(w)
        return sum(v.square().sum() for v in g.values())

    slope = (grad(gradient_norm)(x) * direction).sum()
    h = 1e-6
    expected = (gradient_norm(x + h * direction) - gradient_norm(x - h * direction)) / (2 * h)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch 2.11's own compiler calls what torch deprecates
def test_traces_into_one_graph():
    model = replace(make("resnet9"))  # a fresh object: what is computed once must not be computed inside the trace
    w, x = weights(model), images(model, 4)
    try:
        compiled = torch.compile(lambda w, x: model(w, x, train=True), backend="eager", fullgraph=True)
        out = compiled(w, x)
    finally:
        torch.compiler.reset()
    close(out.logits, model(w, x, train=True).logits)


def test_never_changes_its_weights():
    model = make("resnet9")
    w = weights(model)
    before = {name: tensor.clone() for name, tensor in w.items()}
    model(w, images(model, 4), train=True)
    assert w.keys() == before.keys()
    assert all(torch.equal(w[name], before[name]) for name in w)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SMALL)
def test_cut_at_any_layer_the_parts_join(case):
    model = make(case)
    w, x = weights(model), images(model, 2)
    whole = model(w, x)
    steps = bind_all(model.layers)
    for (layer, shape), step in zip(model.layer_shapes.items(), steps, strict=True):
        assert tuple(x.shape[1:]) == shape
        assert torch.equal(model(w, x, start=layer).logits, whole.logits)
        entered, x = x, step(w, x, None, None)
    assert layer == model.classifier
    assert torch.equal(entered, whole.features)
    assert torch.equal(x, whole.logits)
    assert torch.equal(model.head(w, whole.features), whole.logits)
    assert whole.features.shape == (2, model.feature_size)


def test_the_head_is_the_classifier():
    assert (model := build("cnn", (1, 28, 28), 10)).names_from(model.classifier) == {
        "classifier.weight",
        "classifier.bias",
    }


def test_unknown_layer_is_named():
    model = make("cnn")
    with pytest.raises(FedgistError, match=r"unknown layer of cnn 'conv_1'; did you mean 'conv1'"):
        model(weights(model), images(model, 1), start="conv_1")


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_init_has_torchs_default_distribution():
    """U(−b, b) with b = 1/√fan_in has variance b²/3; n draws estimate it with relative deviation √(4/5n)."""
    model = build("convnet", (3, 32, 32), 10, norm="batch")
    w = model.init(RNG("init"))
    assert {name: tuple(t.shape) for name, t in w.items()} == model.shapes
    assert list(w) == list(model.shapes)
    for name, fan_in in {"conv1": 27, "conv2": 1152, "conv3": 1152, "classifier": 2048}.items():
        bound = fan_in**-0.5
        for tensor in (w[f"{name}.weight"], w[f"{name}.bias"]):
            n = tensor.numel()
            assert tensor.abs().max() <= bound
            assert abs(tensor.mean()) < 5 * bound / (3 * n) ** 0.5
            assert abs(tensor.square().mean() / (bound**2 / 3) - 1) < 5 * (4 / (5 * n)) ** 0.5
    assert torch.equal(w["norm1.weight"], torch.ones(128))
    assert torch.equal(w["norm1.bias"], torch.zeros(128))
    assert torch.equal(w["norm1.running_mean"], torch.zeros(128))
    assert torch.equal(w["norm1.running_var"], torch.ones(128))


def test_ten_convolutions_without_norms_keep_the_size_of_a_signal():
    """He's initialisation of VGG13: with torch's, features of size 10⁻⁴ would come out, and no gradient back."""
    net = build("vgg13", (3, 32, 32), 10, width=32)
    w = net.init(RNG)
    features = net(w, RNG("signal").normal(16, 3, 32, 32)).features
    assert 0.3 < features.square().mean().sqrt() < 3
    assert not any(w[name].any() for name in w if name.startswith("conv") and name.endswith("bias"))


def test_init_is_a_function_of_its_rng_alone():
    model = make("resnet9")
    state = torch.get_rng_state()
    first, again, other = model.init(Rng(1)), model.init(Rng(1)), model.init(Rng(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "conv" in name or "fc" in name or "classifier" in name]
    assert all(not torch.equal(first[name], other[name]) for name in drawn)
    # every tensor has a stream of its own: another number of classes leaves the trunk as it is
    wider = build("resnet9", (1, 16, 16), 4, width=2, feature_size=5).init(Rng(1))
    assert all(torch.equal(first[name], wider[name]) for name in first if not name.startswith("classifier"))


@pytest.mark.parametrize("case", SMALL)
def test_images_in_pieces_are_the_images_together(case, monkeypatch):
    """Where nobody differentiates, images go through convolutions a few at a time; their vectors stay together."""
    monkeypatch.setattr(layered, "CACHED", 1)  # 2 · FEWEST = 8 images at once
    model, plain, seen = replace(make(case)), layered._run, []  # made anew, with that limit
    monkeypatch.setattr(layered, "_run", lambda steps, w, x, *rest: seen.append(len(x)) or plain(steps, w, x, *rest))
    w, x = weights(model), RNG("pieces").normal(21, *model.input_shape).double()
    together = model(w, x)
    assert seen == [21]
    with torch.no_grad():
        in_pieces = model(w, x)
        convolves = any(name.startswith("conv") for name, _ in model.layers)
        assert seen[1:] == ([7, 7, 7, 21] if convolves else [21])
        for whole in (lambda: model(w, x, train=True), lambda: model(w, x, tap=Tap()), lambda: model(w, x[:16])):
            seen.clear()
            whole()
            assert len(seen) == 1
    torch.testing.assert_close(in_pieces.features, together.features, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(in_pieces.logits, together.logits, rtol=1e-12, atol=1e-14)
