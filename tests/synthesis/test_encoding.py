"""Encoding an update as the gradient of images: Eqs. 1 to 3 against oracles, the two ends, sizes and efficiencies."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Scan, execute
from fedgist.learning.optimisers import SGD
from fedgist.synthesis import encoding
from fedgist.synthesis.encoding import OBJECTIVES, PARAMETRISATIONS, Encoder

SHAPE, CLASSES = (2, 8, 8), 4
EVERY = pytest.mark.parametrize("objective", OBJECTIVES)
BOTH = pytest.mark.parametrize("labels", PARAMETRISATIONS)


def net(name: str = "mlp", **options: Any) -> Any:
    return models.build(name, SHAPE, CLASSES, **(options or ({"hidden": (12,)} if name == "mlp" else {})))


def normal(like: Any, rng: Rng) -> Any:
    """A random tree of the same shapes, in float64."""
    return {name: rng(name).normal(*leaf.shape).double() for name, leaf in like.items()}


def truth(encoder: Encoder, w: Any, count: int = 3) -> tuple[Any, Any]:
    """Images, one-hot labels and weights that nobody fitted, and the update that is their gradient."""
    rng = Rng(5)
    weights = rng("weights").uniform(count).to(w["classifier.bias"])
    y = F.one_hot(rng("y").integers(CLASSES, count), CLASSES).to(weights)
    given = {"images": rng("x").normal(count, *SHAPE).to(weights), "labels": y, "weights": weights / weights.sum()}
    flat = encoder.synthetic(given, w)
    return given, unflatten(flat, w, encoder.names)


def unflatten(flat: Tensor, w: Any, names: list[str]) -> Any:
    parts = flat.split([w[name].numel() for name in names])
    return {name: part.view_as(w[name]) for name, part in zip(names, parts, strict=True)}


def fit(encoder: Encoder, w: Any, update: Any, count: int, iterations: int) -> Any:
    aim = encoder.aim(update)
    rates = {"lr": encoding.learning_rates(0.1, iterations)}
    work = Scan(encoder.step, encoder.init(encoder.start(Rng(1), count)), rates, (w, *aim))
    variables, _ = execute(work, Place())
    return variables, aim


@pytest.fixture(autouse=True)
def as_engines_run_it() -> Any:
    """Work runs without gradients; what needs one asks for it."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize(
    ("labels", "objective"), [("free", "layers"), ("softmax", "layers"), ("free", "global"), ("softmax", "decoded")]
)
def test_an_update_that_is_a_gradient_of_images_is_found_again(labels: str, objective: str) -> None:
    """A solution with cosine 1 exists, so the encoder must come near it, by layers and as a whole."""
    model = net()
    encoder, w = Encoder(model, labels=labels, objective=objective), model.init(Rng(0))
    _, update = truth(encoder, w, 2)
    variables, aim = fit(encoder, w, update, 2, 400)
    sent, cosine = encoder.finish(variables, w, *aim, torch.tensor(0.0))
    decoded = encoder.decode(sent, w)
    assert cosine > 0.99
    assert tree.dot(decoded, update) / (tree.norm(decoded) * tree.norm(update)) > 0.99
    torch.testing.assert_close(tree.norm(decoded), tree.norm(update), rtol=1e-4, atol=0)


@EVERY
@BOTH
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_gradient_of_the_reconstruction_loss_is_that_of_finite_differences(
    model: str, labels: str, objective: str
) -> None:
    """Double backward, BatchNorm (frozen) included. With one step of SGD at rate 1, v − step(v) is the gradient."""
    built = net(model)
    encoder = Encoder(built, labels=labels, objective=objective, optimiser=SGD())
    w = {name: tensor.double() for name, tensor in built.init(Rng(0)).items()}
    for name in built.buffers:  # statistics other than mean 0 and variance 1
        w[name] = w[name] + 0.1 * Rng(4)(name).uniform(*w[name].shape).double()
    aim = encoder.aim(normal({name: w[name] for name in encoder.names}, Rng(2)))
    v = {name: leaf.double() for name, leaf in encoder.start(Rng(1), 3).items()}
    after, _ = encoder.step(encoder.init(v), {"lr": torch.tensor(1.0, dtype=torch.float64)}, w, *aim)
    gradient, h = tree.sub(v, after), 1e-6
    for part in v:
        towards = {name: torch.zeros_like(leaf) for name, leaf in v.items()}
        towards[part] = Rng(3)(part).normal(*v[part].shape).double()
        ahead, behind = (encoder.reconstruction_loss(tree.add(v, tree.scale(towards, s)), w, *aim) for s in (h, -h))
        slope = (ahead - behind) / (2 * h)
        assert abs(slope) > 1e-6, part
        torch.testing.assert_close(tree.dot(gradient, towards), slope, rtol=1e-5, atol=1e-9)


