"""Distribution matching: Eq. 9 and its gradient, the sphere, the batches, and that the real data enter in one place."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import models, storage
from fedgist.core import tree
from fedgist.core.rng import Rng
from fedgist.core.work import Pool, stacking
from fedgist.learning.optimisers import SGD
from fedgist.synthesis import matching
from fedgist.synthesis.augmentation import KINDS, Augmentation
from fedgist.synthesis.matching import (
    ClassBatches,
    Matcher,
    PaperNoise,
    class_means,
    embed,
    matching_loss,
    on_sphere,
    shares,
)

SHAPE, CLASSES, IPC = (1, 8, 8), 4, 2
NET = models.build("convnet", SHAPE, CLASSES, depth=2, width=4)


@pytest.fixture(autouse=True)
def as_engines_do() -> Iterator[None]:
    """Work runs without gradients; whoever needs one asks for it."""
    with torch.no_grad():
        yield


def problem(
    dtype: torch.dtype = torch.float64, batch: int = 5, even: bool = False, seed: int = 0, kinds: tuple[str, ...] = ()
) -> Any:
    """A client that holds classes 0, 1 and 3: its pool, batches, weights w_r, synthetic images, shares, one step."""
    rng = Rng(seed)
    x, y = rng("x").normal(24, *SHAPE).to(dtype), torch.tensor([0] * 9 + [1] * 3 + [3] * 12)
    held = [0, 1, 3]
    members = [(y == c).nonzero().flatten() for c in held]
    batches = ClassBatches(members, len(y), batch, even, Augmentation(kinds, SHAPE[1:]) if kinds else None)
    own = shares([IPC] * len(held), [IPC] * len(held)).to(dtype)
    images = rng("s").normal(len(held) * IPC, *SHAPE).to(dtype)
    w = tree.map(lambda leaf: leaf.to(dtype), NET.init(rng("w")))
    drawn = tree.index(batches.make(7, 0, 1), 0)
    return Pool(x=x, y=y), batches, w, images, (batches.shares.to(dtype), own), drawn


def by_hand(w: Any, x: Tensor, y: Tensor, images: Tensor) -> Tensor:
    """Eq. 9 as it is printed, class after class, with features and logits apart."""
    total = torch.zeros((), dtype=x.dtype)
    labels = torch.tensor([0, 1, 3]).repeat_interleave(IPC)
    for c in (0, 1, 3):
        real, made = NET(w, x[y == c]), NET(w, images[labels == c])
        total = total + (real.features.mean(0) - made.features.mean(0)).square().sum()
        total = total + (real.logits.mean(0) - made.logits.mean(0)).square().sum()
    return total


def matcher(**changes: Any) -> Matcher:
    return replace(Matcher(NET, 0.7, SGD(), 1.0), **changes)


def test_the_loss_is_equation_9() -> None:
    pool, _, w, images, (real, own), drawn = problem()
    x, y = pool["x"][drawn["real"]], pool["y"][drawn["real"]]
    loss = matching_loss(class_means(embed(NET, w, x), real), own @ embed(NET, w, images))
    torch.testing.assert_close(loss, by_hand(w, x, y, images), rtol=1e-12, atol=0)
    assert loss > 0.1


def test_with_running_statistics_a_step_goes_at_most_to_where_the_loss_as_a_line_is_zero() -> None:
    """x − x' = γ ∇L with γ = min(lr, L / ‖∇L‖²); the largest γ gives L − ⟨∇L, x − x'⟩ = 0."""
    pool, _, _, images, (real, own), drawn = problem()
    net = models.build("convnet", SHAPE, CLASSES, depth=2, width=4, norm="batch")
    w = tree.map(lambda leaf: leaf.double(), net.init(Rng(0)("w")))
    around = on_sphere(w, drawn["weights"], 0.7, net.buffers)
    target = class_means(embed(net, around, pool["x"][drawn["real"]]), real)
    with torch.enable_grad():
        x = images.clone().requires_grad_()
        loss = matching_loss(target, own @ embed(net, around, x))
        (grad,) = torch.autograd.grad(loss, x)
    furthest = loss / grad.square().sum()
    for lr, rate in ((1e9, furthest), (0.5 * furthest.item(), 0.5 * furthest)):
        bold = matcher(model=net, lr=lr)
        moved, _ = bold.step(bold.init(images), drawn, pool, w, real, own)
        torch.testing.assert_close(moved["x"], images - rate * grad, rtol=1e-9, atol=1e-12)


def test_a_step_goes_down_the_gradient_of_equation_9() -> None:
    """x − x' = lr · ∇L; ⟨∇L, v⟩ = (L(x + εv) − L(x − εv)) / 2ε + O(ε²), at the weights that the step drew."""
    pool, _, w, images, (real, own), drawn = problem()
    (moved, _) = matcher().step(matcher().init(images), drawn, pool, w, real, own)
    gradient = images - moved["x"]
    around = on_sphere(w, drawn["weights"], 0.7)
    x, y, step = pool["x"][drawn["real"]], pool["y"][drawn["real"]], 1e-6
    for i in range(5):
        v = Rng(i).normal(*images.shape).double()
        slope = (by_hand(around, x, y, images + step * v) - by_hand(around, x, y, images - step * v)) / (2 * step)
        torch.testing.assert_close((gradient * v).sum(), slope, rtol=1e-6, atol=1e-8)
        assert abs(slope) > 1e-3


