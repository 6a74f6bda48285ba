"""DP-SGD: whose gradients are clipped, what noise they get, which batches; and an audit that finds planted faults."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from auditing import least_mu
from fedgist import models
from fedgist.core.rng import Rng
from fedgist.dp.randomness import secret, simulated
from fedgist.dp.releases import grid
from fedgist.learning.optimisers import SGD
from fedgist.learning.private_training import PrivateTrainer, gradients, poisson

MODEL = models.build("mlp", (1, 4, 4), 3, hidden=(5,))
W = MODEL.init(Rng(0))
X, Y = Rng(1)("x").normal(6, 1, 4, 4), Rng(1)("y").integers(3, 6)
C, SIGMA, N = 0.5, 0.8, 20_000
TRAINER = PrivateTrainer(MODEL, SGD(), C, SIGMA, batch=4)


def total(x: Tensor, y: Tensor, limit: float = C) -> dict[str, Tensor]:
    return gradients(MODEL, W, x, y).clipped_sum(torch.ones(len(y)), limit)


def norm(tensors: dict[str, Tensor]) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def with_record(record: Tensor, label: int) -> tuple[Tensor, Tensor]:
    return torch.cat([X, record[None]]), torch.cat([Y, torch.tensor([label])])


def test_a_step_is_the_algorithm_written_out() -> None:
    """One autograd call for each record, in float64: clip, sum, noise, division; masked ones left out."""
    w = {name: value.double().requires_grad_() for name, value in W.items()}
    pool, index, mask = {"x": X.double(), "y": Y}, torch.tensor([0, 3, 5, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    expected = {name: torch.zeros_like(value) for name, value in w.items()}
    for i in index[:3].tolist():
        loss = F.cross_entropy(MODEL(w, pool["x"][i : i + 1]).logits, Y[i : i + 1])
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))
        for name, grad in grads.items():
            expected[name] += grad * min(1.0, C / norm(grads))
    seed = torch.tensor(77)
    batch = {"index": index, "mask": mask.double(), "seed": seed}
    plain = {name: value.detach() for name, value in w.items()}
    after, _ = TRAINER.step((plain, {}), batch, pool, torch.tensor(0.25).double())
    for name, value in TRAINER.noised(expected, batch).items():
        torch.testing.assert_close(after[name], plain[name] - 0.25 * value / 4, rtol=1e-5, atol=1e-6)


PIXELS = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(deadline=None, max_examples=40)
@given(st.lists(PIXELS, min_size=16, max_size=16), st.integers(0, 2), st.sampled_from([1.0, 1e-30, 1e3, 1e30]))
def test_no_record_moves_a_sum_by_more_than_the_clip(pixels: list[float], label: int, scale: float) -> None:
    record = torch.tensor(pixels).view(1, 4, 4) * scale
    before, after = total(X, Y), total(*with_record(record, label))
    assert norm({name: after[name] - before[name] for name in after}) <= C


def test_no_weights_make_a_gradient_too_small_to_be_clipped() -> None:
    """Features of 1e18 and a logit 55 above the others, which a server may choose: b is about e^-55, whose square is 0
    in float32, and ‖b aᵀ‖ = √2 · 1.3e-24 · √5 · 1e18 = 4.1e-6 would count for all of itself under a clip of 1e-6."""
    chosen = {name: torch.zeros_like(value) for name, value in W.items()}
    chosen |= {"fc1.bias": torch.full((5,), 1e18), "classifier.bias": torch.tensor([55.0, 0.0, 0.0])}
    found = gradients(MODEL, chosen, X[:1], torch.zeros(1, dtype=torch.int64))
    ones = torch.ones(1)
    assert norm(found.clipped_sum(ones, 1.0)) == pytest.approx(4.1e-6, rel=0.01)
    assert norm(found.clipped_sum(ones, 1e-6)) <= 1e-6


def test_an_outlier_counts_for_all_of_the_clip() -> None:
    """So that the bound above is not kept by nothing."""
    before, after = total(X, Y), total(*with_record(torch.full((1, 4, 4), 50.0), 0))
    assert norm({name: after[name] - before[name] for name in after}) == pytest.approx(C, rel=1e-4)


def draws(value: dict[str, Tensor], sigma: float = SIGMA) -> dict[str, Tensor]:
    """N noised releases of a sum."""
    trainer = PrivateTrainer(MODEL, SGD(), C, sigma, batch=4)
    return torch.func.vmap(lambda seed: trainer.noised(value, {"seed": seed}))(Rng(5).seeds(N))


def test_the_noise_has_the_deviation_that_is_charged() -> None:
    zeros = {"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, 2, dtype=torch.float64)}
    for noise in draws(zeros).values():
        spread = (noise / (SIGMA * C)).square().sum().item()
        assert 1e-6 < stats.chi2.cdf(spread, noise.numel()) < 1 - 1e-6


@pytest.mark.parametrize("net", ["mlp", "lenet5"])
def test_ghost_norms_are_norms(net: str) -> None:
    """Products of two norms instead of a gradient for each record: norms and clipped sums as one autograd call each."""
    shape = (1, 4, 4) if net == "mlp" else (1, 16, 16)
    model = models.build(net, shape, 3, **({"hidden": (6, 5)} if net == "mlp" else {}))
    w = {name: value.double() for name, value in model.init(Rng(0)).items()}
    x, y = Rng(2)("x").normal(4, *shape).double(), Rng(2)("y").integers(3, 4)
    found = gradients(model, w, x, y)
    # Norms are rounded in the order of the layers, which must not be that of Python's hashes in this process.
    assert model.linear == (*[f"fc{n}" for n in range(1, len(model.linear))], "classifier")
    assert list(found.entering) == list(model.linear) and len(model.linear) >= 3
    expected = {name: torch.zeros_like(value) for name, value in w.items()}
    for i in range(4):
        leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
        loss = F.cross_entropy(model(leaves, x[i : i + 1], train=True).logits, y[i : i + 1])
        one = dict(zip(w, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        assert found.squares()[i].sqrt().item() == pytest.approx(norm(one), rel=1e-9)
        for name, grad in one.items():
            expected[name] += grad * min(1.0, C / norm(one))
    for name, value in found.clipped_sum(torch.ones(4), C).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-7)


def test_the_noise_of_a_site_is_on_a_grid_and_has_the_deviation_that_is_charged() -> None:
    """Integers of ChaCha20: at least σC, by no more than what rounding needs; all sums leave on the grid."""
    step, deviation = grid(SIGMA * C, C, MODEL.size)
    assert 1 <= step * deviation / (SIGMA * C) < 1 + 1e-4
    drawn = TRAINER.draw(200, secret()).double()
    assert drawn.shape == (200, MODEL.size)
    assert 1e-6 < stats.chi2.cdf((drawn / deviation).square().sum().item(), drawn.numel()) < 1 - 1e-6
    released = TRAINER.noised({name: value.double() / 3 for name, value in W.items()}, {"noise": drawn[0].int()})
    for value in released.values():
        assert torch.equal((value / step).round(), value / step)


def audited(limit: float = C, sigma: float = SIGMA) -> float:
    """The μ of a step on everything, at least: how well N releases tell whether an outlier was there."""
    with_it, without = total(*with_record(torch.full((1, 4, 4), 50.0), 0), limit), total(X, Y, limit)
    moved = torch.cat([(with_it[name] - without[name]).flatten() for name in without])
    unit = moved / torch.linalg.vector_norm(moved)
    scores = []
    for world in (without, with_it):
        clean = torch.cat([value.flatten() for value in world.values()]) @ unit
        scores.append(draws({"score": clean[None].double()}, sigma)["score"].flatten())
    return least_mu(scores[0], scores[1].flip(0))  # not the same seeds in both worlds, draw by draw


def test_the_audit_finds_all_that_was_promised_and_no_more() -> None:
    assert 0.9 / SIGMA < audited() < 1 / SIGMA


@pytest.mark.parametrize(("limit", "sigma"), [(1e9, SIGMA), (1.5 * C, SIGMA), (C, 0.9 * SIGMA)])
def test_the_audit_flags_planted_faults(limit: float, sigma: float) -> None:
    """No clip, one that is half too wide, nine tenths of the noise."""
    assert audited(limit, sigma) > 1 / SIGMA


def test_batches_are_poisson() -> None:
    """Each record is in each batch with the same chance, once at most, and the size of a batch is binomial."""
    plan = poisson(50, 4000, 0.1, simulated(Rng(3)))
    index, mask = plan["index"], plan["mask"].bool()
    counts = torch.bincount(index[mask], minlength=50).double()
    assert 1e-6 < stats.chi2.cdf(((counts - 400).square() / 360).sum().item(), 50) < 1 - 1e-6
    sizes = mask.sum(1).double()
    assert sizes.var().item() == pytest.approx(50 * 0.1 * 0.9, rel=0.1)
    assert all(len(set(row[there].tolist())) == there.sum() for row, there in zip(index[:200], mask[:200], strict=True))
    assert math.log2(mask.shape[1]).is_integer() and mask.shape[1] < 2 * sizes.max()


def test_batches_of_few_records() -> None:
    assert poisson(0, 3, 0.5, secret())["mask"].tolist() == [[0.0]] * 3
    assert poisson(4, 2, 1.0, secret())["index"].tolist() == [[0, 1, 2, 3]] * 2
