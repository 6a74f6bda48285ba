"""What is the same computation."""

import gc
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedgist.core.work import Compute, Place, Pool, Scan
from fedgist.engines.stacked.flat_work import flatten

HERE = Place()


@dataclass(frozen=True)
class Affine:
    """A value with two functions."""

    slope: float
    note: str = ""

    def step(self, carry: Tensor, x: Tensor) -> Tensor:
        return self.slope * carry + x

    def gradient(self, at: Tensor) -> Tensor:
        return self.slope * at


def grouped(*works: Any) -> int:
    return len({flatten(work, HERE).key for work in works})


def test_what_is_the_same_computation() -> None:
    x = torch.zeros(3)
    same = [Compute(Affine(1.0).gradient, (torch.ones(3),)), Compute(Affine(1.0).gradient, (x,))]
    assert grouped(*same) == 1, "equal values and equal shapes"
    assert grouped(*same, Compute(Affine(2.0).gradient, (x,))) == 2, "another value"
    assert grouped(*same, Compute(Affine(1.0).gradient, (torch.zeros(4),))) == 2, "another shape"
    assert grouped(*same, Compute(Affine(1.0).gradient, (torch.zeros(3, dtype=torch.int64),))) == 2, "another dtype"
    assert grouped(*same, Compute(Affine(1.0).gradient, (x.double(),))) == 1, "computed in the place's dtype"
    assert grouped(*same, Compute(Affine(1.0).gradient, ({"at": x},))) == 2, "another structure"
    assert grouped(*same, Compute(Affine(1.0).step, (x, x))) == 2, "another function"
    assert grouped(Compute(torch.add, (x, 1)), Compute(torch.add, (x, 1)), Compute(torch.add, (x, 2))) == 2, "a number"
    assert grouped(Compute(torch.add, (x, 1)), Compute(torch.add, (x, 1.0))) == 2, "int and float"
    adders = [partial(torch.add, alpha=n) for n in (1, 1, 2)]
    assert grouped(*[Compute(add, (x, x)) for add in adders]) == 2, "partial functions by what they hold"
    closures = [lambda a, n=n: a + n for n in (1, 1)]
    assert grouped(*[Compute(add, (x,)) for add in closures]) == 2, "closures by identity"
    unhashable = [replace(Affine(1.0), note=[]) for _ in range(2)]  # type: ignore[arg-type]
    assert grouped(*[Compute(one.gradient, (x,)) for one in unhashable]) == 2, "values without a hash by identity"


def weights(count: int = 6) -> dict[str, Tensor]:
    return {f"w{i}": torch.zeros(i + 1) for i in range(count)}


def test_weights_that_come_again_are_recognised() -> None:
    """A request for the very same tensors is what it was; another tensor, name, kind of dict or dtype makes another."""
    w = weights()
    first, again = (flatten(Compute(len, (dict(w),)), HERE) for _ in range(2))
    assert first.key == again.key
    assert all(a is b for a, b in zip(first.consts, again.consts, strict=True))
    turned = flatten(Compute(len, (dict(reversed(w.items())),)), HERE)
    assert turned.key == first.key, "the order of insertion means nothing"
    assert all(a is b for a, b in zip(first.consts, turned.consts, strict=True))
    one, *others = w.values()
    assert grouped(Compute(len, (w,)), Compute(len, ({**w, "w0": torch.zeros(2)},))) == 2, "another shape"
    assert grouped(Compute(len, (w,)), Compute(len, ({**w, "w0": 0.5},))) == 2, "a number among them"
    assert grouped(Compute(len, (w,)), Compute(len, (dict(zip(w, [*others, one], strict=True)),))) == 2, "other places"
    assert grouped(Compute(len, (w,)), Compute(len, ({name + "'": x for name, x in w.items()},))) == 2, "other names"
    assert grouped(Compute(len, (w,)), Compute(len, (Pool(w),))) == 2, "a pool"
    assert flatten(Compute(len, (w,)), Place(dtype=torch.float64)).key != first.key, "another dtype to compute in"
    assert flatten(Compute(len, (Pool(w),)), HERE).pooled == [True] * len(w)
    assert flatten(Compute(len, (w,)), HERE).pooled == [False] * len(w)


def test_weights_are_forgotten_with_the_first_tensor_that_dies() -> None:
    """Another tensor, which may get its identity, is looked at. Many die, so that one of the places is taken again."""
    many: list[dict[str, Any]] = [weights() for _ in range(100)]
    keys, dead = [flatten(Compute(len, (w,)), HERE).key for w in many], {id(w["w0"]): i for i, w in enumerate(many)}
    for w in many:
        w["w0"] = None
    gc.collect()
    tried: list[Tensor] = []
    while not tried or id(tried[-1]) not in dead:
        assert len(tried) < 10_000, "no other tensor got the identity of a dead one"
        tried.append(torch.zeros(9))
    one = dead[id(tried[-1])]
    many[one]["w0"] = tried[-1]
    assert flatten(Compute(len, (many[one],)), HERE).key != keys[one]


def test_scans_group_whatever_their_lengths() -> None:
    step, carry = Affine(1.0).step, torch.zeros(2)
    pools = [Pool(x=torch.zeros(n, 2)) for n in (3, 5)]
    scans = [Scan(step, carry, torch.zeros(n, 2), (pool,)) for n, pool in zip((1, 4), pools, strict=True)]
    assert grouped(*scans) == 1
    assert grouped(*[replace(one, consts=(dict(one.consts[0]),)) for one in scans]) == 2, "a dict is not only indexed"