def test_the_synthetic_update_is_the_weighted_sum_of_the_gradients_of_the_images() -> None:
    """Eq. 2, with torch's own cross-entropy of soft labels; each image alone, so frozen BatchNorm mixes nothing."""
    model = net("cnn")
    encoder, w = Encoder(model), {name: tensor.double() for name, tensor in model.init(Rng(0)).items()}
    given, update = truth(encoder, w)
    expected = {name: torch.zeros_like(update[name]) for name in update}
    for x, y, alpha in zip(given["images"], given["labels"], given["weights"], strict=True):
        trained = {name: w[name].clone().requires_grad_() for name in update}
        with torch.enable_grad():
            loss = F.cross_entropy(model({**w, **trained}, x[None]).logits, y[None])
            grads = torch.autograd.grad(loss, list(trained.values()))
        expected = {name: expected[name] + alpha * grad for name, grad in zip(trained, grads, strict=True)}
    torch.testing.assert_close(update, expected)


def test_cosines_against_their_definition() -> None:
    model = net("cnn")
    encoder, w = Encoder(model), model.init(Rng(0))
    like = {name: w[name] for name in encoder.names}
    real, other = normal(like, Rng(1)), normal(like, Rng(2))
    flat = torch.cat([other[name].flatten() for name in encoder.names])
    each, whole = encoder.cosines(flat, *encoder.aim(real))
    norms = encoder.aim(real)[1]

    def cosine(names: list[str]) -> Tensor:
        a, b = ({name: side[name] for name in names} for side in (real, other))
        return tree.dot(a, b) / (tree.norm(a) * tree.norm(b))

    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in encoder.names))
    by_layer = [[name for name in encoder.names if name.startswith(f"{layer}.")] for layer in layers]
    torch.testing.assert_close(each, torch.stack([cosine(names) for names in by_layer]))
    torch.testing.assert_close(whole, cosine(encoder.names))
    torch.testing.assert_close(norms, torch.stack([tree.norm([real[name] for name in names]) for names in by_layer]))
    assert encoder.layers == [sum(real[name].numel() for name in names) for names in by_layer]


