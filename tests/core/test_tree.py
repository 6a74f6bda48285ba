"""Trees: arithmetic, order, containers."""

import pytest
import torch

from fedgist.core import tree
from fedgist.core.work import Pool


def test_leaves_do_not_depend_on_insertion_order() -> None:
    one, two = {"b": 1, "a": [2, 3]}, {"a": [2, 3], "b": 1}
    assert tree.leaves(one) == tree.leaves(two) == [2, 3, 1]
    assert tree.rebuild(one, [20, 30, 10]) == {"b": 10, "a": [20, 30]}
    assert tree.map(lambda x, y: x - y, one, two) == {"b": 0, "a": [0, 0]}


def test_arithmetic() -> None:
    a, b = {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}
    assert tree.add(a, b)["x"].tolist() == [4, 6]
    assert tree.sub(a, b)["x"].tolist() == [-2, -2]
    assert tree.dot(a, b).item() == 11
    assert tree.norm(b).item() == 5
    assert tree.scale(a, 2)["x"].tolist() == [2, 4]
    assert tree.stack([a, b])["x"].shape == (2, 2)
    assert tree.index(tree.stack([a, b]), 1)["x"].tolist() == [3, 4]


def test_same_means_the_same_objects() -> None:
    a = {"x": torch.zeros(1), "n": [1]}
    assert tree.same(a, tree.copy(a))
    assert not tree.same(a, {"x": torch.zeros(1), "n": [1]})
    assert not tree.same(a, {"x": a["x"]})
    assert not tree.same(a, {"y": a["x"], "n": a["n"]})
    assert not tree.same(a, {**a, "n": (1,)})
    assert not tree.same(a, {**a, "n": [1, 2]})
    assert not tree.same(a, Pool(a))


def test_a_copy_has_its_own_containers_and_the_same_leaves() -> None:
    a = {"x": torch.zeros(1), "n": [1, ({"y": torch.ones(1)}, None)], "pool": Pool(x=torch.zeros(2))}
    b = tree.copy(a)
    assert tree.same(a, b)
    b["n"][1][0]["y"] = torch.ones(1)
    assert not tree.same(a, b)
    assert tree.same(a, tree.copy(a))
    assert isinstance(b["pool"], Pool)


def test_a_pool_stays_a_pool() -> None:
    pool = Pool(x=torch.zeros(2))
    assert isinstance(tree.to(pool, "cpu"), Pool)
    assert isinstance(tree.rebuild(pool, [torch.ones(1)]), Pool)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_looks_at_every_tensor_of_real_numbers(bad: float) -> None:
    good = {"w": torch.zeros(2), "n": torch.tensor(3), "none": None, "name": "x", "empty": {}}
    assert tree.finite(good) and tree.finite({}) and tree.finite({"none": torch.zeros(0)})
    assert not tree.finite({**good, "deep": [(torch.tensor([1.0, bad]),)]})
