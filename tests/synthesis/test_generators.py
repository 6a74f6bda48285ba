"""The conditional generator and its training, against numpy oracles."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedgist import models
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Place, Scan, execute, stacking
from fedgist.learning.optimisers import SGD, Adam
from fedgist.synthesis.generators import Generator, GeneratorTrainer, diversity_loss

RNG = Rng(0)
SMALL = Generator(classes=3, latent=(4,), noise=2, hidden=5)


def doubles(w: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in w.items()}


@pytest.mark.parametrize(
    ("classes", "hidden", "size"),
    [(10, 256, 19_744), (26, 256, 23_840), (2, 128, 8_864)],
    ids=["MNIST", "EMNIST", "CelebA"],
)
def test_sizes_of_the_released_generators(classes: int, hidden: int, size: int) -> None:
    """(d + C)·h + h for the first layer, 2h for BatchNorm, 32h + 32 for the last."""
    generator = Generator(classes, (32,), 32, hidden)
    weights = [shape for name, shape in generator.shapes.items() if name not in generator.buffers]
    assert sum(int(np.prod(shape)) for shape in weights) == size
    assert sum(int(np.prod(generator.shapes[name])) for name in generator.buffers) == 2 * hidden


@pytest.mark.parametrize("train", [True, False])
def test_the_generator_is_the_paper_s_mlp(train: bool) -> None:
    """z = W₂ relu(BN(W₁ [ε; onehot(y)] + b₁)) + b₂, BN by the batch in train mode, by its running statistics else.

    New statistics are 0.9 of the old and 0.1 of the batch's mean and unbiased variance.
    """
    w = doubles(SMALL.init(RNG))
    w |= {name: RNG(name).uniform(*w[name].shape).double() + 0.5 for name in w if name.startswith("norm")}
    y, noise = torch.tensor([0, 2, 2, 1]), RNG("noise").normal(4, 2).double()
    z, new = SMALL(w, y, noise, train=train)

    n = {name: tensor.numpy() for name, tensor in w.items()}
    inputs = np.concatenate([noise.numpy(), np.eye(3)[y]], 1)
    hidden = inputs @ n["fc1.weight"].T + n["fc1.bias"]
    mean, variance = (hidden.mean(0), hidden.var(0)) if train else (n["norm1.running_mean"], n["norm1.running_var"])
    normed = (hidden - mean) / np.sqrt(variance + 1e-5) * n["norm1.weight"] + n["norm1.bias"]
    expected = np.maximum(normed, 0) @ n["classifier.weight"].T + n["classifier.bias"]
    np.testing.assert_allclose(z, expected, rtol=1e-9)
    assert new.keys() == (SMALL.buffers if train else set())
    if train:
        np.testing.assert_allclose(new["norm1.running_mean"], 0.9 * n["norm1.running_mean"] + 0.1 * mean)
        unbiased = hidden.var(0, ddof=1)
        np.testing.assert_allclose(new["norm1.running_var"], 0.9 * n["norm1.running_var"] + 0.1 * unbiased)


def test_sampling_has_the_shape_of_its_labels_and_of_the_latent_layer() -> None:
    generator = Generator(classes=3, latent=(2, 5, 5), noise=4, hidden=6)
    w, y, noise = generator.init(RNG), RNG("y").integers(3, 7, 2), RNG("noise").uniform(7, 2, 4)
    z = generator.sample(w, y, noise)
    assert z.shape == (7, 2, 2, 5, 5)
    alone, _ = generator(w, y[3], noise[3])
    assert torch.allclose(z[3], alone, atol=1e-6)


def test_diversity_loss_is_its_formula() -> None:
    """exp(mean over all pairs, i = j too, of −mean_d (ε_i − ε_j)² · mean_d |z_i − z_j|)."""
    noise, z = RNG("noise").normal(5, 3).double(), RNG("z").normal(5, 2, 2).double()
    total = 0.0
    for i in range(5):
        for j in range(5):
            apart = np.mean((noise[i].numpy() - noise[j].numpy()) ** 2)
            total -= apart * np.mean(np.abs(z[i].numpy() - z[j].numpy()))
    assert diversity_loss(noise, z).item() == pytest.approx(np.exp(total / 25), rel=1e-12)
    assert torch.autograd.gradcheck(lambda z: diversity_loss(noise, z), (z.requires_grad_(),))


def test_diversity_loss_falls_as_latents_spread() -> None:
    """Equal latents lose 1, the most there is; the wider they spread, the less."""
    noise, z = RNG("noise").normal(6, 3), RNG("z").normal(6, 4)
    losses = [diversity_loss(noise, factor * z).item() for factor in (0.0, 1.0, 5.0)]
    assert losses[0] == 1.0
    assert losses[0] > losses[1] > losses[2] > 0


def heads(users: int, latent: int, classes: int) -> Any:
    model = models.build("mlp", (1, 1, latent), classes, hidden=())
    drawn = [
        {name: RNG("head", k, name).normal(*model.shapes[name]) for name in model.names_from(model.classifier)}
        for k in range(users)
    ]
    return model, drawn


@pytest.mark.parametrize("loss", ["paper", "code"])
def test_one_step_descends_the_loss_of_all_heads(loss: str) -> None:
    """The stacked step equals plain gradient descent on the loss written as a loop over users.

    code: Σ_k mean_i ω_{k,y_i} CE(g_k(z_i), y_i) + η L_div; paper: CE(1/K Σ_k g_k(z_i), y_i) + η L_div.
    """
    model, users = heads(3, 4, 3)
    users = [doubles(user) for user in users]
    w, weights = doubles(SMALL.init(RNG)), RNG("weights").uniform(3, 3).double()
    y, noise = RNG("y").integers(3, 6), RNG("noise").normal(6, 2).double()
    trainer = GeneratorTrainer(SMALL, model, "classifier", SGD(), loss, diversity=0.7)
    (new, _) = execute(
        Scan(
            trainer.step,
            (w, trainer.init(w)),
            {"y": y[None], "noise": noise[None]},
            (tree.stack(users), weights, torch.tensor(0.1, dtype=torch.float64)),
        ),
        Place(dtype=torch.float64),
    )

    variables = {name: tensor.clone().requires_grad_(name not in SMALL.buffers) for name, tensor in w.items()}
    z, statistics = SMALL(variables, y, noise, train=True)
    said = [z @ user["classifier.weight"].T + user["classifier.bias"] for user in users]
    if loss == "paper":
        teaching = -(sum(said) / 3).log_softmax(1)[range(6), y].mean()
    else:
        logs = [logits.log_softmax(1)[range(6), y] for logits in said]
        teaching = sum((-weights[k, y] * logs[k]).mean() for k in range(3))
    (teaching + 0.7 * diversity_loss(noise, z)).backward()
    for name, tensor in new.items():
        expected = statistics[name] if name in SMALL.buffers else w[name] - 0.1 * variables[name].grad
        assert torch.allclose(tensor, expected.detach(), rtol=1e-9, atol=1e-12), name


def test_the_step_is_the_same_under_vmap() -> None:
    """Several seeds of a run may be stacked: two generators in one vmapped step are the two steps alone."""
    model, users = heads(3, 4, 3)
    trainer = GeneratorTrainer(SMALL, model, "classifier", Adam(weight_decay=0.01))
    weights, lr = torch.full((3, 3), 1 / 3), torch.tensor(0.01)
    carries = [(w, trainer.init(w)) for w in (SMALL.init(RNG(k)) for k in range(2))]
    batches = [{"y": RNG("y", k).integers(3, 6), "noise": RNG("noise", k).uniform(6, 2)} for k in range(2)]
    with torch.no_grad():
        alone = [trainer.step(*pair, tree.stack(users), weights, lr) for pair in zip(carries, batches, strict=True)]
    with torch.no_grad(), stacking():
        both = torch.func.vmap(lambda c, b: trainer.step(c, b, tree.stack(users), weights, lr))(
            tree.stack(carries), tree.stack(batches)
        )
    for k in range(2):
        for one, other in zip(tree.leaves(alone[k]), tree.leaves(tree.index(both, k)), strict=True):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["paper", "code"])
def test_what_is_generated_agrees_with_the_ensemble(loss: str) -> None:
    """After training, the users together give generated latents the labels they were made for; before, they do not."""
    model, users = heads(4, 8, 5)
    generator = Generator(classes=5, latent=(8,), noise=8, hidden=32)
    trainer = GeneratorTrainer(generator, model, "classifier", Adam(), loss)
    w, steps = generator.init(RNG), 150
    batches = {"y": RNG("y").integers(5, steps, 32), "noise": RNG("noise").uniform(steps, 32, 8)}
    consts = (tree.stack(users), torch.full((4, 5), 0.25), torch.tensor(0.01))
    trained, _ = execute(Scan(trainer.step, (w, trainer.init(w)), batches, consts), Place())
    y, noise = RNG("new y").integers(5, 200), RNG("new noise").uniform(200, 8)

    def agreement(w: dict[str, Tensor]) -> float:
        z = generator.sample(w, y, noise)
        said = torch.stack([model.head(user, z) for user in users]).mean(0)
        return float((said.argmax(1) == y).float().mean())

    assert agreement(w) < 0.5
    assert agreement(trained) > 0.95