def test_what_scaling_by_the_cosine_does() -> None:
    """Once every layer of U_syn has the norm of its layer of U_real, the cosine with U_real is Σ s² cos / Σ s².

    Norms times cosines (switch₁) make each layer the multiple of U_syn that is nearest to U_real, whose squared
    distance is s² (1 − cos²).
    """
    model = net()
    encoder, w = Encoder(model), {name: tensor.double() for name, tensor in model.init(Rng(0)).items()}
    real = normal({name: w[name] for name in encoder.names}, Rng(1))
    variables, aim = tree.map(lambda leaf: leaf.double(), encoder.start(Rng(2), 3)), encoder.aim(real)
    each, _ = encoder.cosines(encoder.synthetic(encoder.proxy(variables), w), *aim)
    plain, cosine = encoder.finish(variables, w, *aim, torch.tensor(0.0))
    decoded = encoder.decode(plain, w)
    torch.testing.assert_close(tree.dot(decoded, real) / tree.dot(real, real), cosine, rtol=1e-5, atol=1e-7)
    damped, same = encoder.finish(variables, w, *aim, torch.tensor(1.0))
    assert same == cosine
    positive = each.clamp_min(0)
    assert (positive > 0).any() and (positive < 1).all()
    rest = tree.sub(real, encoder.decode(damped, w))
    expected = (aim[1] ** 2 * (1 - positive**2)).sum()
    torch.testing.assert_close(tree.dot(rest, rest), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("pixels", [torch.float32, torch.float16, torch.uint8])
def test_both_ends_decode_the_same_bits(pixels: torch.dtype) -> None:
    """The sender decodes what it kept, the receiver what travelled: equal bit for bit, and a second time too."""
    model = net()
    encoder, w = Encoder(model, pixels=pixels), model.init(Rng(0))
    variables, aim = fit(encoder, w, truth(encoder, w)[1], 3, 5)
    sent, _ = encoder.finish(variables, w, *aim, torch.tensor(0.0))
    travelled = {
        name: field if field.dtype == torch.uint8 else field.to(pixels if name == "images" else torch.float32).float()
        for name, field in sent.items()
    }
    once, again, there = encoder.decode(sent, w), encoder.decode(sent, w), encoder.decode(travelled, w)
    assert storage.digest(once) == storage.digest(again) == storage.digest(there)
    coarse = tree.norm(tree.sub(once, Encoder(model).decode({**sent, "images": variables["images"]}, w)))
    assert (coarse == 0) == (pixels == torch.float32)
    assert coarse < 0.2 * tree.norm(once)


@BOTH
def test_weights_sum_to_one(labels: str) -> None:
    encoder = Encoder(net(), labels=labels)
    variables = normal(encoder.start(Rng(0), 5), Rng(1))
    proxy = encoder.proxy(variables)
    torch.testing.assert_close(proxy["weights"].sum(), torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(encoder.proxy(encoder.start(Rng(0), 5))["weights"], torch.full((5,), 0.2))
    if labels == "softmax":
        assert (proxy["weights"] > 0).all()
        torch.testing.assert_close(proxy["labels"].sum(1), torch.ones(5, dtype=torch.float64))


def test_a_sum_of_weights_that_passes_through_zero_turns_nothing_round() -> None:
    """Only directions are fitted: what U_syn is just before free weights sum to 0, it is just after, too."""
    model = net()
    encoder, w = Encoder(model), {name: tensor.double() for name, tensor in model.init(Rng(0)).items()}
    variables = normal(encoder.start(Rng(0), 5), Rng(1))
    balanced = variables["weights"] - variables["weights"].mean()

    def direction(weights: Tensor) -> Tensor:
        proxy = encoder.proxy({**variables, "weights": weights})
        torch.testing.assert_close(proxy["weights"].sum(), torch.tensor(1.0, dtype=torch.float64))
        return F.normalize(encoder.synthetic(proxy, w), dim=0)

    torch.testing.assert_close(direction(balanced + 1e-9), direction(balanced - 1e-9), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("prior", "shape", "sent"),
    [
        ("full", (3, 8, 6), (3, 8, 6)),
        ("grey", (3, 8, 6), (1, 8, 6)),
        ("half", (3, 8, 6), (3, 4, 3)),
        ("half", (1, 7, 5), (1, 4, 3)),
    ],
)
def test_priors(prior: str, shape: tuple[int, int, int], sent: tuple[int, int, int]) -> None:
    """Pixel (c, i, j) of what the network sees is pixel (c or 0, i or i/2, j or j/2) of what is sent."""
    assert encoding.sent_shape(shape, prior) == sent
    small = Rng(0).normal(2, *sent)
    seen = encoding.full_size(small, shape)
    assert seen.shape == (2, *shape)
    divide = 2 if prior == "half" else 1
    for c in range(shape[0]):
        for i in range(shape[1]):
            for j in range(shape[2]):
                source = small[:, 0 if prior == "grey" else c, i // divide, j // divide]
                assert torch.equal(seen[:, c, i, j], source)


@pytest.mark.parametrize("prior", ["grey", "half"])
def test_a_prior_is_fitted_and_decoded(prior: str) -> None:
    encoder = Encoder(net(), prior=prior)
    w = encoder.model.init(Rng(0))
    _, update = truth(encoder, w)
    start = encoder.finish(encoder.start(Rng(1), 6), w, *encoder.aim(update), torch.tensor(0.0))[1]
    variables, aim = fit(encoder, w, update, 6, 30)
    sent, cosine = encoder.finish(variables, w, *aim, torch.tensor(0.0))
    assert sent["images"].shape[1:] == encoder.shape != SHAPE
    assert cosine > start + 0.2


def test_learning_rates_fall_at_375_625_and_875() -> None:
    rates = encoding.learning_rates(0.1, 1000)
    falls = [i for i in range(1, 1000) if rates[i] != rates[i - 1]]
    assert falls == [375, 625, 875]
    expected = torch.tensor([1e-1, 1e-2, 1e-3, 1e-4], dtype=torch.float64)
    torch.testing.assert_close(rates[[0, 375, 625, 875]], expected)


def test_bytes_are_at_most_half_a_step_off() -> None:
    images = Rng(0).normal(4, *SHAPE)
    images[3] = 0.7  # a constant image has no range to divide
    quantised, ends = encoding.quantise(images)
    assert quantised.dtype == torch.uint8
    restored = encoding.restore(quantised, ends)
    half = (ends[:, 1] - ends[:, 0]).view(-1, 1, 1, 1) / 255 / 2
    assert ((restored - images).abs() <= half * 1.001 + 1e-6).all()
    assert (restored[:3] != images[:3]).any()
    assert torch.equal(restored[3], images[3])


@EVERY
def test_layers_without_update_and_nets_without_life_spoil_nothing(objective: str) -> None:
    """A zero layer decodes to zeros; where dead ReLUs stop every gradient but the classifier's bias, all is finite."""
    encoder = Encoder(net(), objective=objective)
    w = encoder.model.init(Rng(0))
    update = {name: w[name] * name.startswith("classifier") for name in encoder.names}
    variables, aim = fit(encoder, w, update, 2, 3)
    decoded = encoder.decode(encoder.finish(variables, w, *aim, torch.tensor(1.0))[0], w)
    assert all(decoded[name].count_nonzero() == 0 for name in decoded if name.startswith("fc1"))
    assert decoded["classifier.weight"].count_nonzero() > 0
    dead = {**w, "fc1.bias": torch.full_like(w["fc1.bias"], -1e3)}
    for target in (update, tree.zeros_like(update)):
        variables, aim = fit(encoder, dead, target, 2, 3)
        sent, cosine = encoder.finish(variables, dead, *aim, torch.tensor(0.0))
        everything = [*tree.leaves([variables, sent, encoder.decode(sent, dead)]), cosine]
        assert all(torch.isfinite(leaf).all() for leaf in everything)


def test_an_encoder_is_a_value() -> None:
    assert Encoder(net()) == Encoder(net())
    assert hash(Encoder(net())) == hash(Encoder(net()))
    assert Encoder(net()) != replace(Encoder(net()), objective="global")


def test_nothing_has_no_update() -> None:
    encoder = Encoder(net())
    w = encoder.model.init(Rng(0))
    assert all(part.count_nonzero() == 0 for part in encoder.decode(encoder.nothing(2), w).values())
    assert encoder.nothing(0)["images"].shape == (0, *SHAPE)