def test_momentum_is_that_of_sgd() -> None:
    """With v ← μ v + g and x ← x − lr v, repeating a step from (x, v = g₀) moves by lr (μ g₀ + g)."""
    pool, _, w, images, (real, own), drawn = problem()
    heavy, plain = matcher(optimiser=SGD(0.5), lr=0.1), matcher(lr=0.1)
    first = heavy.step(heavy.init(images), drawn, pool, w, real, own)
    second = heavy.step(first, drawn, pool, w, real, own)
    alone = plain.step(plain.init(first[0]["x"]), drawn, pool, w, real, own)
    torch.testing.assert_close(second[0]["x"], alone[0]["x"] - 0.05 * first[1]["x"])


def test_real_images_in_place_of_synthetic_ones_have_no_loss() -> None:
    pool, _, w, _, _, _ = problem()
    members = [(pool["y"] == c).nonzero().flatten()[:IPC] for c in (0, 1, 3)]
    batches = ClassBatches(members, 24, batch=IPC)
    images = pool["x"][torch.cat(members)]
    own = shares([IPC] * 3, [IPC] * 3)
    drawn = tree.index(batches.make(0, 0, 1), 0)
    means = (share @ embed(NET, w, x) for share, x in ((batches.shares, pool["x"][drawn["real"]]), (own, images)))
    assert matching_loss(*means) < 1e-25
    (moved, _) = matcher().step(matcher().init(images), drawn, pool, w, batches.shares, own)
    torch.testing.assert_close(moved["x"], images, rtol=0, atol=1e-12)


def test_matching_brings_the_means_together() -> None:
    pool, batches, w, images, (real, own), _ = problem(batch=100)
    learner = matcher(lr=0.3, optimiser=SGD(0.5))
    carry = learner.init(images)
    plan = batches.make(1, 0, 60)
    for t in range(60):
        carry = learner.step(carry, tree.index(plan, t), pool, w, real, own)
    order = torch.cat(list(batches.members))
    target = real @ embed(NET, w, pool["x"][order])
    before, after = (matching_loss(target, own @ embed(NET, w, s)) for s in (images, carry[0]["x"]))
    assert after < 0.2 * before


