"""What is the same computation."""

import math
import weakref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedgist.core.work import Compute, Place, Pool, Scan
from fedgist.engines.stacked.flat_work import MOST_FORMS, FlatWork, Forms

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


def flatten(work: Any, place: Place = HERE) -> FlatWork:
    return Forms(place).flatten(work)


def grouped(*works: Any) -> int:
    """How many computations these are: the same whether the forms of the others are known or not."""
    forms = Forms(HERE)
    found = len({forms.flatten(work).key for work in works})
    assert found == len({flatten(work).key for work in works})
    assert found == len({forms.flatten(work).key for work in reversed(works)})
    return found


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


def test_dicts_of_tensors() -> None:
    """The same names, shapes and dtypes are the same form, whatever the tensors; all else makes another."""
    w, forms = weights(), Forms(HERE)
    first, again = (forms.flatten(Compute(len, (dict(w),))) for _ in range(2))
    assert first.key == again.key
    assert all(a is b for a, b in zip(first.consts, again.consts, strict=True))
    turned = forms.flatten(Compute(len, (dict(reversed(w.items())),)))
    assert turned.key == first.key, "the order of insertion means nothing"
    assert all(a is b for a, b in zip(first.consts, turned.consts, strict=True))
    one, *others = w.values()
    assert grouped(Compute(len, (w,)), Compute(len, ({**w, "w0": torch.zeros(2)},))) == 2, "another shape"
    assert grouped(Compute(len, (w,)), Compute(len, ({**w, "w0": 0.5},))) == 2, "a number among them"
    assert grouped(Compute(len, (w,)), Compute(len, (dict(zip(w, [*others, one], strict=True)),))) == 2, "other places"
    assert grouped(Compute(len, (w,)), Compute(len, ({name + "'": x for name, x in w.items()},))) == 2, "other names"
    assert grouped(Compute(len, (w,)), Compute(len, (Pool(w),))) == 2, "a pool"
    assert flatten(Compute(len, (w,)), Place(dtype=torch.float64)).key != first.key, "another dtype to compute in"
    assert flatten(Compute(len, (Pool(w),))).pooled == [True] * len(w)
    assert flatten(Compute(len, (w,))).pooled == [False] * len(w)


def test_of_a_form_that_is_known_no_tensor_is_mistaken() -> None:
    forms, other = Forms(HERE), {name: torch.ones_like(x) for name, x in weights().items()}
    first = forms.flatten(Compute(len, (weights(),)))
    found = forms.flatten(Compute(len, (other,)))
    assert found.key is first.key
    assert all(a is b for a, b in zip(found.consts, other.values(), strict=True))
    assert grouped(Compute(len, (math.nan,)), Compute(len, (math.nan,))) == 1


def test_a_form_keeps_no_tensor() -> None:
    forms, w = Forms(HERE), weights()
    forms.flatten(Scan(len, ({"w": w}, [w["w1"]]), Pool(x=torch.zeros(2, 3)), (w, 1.0)))
    held = [weakref.ref(x) for x in w.values()]
    del w
    assert not any(ref() is not None for ref in held)


def test_many_forms() -> None:
    """More than are remembered, again and again."""
    works = [Compute(len, (torch.zeros(n),)) for n in range(MOST_FORMS + 4)]
    assert grouped(*works, *works) == len(works)


def test_scans_group_whatever_their_lengths() -> None:
    step, carry = Affine(1.0).step, torch.zeros(2)
    pools = [Pool(x=torch.zeros(n, 2)) for n in (3, 5)]
    scans = [Scan(step, carry, torch.zeros(n, 2), (pool,)) for n, pool in zip((1, 4), pools, strict=True)]
    assert grouped(*scans) == 1
    assert grouped(*[replace(one, consts=(dict(one.consts[0]),)) for one in scans]) == 2, "a dict is not only indexed"
