"""Ridge regression from sums, against the same from all samples."""

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.learning.ridge import OWN, Ridge, as_logits, balanced, moved, symmetric, triangle


def data(n: int = 40, d: int = 7, c: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Centred features and one-hot labels."""
    z, y = Rng(0).normal(n, d).double(), Rng(1).integers(c, n)
    return z - z.mean(0), torch.nn.functional.one_hot(y, c).double()


def test_a_triangle_has_the_norm_of_its_matrix_and_gives_it_back() -> None:
    z, _ = data()
    packed = triangle(z.T @ z)
    assert packed.shape == (7 * 8 // 2,)
    assert packed.norm().item() == pytest.approx((z.T @ z).norm().item(), rel=1e-12)
    assert torch.allclose(symmetric(packed), z.T @ z, rtol=1e-12)


@pytest.mark.parametrize("ridge", [0.01, 3.0])
def test_weights_minimise_the_ridge_loss(ridge: float) -> None:
    """min Σ‖y − ȳ − zW‖² + λ‖W‖² as least squares with √λ I below z, which needs no products of z."""
    z, y = data()
    stacked = np.vstack([z.numpy(), np.sqrt(ridge) * np.eye(7)])
    wanted = np.linalg.lstsq(stacked, np.vstack([(y - y.mean(0)).numpy(), np.zeros((7, 3))]), rcond=None)[0]
    assert np.allclose(Ridge.of(z.T @ z, z.T @ y).weights(ridge).numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("ridge", [0.01, 3.0])
def test_the_error_of_what_is_left_out(ridge: float) -> None:
    """n‖(I − H)Y‖² / tr(I − H)², with the hat matrix H = 11ᵀ/n + z(S + λI)⁻¹zᵀ of all samples."""
    z, y = data()
    n = len(z)
    hat = torch.ones(n, n).double() / n + z @ torch.linalg.solve(z.T @ z + ridge * torch.eye(7).double(), z.T)
    rest = torch.eye(n).double() - hat
    wanted = n * (rest @ y).square().sum() / rest.trace() ** 2
    spread = n * (1 - y.mean(0).square().sum().item())
    assert Ridge.of(z.T @ z, z.T @ y).leaving_out(ridge, n, spread) == pytest.approx(wanted.item(), rel=1e-10)


@pytest.mark.parametrize("ridge", [1e-3, 1e-1, 10.0])
@pytest.mark.parametrize(("repeated", "wire"), [(0, torch.float64), (0, torch.float32), (4, torch.float64)])
def test_the_error_of_what_is_left_out_of_few_samples(ridge: float, repeated: int, wire: torch.dtype) -> None:
    """n‖RY‖² / tr(R)² with R = λ(zzᵀ + λI)⁻¹ − 11ᵀ/n, of 12 samples of 30 features: a small λ leaves hardly anything
    over, also where S was rounded; repeated samples with other labels leave something for every λ."""
    z, y = data(n=12, d=30)
    z, y = torch.cat([z, z[:repeated]]), torch.cat([y, y[:repeated].roll(1, 1)])
    z, n = z - z.mean(0), len(z)
    rest = ridge * torch.linalg.inv(z @ z.T + ridge * torch.eye(n).double()) - 1 / n
    wanted = n * (rest @ y).square().sum().item() / rest.trace().item() ** 2
    sums = [symmetric(triangle(z.T @ z).to(wire).double()), (z.T @ y).to(wire)]
    spread = n * (1 - y.mean(0).square().sum().item())
    found = Ridge.of(*sums, wire).leaving_out(ridge, n, spread)
    assert found == pytest.approx(wanted, rel=1e-8 if wire == torch.float64 else 1e-3)


def fitted(z: torch.Tensor, targets: torch.Tensor, ridge: float = 0.3) -> torch.Tensor:
    """The scores of targets of any kind, with a free intercept and without sums: least squares with √λ I below z."""
    mean = targets.mean(0)
    below = torch.zeros(z.shape[1], targets.shape[1]).double()
    stacked = torch.cat([z, ridge**0.5 * torch.eye(z.shape[1]).double()])
    return z @ torch.linalg.lstsq(stacked, torch.cat([targets - mean, below])).solution + mean


def simplex(c: int) -> torch.Tensor:
    """The vertices of a regular simplex as columns, in c − 1 dimensions."""
    return torch.linalg.qr(torch.cat([torch.ones(c, 1), torch.eye(c)[:, 1:]], 1).double())[0][:, 1:].T


CODES = {
    "smoothed labels": (0.9 * torch.eye(5).double(), torch.full((5,), 0.1 / 5).double()),
    "1 and −1": (2 * torch.eye(5).double(), -torch.ones(5).double()),
    "orthogonal": (torch.linalg.qr(Rng(5).normal(8, 5).double())[0], Rng(6).normal(8).double()),
    "simplex": (simplex(5), torch.zeros(4).double()),
    "error-correcting": (2.0 * Rng(7).integers(2, 9, 5).double() - 1, torch.zeros(9).double()),
}


@pytest.mark.parametrize("code", CODES)
def test_scores_of_targets_that_are_an_affine_map_of_labels(code: str) -> None:
    """T y + t for y makes T s + t of the scores s, as (S + λI)⁻¹ Σ z (Ty + t)ᵀ = W Tᵀ where Σ z = 0. The nearest of the
    codewords T e_k + t is then the e_k nearest to s by the metric TᵀT; where that is αI − β11ᵀ, the largest s_k."""
    z, y = data(n=60, c=5)
    matrix, shift = CODES[code]
    scores, found = fitted(z, y), fitted(z, y @ matrix.T + shift)
    assert torch.allclose(found, scores @ matrix.T + shift, rtol=0, atol=1e-10)
    nearest = torch.cdist(found, matrix.T + shift).argmin(1)
    apart = scores[:, None] - torch.eye(5).double()
    assert torch.equal(nearest, torch.einsum("nki,ij,nkj->nk", apart, matrix.T @ matrix, apart).argmin(1))
    assert torch.equal(nearest, scores.argmax(1)) == (code != "error-correcting")


def test_scores_of_classes_with_weights_are_no_such_map() -> None:
    """With 1/n_c for every sample no 5×5 matrix and shift make them of s; with one weight for all, they are s."""
    z, y = data(n=60, c=5)
    scores = torch.nn.functional.pad(fitted(z, y), (0, 1), value=1.0)
    for weights, same in ((y @ (1 / y.sum(0)), False), (torch.full((60,), 1 / 60).double(), True)):
        mean_z, mean_y = (weights @ each / weights.sum() for each in (z, y))
        moment = (z - mean_z).T * weights * 60 / weights.sum()
        w = torch.linalg.solve(moment @ (z - mean_z) + 0.3 * torch.eye(7).double(), moment @ (y - mean_y))
        found = (z - mean_z) @ w + mean_y
        left = found - scores @ torch.linalg.lstsq(scores, found, driver="gelsd").solution
        assert (left.abs().max() < 1e-10) == same


@pytest.mark.parametrize("sizes", [(30, 5, 2), (30, 7, 0), (20, 20, 20), (9, 0, 0)])
def test_balanced_scores_are_those_of_labels_of_deviation_1(sizes: tuple[int, ...]) -> None:
    """Up to one factor for all of them, and as they were where all classes are as large; who is not there is last."""
    c, y = 3, torch.eye(3).double().repeat_interleave(torch.tensor(sizes), 0)
    z = Rng(0).normal(len(y), 7).double()
    z, prior = z - z.mean(0), y.mean(0)
    weight, intercept = balanced(Ridge.of(z.T @ z, z.T @ (y - 1 / c)).weights(0.3), prior)
    found, there = z @ weight + intercept, prior > 0
    labels = (y - prior) / y.std(0, correction=0).clamp_min(1e-12)
    if there.sum() > 1:
        wanted = fitted(z, labels)[:, there]
        assert torch.allclose(found[:, there] - 1 / c, wanted * 2**0.5 / 3, rtol=0, atol=1e-12)
    assert there[found.argmax(1)].all()
    if sizes == (20, 20, 20):
        assert torch.allclose(found, fitted(z, y), rtol=0, atol=1e-12)


def test_logits_are_the_first_newton_step_of_logistic_regression() -> None:
    """From weights of 0, on Σ cross-entropy + λ/2c ‖W‖², with the gradient and the Hessian that torch finds."""
    z, y = data()
    d, c, ridge = z.shape[1], y.shape[1], 0.3

    def loss(flat: torch.Tensor) -> torch.Tensor:
        w, b = flat[: d * c].view(d, c), flat[d * c :]
        return -(y * (z @ w + b).log_softmax(1)).sum() + ridge / (2 * c) * w.square().sum()

    start = torch.zeros(d * c + c).double()
    hessian = torch.autograd.functional.hessian(loss, start)
    (gradient,) = torch.autograd.functional.jacobian(loss, (start,))
    step = -torch.linalg.pinv(hessian) @ gradient  # one number for all biases changes nothing
    weight, bias = as_logits(Ridge.of(z.T @ z, z.T @ (y - y.mean(0))).weights(ridge), y.mean(0))
    assert torch.allclose(step[: d * c].view(d, c), weight, atol=1e-10)
    assert torch.allclose(step[d * c :], bias - bias.mean(), atol=1e-10)


def test_softmax_of_logits_is_the_score_to_first_order() -> None:
    """An error of the second order: a tenth of the distance from 1/c is a hundredth of the error."""
    apart = Rng(3).normal(5, 4).double()
    apart -= apart.mean(1, keepdim=True)
    errors = []
    for length in (1e-2, 1e-3):
        weight, bias = as_logits(length * apart.T, torch.full((4,), 0.25).double())
        errors.append(((weight.T + bias).softmax(1) - (0.25 + length * apart)).abs().max().item())
    assert 0 < errors[1] < 0.02 * errors[0]


def test_a_head_is_moved_by_the_samples_of_a_client() -> None:
    """With u = (z, 1) and r = y − 1/c − uH: H + D, D minimising Σ‖r − uD‖² + ρ‖D‖², found by least squares with √ρ I
    below u. Of all ρ that with the least n‖(I − P)r‖² / tr(I − P)², P = u(u'u + ρI)⁻¹u' of all samples."""
    z, y = data()
    z, y = z[:12] + 0.3, y[:12] - 1 / 3
    u, head = torch.nn.functional.pad(z, (0, 1), value=1.0), Rng(2).normal(8, 3).double()
    products, r = u.T @ u, y - u @ head

    def left_out(ridge: float) -> float:
        rest = torch.eye(12).double() - u @ torch.linalg.solve(products + ridge * torch.eye(8).double(), u.T)
        return ((rest @ r).square().sum() / rest.trace() ** 2).item()

    ridge = min((factor * products.trace().item() / 8 for factor in OWN), key=left_out)
    assert OWN[0] > ridge * 8 / products.trace().item() > OWN[-1]
    stacked = np.vstack([u.numpy(), np.sqrt(ridge) * np.eye(8)])
    wanted = np.linalg.lstsq(stacked, np.vstack([r.numpy(), np.zeros((8, 3))]), rcond=None)[0]
    found = moved(head, products, u.T @ y)
    assert np.allclose(found.numpy(), head.numpy() + wanted, atol=1e-12)
    for n in (0, 1):
        assert moved(head, u[:n].T @ u[:n], u[:n].T @ y[:n]) is head


def test_more_features_than_samples_or_none() -> None:
    z, y = data(n=5)
    assert Ridge.of(z.T @ z, z.T @ y).best(5, 3.0, [1e-9, 1e-3, 1.0]) in (1e-9, 1e-3, 1.0)
    nothing = Ridge.of(torch.zeros(7, 7), torch.zeros(7, 3))
    assert nothing.scale == 1.0 and nothing.weights(nothing.best(1, 0.0, [0.1, 1.0])).abs().max() == 0


def test_rounding_moves_eigenvalues_by_no_more_than_is_said() -> None:
    """Nor by much less: S of 200 features, most of it in a few directions, as float16 has it."""
    z = Rng(2).normal(300, 200).double() @ torch.diag(0.97 ** torch.arange(200).double())
    exact = Ridge.of(z.T @ z, z[:200, :1], torch.float16)
    values, _ = torch.linalg.eigh(symmetric(triangle(z.T @ z).half().double()))
    moved = (values - exact.eigenvalues).abs().max().item()
    assert 0.05 * exact.rounding < moved < exact.rounding


def test_what_is_not_finite_is_said() -> None:
    with pytest.raises(FedgistError, match=r"not finite.*wire=float32"):
        Ridge.of(torch.full((2, 2), torch.inf), torch.zeros(2, 1))
