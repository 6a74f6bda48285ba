"""Which activations the kernels of a block take."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist.models.gpu import blocks
from fedgist.models.gpu.blocks import FROZEN_CONV, FROZEN_NORM, INSTANCE_NORM, Limits


class Like(SimpleNamespace):
    """What looks like an activation on a GPU."""

    def dim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return int(self.shape[0])


def like(**other: Any) -> Any:
    return Like(**{"is_cuda": True, "dtype": torch.float32, "shape": (5, 64, 8, 6)} | other)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "triton_is_there", lambda: True)


@pytest.mark.parametrize(
    ("other", "instance", "conv", "norm"),
    [
        ({}, True, True, True),
        ({"is_cuda": False}, False, False, False),
        ({"dtype": torch.float64}, False, False, False),
        ({"dtype": torch.float16}, True, False, False),
        ({"dtype": torch.bfloat16}, True, False, False),
        ({"shape": (5, 64, 7, 6)}, False, False, False),
        ({"shape": (5, 64, 8, 5)}, False, False, False),
        ({"shape": (0, 64, 8, 6)}, False, False, False),
        ({"shape": (5, 64)}, False, False, False),
        ({"shape": (5, 64, 64, 64)}, True, True, True),
        ({"shape": (5, 64, 64, 66)}, False, True, True),
    ],
)
def test_of_what_is_pooled(other: dict[str, Any], instance: bool, conv: bool, norm: bool) -> None:
    x = like(**other)
    assert [limits.admit(x) for limits in (INSTANCE_NORM, FROZEN_CONV, FROZEN_NORM)] == [instance, conv, norm]


@pytest.mark.parametrize("shape", [(5, 64, 7, 6), (5, 64, 8, 5), (5, 64, 1, 1)])
def test_what_is_not_pooled_may_be_odd(shape: tuple[int, ...]) -> None:
    assert FROZEN_NORM.admit(like(shape=shape), pooled=False)


@pytest.mark.parametrize("limits", [INSTANCE_NORM, FROZEN_CONV])
def test_the_size_behind_the_convolution_counts(limits: Limits) -> None:
    assert limits.admit(like(), growth=-4)
    assert not limits.admit(like(), growth=-1)
    assert limits.admit(like(shape=(5, 3, 7, 9)), growth=-1)
    assert not limits.admit(like(), growth=-6)
    assert not limits.admit(like(), growth=-10)
    assert INSTANCE_NORM.admit(like(shape=(5, 3, 62, 62)), growth=2)
    assert not INSTANCE_NORM.admit(like(shape=(5, 3, 62, 62)), growth=4)


@pytest.mark.parametrize("limits", [INSTANCE_NORM, FROZEN_CONV, FROZEN_NORM])
def test_without_triton_none(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "triton_is_there", lambda: False)
    assert not limits.admit(like())


def plainly(ask: Callable[[Tensor], Tensor]) -> None:
    ask(torch.ones(2))


def under_vmap(ask: Callable[[Tensor], Tensor]) -> None:
    torch.func.vmap(ask)(torch.ones(2, 2))


def under_grad(ask: Callable[[Tensor], Tensor]) -> None:
    torch.func.grad(ask)(torch.ones(2))


@pytest.mark.parametrize(
    ("way", "gradients", "instance", "conv", "norm"),
    [
        (plainly, True, True, True, True),
        (plainly, False, True, True, False),
        (under_vmap, True, True, True, False),
        (under_vmap, False, True, True, False),
        (under_grad, True, True, True, False),
    ],
)
def test_where_gradients_are_needed(
    way: Callable[..., None], gradients: bool, instance: bool, conv: bool, norm: bool
) -> None:
    """By torch's autograd, or under torch.func, which does not differentiate `frozen_norm`'s kernels."""
    seen: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        seen.extend(limits.admit(like()) for limits in (INSTANCE_NORM, FROZEN_CONV, FROZEN_NORM))
        return x.sum()

    with torch.set_grad_enabled(gradients):
        way(ask)
    assert seen == [instance, conv, norm]