def test_the_real_data_enter_only_through_class_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """With means that ignore the data, no step depends on it; and nobody records their forward pass for a gradient."""
    pool, _, w, images, (real, own), drawn = problem()
    seen = []

    def nothing(embeddings: Tensor, shares: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return torch.zeros(len(shares), embeddings.shape[1], dtype=embeddings.dtype)

    monkeypatch.setattr(matching, "class_means", nothing)
    blind = matcher()
    results = [
        blind.step(blind.init(images), drawn, Pool(x=x, y=pool["y"]), w, real, own)[0]["x"]
        for x in (pool["x"], -pool["x"])
    ]
    assert torch.equal(*results)
    assert not torch.equal(results[0], images)
    assert seen == [False] * 2


def test_even_shapes_change_nothing() -> None:
    """Places for samples that a class does not have weigh nothing."""
    for batch in (5, 20):
        carries = []
        for even in (False, True):
            pool, batches, w, images, (real, own), _ = problem(batch=batch, even=even)
            learner = matcher(optimiser=SGD(0.5))
            carry, plan = learner.init(images), batches.make(3, 0, 3)
            for t in range(3):
                carry = learner.step(carry, tree.index(plan, t), pool, w, real, own)
            carries.append(carry[0]["x"])
            if even:
                assert plan["real"].shape == (3, 3 * batch)
        torch.testing.assert_close(carries[0], carries[1], rtol=1e-10, atol=1e-12)


def test_stacked_clients_get_what_each_gets_alone() -> None:
    problems = [problem(even=True, seed=seed, kinds=("crop", "cutout", "rotate")) for seed in (0, 1)]
    learner = matcher(optimiser=SGD(0.5))
    inputs = [(learner.init(p[3]), p[5], dict(p[0]), p[2], *p[4]) for p in problems]
    alone = [learner.step(*each) for each in inputs]
    with stacking():
        together = torch.vmap(learner.step)(*tree.stack(inputs))
    for i, each in enumerate(alone):
        torch.testing.assert_close(tree.index(together, i), each, rtol=1e-10, atol=1e-12)


def test_images_stay_in_their_box() -> None:
    pool, _, w, images, (real, own), drawn = problem()
    box = torch.tensor([-0.5, 0.8]).double().view(2, 1, 1, 1)
    free, held = (matcher().step(matcher().init(images), drawn, pool, w, real, own, *given) for given in ([], [box]))
    torch.testing.assert_close(held[0]["x"], free[0]["x"].clamp(-0.5, 0.8))
    assert not torch.equal(held[0]["x"], free[0]["x"])


def test_the_sphere_is_the_same_for_one_client_and_for_many() -> None:
    w = {"a": torch.ones(2, 3).double(), "b": torch.zeros(4).double()}
    seeds = Rng(4).seeds(3)
    with stacking():
        together = torch.vmap(lambda seed: on_sphere(w, seed, 1.5))(seeds)
    for i, seed in enumerate(seeds):
        torch.testing.assert_close(tree.index(together, i), on_sphere(w, seed, 1.5))


def test_the_sphere_has_its_radius_and_no_direction() -> None:
    """Uniform on the sphere in d dimensions: E u = 0, E uuᵀ = (ρ²/d) I and E u₁⁴ = 3ρ⁴ / d(d + 2).

    Bounds: five standard errors, from the sample itself.
    """
    w = {"a.weight": torch.ones(2, 2).double(), "a.bias": torch.zeros(1).double(), "statistics": torch.ones(3)}
    draws, rho, d = 20_000, 2.5, 5
    with stacking():
        one = torch.vmap(lambda seed: on_sphere(w, seed, rho, frozenset({"statistics"})))(Rng(0).seeds(draws))
    assert torch.equal(one["statistics"], w["statistics"].expand(draws, 3))
    moved = torch.cat([(one[name] - w[name]).flatten(1) for name in ("a.weight", "a.bias")], 1)
    torch.testing.assert_close(moved.norm(dim=1), torch.full((draws,), rho).double(), rtol=1e-12, atol=0)
    moments = torch.einsum("ni,nj->nij", moved, moved)
    expected = torch.eye(d).double() * rho**2 / d
    fourth = moved[:, 0] ** 4
    for found, wanted in ((moved, 0.0), (moments, expected), (fourth, 3 * rho**4 / (d * (d + 2)))):
        error = (found.mean(0) - wanted).abs() / (found.std(0) / draws**0.5)
        assert error.max() < 5


def test_in_high_dimension_the_clipped_gaussian_is_that_sphere() -> None:
    """Clip(N(w_r, 1), ρ) (Eq. 24) leaves a draw alone only if ‖g‖ ≤ ρ; with d ≫ ρ² that does not happen."""
    d, rho = 317_706, 5.0
    norms = Rng(0).normal(20, d).norm(dim=1)
    assert (norms - d**0.5).abs().max() < 5  # the norm's deviation is about 0.7 in any dimension
    assert norms.min() > 100 * rho


def test_batches_are_drawn_without_replacement_from_their_class() -> None:
    y = torch.tensor([0] * 30 + [1] * 4)
    members = [(y == c).nonzero().flatten() for c in (0, 1)]
    batches = ClassBatches(members, 34, batch=10)
    plan = batches.make(5, 0, 600)
    assert plan["real"].shape == (600, 14)
    first, second = plan["real"].split((10, 4), dim=1)
    assert all(len(set(row)) == 10 and set(row) <= set(range(30)) for row in first.tolist())
    assert all(sorted(row) == [30, 31, 32, 33] for row in second.tolist())
    # each of 30 samples is in a batch of 10 with probability 1/3: 200 ± 11.5 times in 600, and 5 deviations are allowed
    assert (first.flatten().bincount(minlength=30) - 200).abs().max() < 58
    torch.testing.assert_close(batches.shares.sum(1), torch.ones(2).double())
    assert batches.shares[0, :10].unique().tolist() == [0.1] and not batches.shares[0, 10:].any()


def test_batches_do_not_depend_on_how_they_are_cut() -> None:
    _, batches, *_ = problem(kinds=("crop", "cutout"))
    whole = batches.make(9, 0, 7)
    parts = [batches.make(9, 0, 3), batches.make(9, 3, 4)]
    assert storage.digest(whole) == storage.digest(tree.map(lambda *leaves: torch.cat(leaves), *parts))
    assert storage.digest(whole) != storage.digest(batches.make(10, 0, 7))
    assert len({int(seed) for name in ("weights", "noise") for seed in whole[name]}) == 14
    assert len(whole["change"].unique(dim=0)) == 7


def test_real_and_synthetic_images_are_changed_alike() -> None:
    """Synthetic images that are the real ones stay where they are, whatever the change; others move."""
    pool, batches, w, _, (real, _), _ = problem(kinds=KINDS, batch=IPC)
    for t in range(6):
        drawn = tree.index(batches.make(2, t, 1), 0)
        images = pool["x"][drawn["real"]]
        (moved, _) = matcher().step(matcher().init(images), drawn, pool, w, real, real)
        torch.testing.assert_close(moved["x"], images, rtol=0, atol=1e-12)
        (plain, _) = matcher().step(matcher().init(-images), drawn, pool, w, real, real)
        assert not torch.allclose(plain["x"], -images)


def moves(device: str, *precisions: str) -> list[Tensor]:
    """How far one step moves the images, in each precision."""
    pool, _, w, images, (real, own), drawn = tree.to(problem(torch.float32), device)
    start = matcher().init(images)
    return [images - matcher(precision=each).step(start, drawn, pool, w, real, own)[0]["x"] for each in precisions]


def test_bfloat16_stays_near_float32() -> None:
    """bfloat16 keeps 8 bits, a relative error of 2⁻⁹ a rounding; through six layers and a difference of means, 10 %."""
    exact, rough = moves("cpu", "float32", "bfloat16")
    assert rough.dtype == torch.float32
    assert 1e-4 < (rough - exact).norm() / exact.norm() < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float16_stays_nearer_to_float32() -> None:
    """It keeps 11 bits, and only real images are rounded."""
    exact, rough = moves("cuda", "float32", "float16")
    assert rough.dtype == torch.float32
    assert 1e-4 < (rough - exact).norm() / exact.norm() < 0.01


def test_float16_is_for_gpus() -> None:
    assert torch.equal(*moves("cpu", "float32", "float16"))


def test_the_paper_s_noise_clips_classes_as_a_whole_and_divides_noise_by_their_batches() -> None:
    """Two classes of two images: one gradient is shortened to C, the other stays; deviations are σC/4 and σC/2."""
    shares = torch.tensor([[0.25] * 4 + [0.0] * 2, [0.0] * 4 + [0.5] * 2])
    grads = torch.cat([torch.full((2, 1, 8, 8), 3.0), torch.full((2, 1, 8, 8), 0.01)])
    found = PaperNoise(0.0, 5.0)(grads, shares, torch.tensor(1))
    assert found[:2].norm().item() == pytest.approx(5.0)
    assert torch.equal(found[2:], grads[2:])
    moved = torch.stack([PaperNoise(2.0, 5.0)(grads, shares, torch.tensor(seed)) - found for seed in range(50)])
    assert [part.std().item() for part in moved.split(2, 1)] == pytest.approx([2.5, 5.0], rel=0.05)
