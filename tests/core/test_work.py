"""Work: scans, chunks, and the one gradient helper against finite differences."""

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.core.rng import Rng
from fedgist.core.work import CHUNK, Chunks, Compute, Place, Scan, compute, execute, gradient, scan, stacking
from fedgist.engines.scheduler import drive_one

HERE = Place()


def accumulate(total: Tensor, x: Any, factor: Tensor) -> Tensor:
    return total * factor + x["a"]


def test_scan_is_a_fold() -> None:
    xs = {"a": torch.tensor([1.0, 2.0, 3.0])}
    assert execute(Scan(accumulate, torch.tensor(0.0), xs, (torch.tensor(10.0),)), HERE).item() == 123
    assert execute(Scan(accumulate, torch.tensor(7.0), {"a": torch.empty(0)}, (torch.tensor(10.0),)), HERE).item() == 7


def test_chunks_are_cut_anyhow() -> None:
    calls = []

    def make(seed: int, first: int, count: int) -> dict[str, Tensor]:
        calls.append((first, count))
        return {"a": torch.arange(first, first + count, dtype=torch.float32) * seed}

    length = 2 * CHUNK + 3
    chunked = execute(Scan(accumulate, torch.tensor(0.0), Chunks(make, 2, length), (torch.tensor(0.5),)), HERE)
    whole = execute(Scan(accumulate, torch.tensor(0.0), make(2, 0, length), (torch.tensor(0.5),)), HERE)
    assert chunked.item() == whole.item()
    assert calls[:3] == [(0, CHUNK), (CHUNK, CHUNK), (2 * CHUNK, 3)]


def test_work_is_awaited_and_put_in_place() -> None:
    async def role() -> Tensor:
        total: Tensor = await scan(accumulate, torch.tensor(0.0), {"a": torch.ones(3)}, torch.tensor(1.0))
        doubled: Tensor = await compute(torch.mul, total, 2)
        return doubled

    assert drive_one(role(), HERE).item() == 6
    assert drive_one(role(), Place(dtype=torch.float64)).dtype == torch.float64


def test_a_forgotten_await_is_an_error() -> None:
    async def role() -> None:
        compute(torch.mul, 1, 2)  # type: ignore[unused-coroutine]  # the await is missing on purpose

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        drive_one(role(), HERE)
        gc.collect()
    assert any("never awaited" in str(warning.message) for warning in caught)


def cubic(at: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (at["a"] ** 3).sum() + (at["a"] * at["b"]).sum(), at["b"] * 2


def test_gradient_against_finite_differences() -> None:
    at = {"a": Rng(0).normal(3).double(), "b": Rng(1).normal(3).double(), "unused": torch.zeros(2).double()}
    with torch.no_grad():
        grads, (loss, extra) = gradient(cubic, at)
    h = 1e-6
    for name, value in at.items():
        for i in range(len(value)):
            bump = torch.zeros_like(value)
            bump[i] = h
            up, down = (cubic({**at, name: value + sign * bump})[0] for sign in (1, -1))
            assert grads[name][i].item() == pytest.approx(((up - down) / (2 * h)).item(), abs=1e-8)
    assert loss.item() == cubic(at)[0].item()
    assert torch.equal(extra, at["b"] * 2)
    assert not (loss.requires_grad or extra.requires_grad or grads["a"].requires_grad)


def hessian_norm(at: Tensor) -> tuple[Tensor, tuple[()]]:
    """‖∇ Σ x⁴/4‖² = Σ x⁶, a function that differentiates inside."""
    inner, _ = gradient(lambda x: ((x**4).sum() / 4, ()), at)
    return (inner**2).sum(), ()


def test_nested_gradients_alone_and_stacked() -> None:
    """d/dx Σ x⁶ = 6 x⁵, by both branches of the helper."""
    at = Rng(0).normal(4, 3).double()
    with torch.no_grad():
        alone = torch.stack([gradient(hessian_norm, x)[0] for x in at])
        with stacking():
            stacked = torch.func.vmap(lambda x: gradient(hessian_norm, x)[0])(at)
    assert torch.allclose(alone, 6 * at**5, rtol=1e-12)
    assert torch.allclose(stacked, alone, rtol=1e-12)


def test_work_runs_without_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    assert not execute(Compute(lambda w: w * 2, (weight,)), HERE).requires_grad
