"""Downloads go through packages that are not installed here, and that stand-ins replace."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import datasets
from fedgist.data.datasets import load


def pixels(*shape: int) -> np.ndarray:
    return Rng(0, "pixels", *shape).numpy().integers(0, 256, shape, dtype=np.uint8)


def fake_torchvision(calls: list[tuple[Any, ...]]) -> ModuleType:
    def made(kind: str) -> Callable[..., Any]:
        def build(root: str, train: bool, download: bool, **more: Any) -> Any:
            calls.append((kind, train, download, more))
            n = 52 if train else 26
            data = torch.tensor(pixels(n, 28, 28)) if kind == "EMNIST" else pixels(n, 32, 32, 3)
            return SimpleNamespace(data=data, targets=[i % 26 + 1 if kind == "EMNIST" else i % 10 for i in range(n)])

        return build

    module = ModuleType("torchvision.datasets")
    for kind in ("EMNIST", "CIFAR10"):
        setattr(module, kind, made(kind))
    return module


def test_downloads_through_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.datasets", fake_torchvision(calls))
    assert datasets.download("cifar10", tmp_path) == tmp_path / "cifar10"
    assert len(load("cifar10", tmp_path)[0]) == 52
    datasets.download("emnist-letters", tmp_path)
    letters = load("emnist-letters", tmp_path, normalise="unit")[0]
    assert letters.y.tolist() == [*range(26), *range(26)]
    assert (letters.x[0, 0].T * 255).round().byte().tolist() == pixels(52, 28, 28)[0].tolist()
    assert calls[0] == ("CIFAR10", True, True, {})
    assert calls[-1] == ("EMNIST", False, True, {"split": "letters"})


def test_downloads_through_medmnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(split: str, root: str, download: bool) -> Any:
        n = {"train": 18, "test": 9}[split]
        return SimpleNamespace(imgs=pixels(n, 28, 28, 3), labels=(np.arange(n) % 9)[:, None])

    module = ModuleType("medmnist")
    module.INFO = {"pathmnist": {"python_class": "PathMNIST"}}  # type: ignore[attr-defined]
    module.PathMNIST = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "medmnist", module)
    datasets.download("pathmnist", tmp_path)
    assert load("pathmnist", tmp_path)[0].y.tolist() == [*range(9), *range(9)]


def test_downloads_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "medmnist", None)
    with pytest.raises(FedgistError, match="downloading mnist needs torchvision: pip install torchvision"):
        datasets.download("mnist", tmp_path)
    with pytest.raises(FedgistError, match="downloading pathmnist needs medmnist"):
        datasets.download("pathmnist", tmp_path)
    with pytest.raises(FedgistError, match="unknown data set to download 'cifar11'; did you mean 'cifar10'"):
        datasets.download("cifar11", tmp_path)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    broken = ModuleType("torchvision.datasets")

    def no_network(*args: Any, **more: Any) -> Any:
        raise OSError("no route to host")

    broken.MNIST = no_network  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision.datasets", broken)
    with pytest.raises(FedgistError, match="mnist could not be downloaded: no route to host"):
        datasets.download("mnist", tmp_path)
