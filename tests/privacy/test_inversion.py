"""Gradient inversion: it finds an image in its gradient, labels in a batch's, and knows local steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedgist import models
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.families.local_training import LocalOptions, trainer
from fedgist.models import from_module
from fedgist.privacy import similarity
from fedgist.privacy.inversion import Attack, Training, cosine, recover_labels, total_variation

LOW, HIGH = torch.zeros(1), torch.ones(1)


def plan(count, batch=None):
    index = torch.arange(count).view(-1, batch or count)
    return {"index": index, "mask": torch.ones(index.shape)}


def smooth_net():
    """A net with sigmoids, which DLG asks for: its gradient is smooth in the image."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Flatten(), nn.Linear(6 * 64, 12), nn.Linear(12, 4)]
    conv, flatten, hidden, last = layers
    net = nn.Sequential(conv, nn.Sigmoid(), flatten, hidden, nn.Sigmoid(), last)
    return from_module(net, (1, 8, 8), 4)


def digit():
    """A one: two bright columns, with a foot."""
    image = torch.zeros(1, 1, 8, 8)
    image[..., 1:7, 3:5] = 0.9
    image[..., 6, 2:6] = 0.6
    return image


@pytest.mark.parametrize(
    ("attack", "model"),
    [
        (Attack("cosine", iterations=200, tv=1e-3), models.build("mlp", (1, 8, 8), 4, hidden=(24,))),
        (Attack("dlg", iterations=60), smooth_net()),
        (Attack("dlg", labels="optimised", iterations=60), smooth_net()),
    ],
    ids=["cosine", "dlg", "dlg, labels optimised"],
)
def test_one_image_is_found_in_its_gradient(attack, model):
    w, x, y = model.init(Rng(4)), digit(), torch.tensor([2])
    training = Training(trainer(LocalOptions(), model), 0.1, plan(1))
    with torch.no_grad():
        update = training.update(w, x, y)
    found = attack(training, w, update, LOW, HIGH, Rng(0))
    assert similarity.psnr(found.x, x).item() > 25
    assert found.cosine > 0.99
    assert found.y.tolist() == [2]
    assert found.x.min() >= 0 and found.x.max() <= 1


def test_the_update_of_one_step_is_the_gradient():
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    w, x, y = model.init(Rng(0)), Rng(1).uniform(3, 1, 8, 8), torch.tensor([0, 3, 1])
    with torch.no_grad():
        update = Training(trainer(LocalOptions(), model), 0.5, plan(3)).update(w, x, y)
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    F.cross_entropy(model(leaves, x).logits, y).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(update[name], leaf.grad, rtol=1e-5, atol=1e-6)
    soft = F.one_hot(y, 4).float()
    with torch.no_grad():
        same = Training(trainer(LocalOptions(), model), 0.5, plan(3)).update(w, x, soft)
    assert cosine(same, update).item() == pytest.approx(1, abs=1e-6)


def test_local_steps_are_repeated_as_the_client_takes_them():
    """Two steps with momentum, by torch.optim; and the derivative with respect to the images goes through both."""
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    w, x, y = model.init(Rng(0)), Rng(1).uniform(4, 1, 8, 8).double(), torch.tensor([0, 3, 1, 1])
    w = {name: value.double() for name, value in w.items()}
    training = Training(trainer(LocalOptions(momentum=0.9), model), 0.5, plan(4, 2))
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    optimiser = torch.optim.SGD(leaves.values(), lr=0.5, momentum=0.9)
    for part in (slice(0, 2), slice(2, 4)):
        optimiser.zero_grad()
        F.cross_entropy(model(leaves, x[part]).logits, y[part]).backward()
        optimiser.step()
    with torch.no_grad():
        update = training.update(w, x, y)
    for name, leaf in leaves.items():
        torch.testing.assert_close(0.5 * update[name], w[name] - leaf.detach())
    moved = x.clone().requires_grad_()
    slope = torch.autograd.grad(cosine(training.update(w, moved, y), w), moved)[0][0, 0, 3, 3]
    step = torch.zeros_like(x)
    step[0, 0, 3, 3] = 1e-6
    with torch.no_grad():
        ends = [cosine(training.update(w, x + sign * step, y), w) for sign in (1, -1)]
    assert slope.item() == pytest.approx((ends[0] - ends[1]).item() / 2e-6, rel=1e-4)
    assert abs(slope) > 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_one_step_goes_as_far_as_small_steps_together(momentum):
    """At a tiny rate the gradient hardly changes on the way, so what the steps do is what one step would do."""
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    w = {name: value.double() for name, value in model.init(Rng(0)).items()}
    x, y = Rng(1).uniform(1, 1, 8, 8).double().expand(3, -1, -1, -1), torch.tensor([2, 2, 2])
    steps = Training(trainer(LocalOptions(momentum=momentum), model), 1e-5, plan(3, 1))
    one = steps.as_one_step(momentum)
    assert one.count == steps.count == 3
    with torch.no_grad():
        small, large = tree.scale(steps.update(w, x, y), steps.lr), tree.scale(one.update(w, x, y), one.lr)
    assert tree.norm(tree.sub(small, large)) < 1e-3 * tree.norm(large)


@pytest.mark.parametrize("labels", [[7], [1, 5, 8, 9], [3, 3, 3, 3], [0, 0, 2, 2, 2, 9]], ids=str)
def test_labels_are_recovered(labels):
    """At fresh weights, where predictions are about uniform, from the classifier's biases alone."""
    model = models.build("lenet5", (1, 28, 28), 10)
    w, x, y = model.init(Rng(0)), Rng(1).uniform(len(labels), 1, 28, 28), torch.tensor(labels)
    training = Training(trainer(LocalOptions(), model), 0.1, plan(len(labels)))
    with torch.no_grad():
        update = training.update(w, x, y)
    assert recover_labels(model, update, len(labels)).tolist() == labels


def test_more_classes_pull_than_there_are_images():
    """A decoded update may be no gradient of any batch: the strongest pull wins."""
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    update = {"classifier.bias": torch.tensor([-0.1, 0.5, -0.3, -0.2])}
    assert recover_labels(model, update, 1).tolist() == [2]
    assert recover_labels(model, update, 2).tolist() == [2, 3]


def test_the_pull_of_one_image():
    """Wainakh et al. 2022: (1 + 1/C) Σ_c min(g_c, 0) / n, which is −0.3125 for g = (−0.64, −0.36, …), C = n = 4.

    Without each one's first image the two classes pull by −0.3275 and −0.0475, then by −0.015 and −0.0475. A pull of
    −0.25, without the first factor, would give class 0 the last image.
    """
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    update = {"classifier.bias": torch.tensor([-0.64, -0.36, 0.5, 0.5])}
    assert recover_labels(model, update, 4).tolist() == [0, 0, 1, 1]


def test_more_restarts_never_fit_worse():
    model = models.build("mlp", (1, 8, 8), 4, hidden=(6,))
    w, y = model.init(Rng(0)), torch.tensor([2, 1])
    training = Training(trainer(LocalOptions(), model), 0.1, plan(2))
    with torch.no_grad():
        update = training.update(w, Rng(1).uniform(2, 1, 8, 8), y)
    fits = [Attack(iterations=10, restarts=n)(training, w, update, LOW, HIGH, Rng(0)).cosine for n in (1, 3)]
    assert fits[1] >= fits[0]


def test_total_variation_of_a_known_image():
    """A ramp of slope 0.5 down and 0 across."""
    ramp = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 3) / 2
    assert total_variation(ramp).item() == pytest.approx(0.5)
