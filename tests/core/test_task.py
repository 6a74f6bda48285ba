"""What follows for any model from its layers: the names of its parts, and its size."""

import math
from itertools import pairwise
from typing import Any

import pytest

from fedgist import models
from fedgist.core.rng import Rng
from fedgist.core.task import Model

NET = models.build("cnn", (1, 8, 8), 4)


@pytest.mark.parametrize("model", ["mlp", "cnn", "convnet", "resnet9"])
def test_the_names_from_a_layer_on_are_those_of_the_layers_after_it(model: str) -> None:
    """Nested: each layer adds its own, the first has all, the last is the head."""
    net = models.build(model, (1, 16, 16), 4)
    layers = list(net.layer_shapes)
    found = [net.names_from(layer) for layer in layers]
    assert found[0] == net.shapes.keys()
    assert found[-1] == {f"{net.classifier}.weight", f"{net.classifier}.bias"}
    for layer, (more, fewer) in zip(layers[:-1], pairwise(found), strict=True):
        assert fewer <= more
        assert more - fewer == {name for name in net.shapes if name.startswith(f"{layer}.")}


class Alike(Model):
    """Two layers: the name of the first begins like that of the second."""

    layer_shapes = {"fc10": (3,), "fc1": (2,)}
    shapes = {"fc10.weight": (2, 3), "fc1.weight": (1, 2)}
    buffers = frozenset()

    def init(self, rng: Rng) -> Any:
        raise NotImplementedError

    def __call__(self, *given: Any, **more: Any) -> Any:
        raise NotImplementedError

    def head(self, *given: Any) -> Any:
        raise NotImplementedError


def test_a_name_that_begins_alike_is_another_layer() -> None:
    """A tensor's name is its layer's up to the dot."""
    assert Alike().names_from("fc1") == {"fc1.weight"}
    assert Alike().names_from("fc10") == {"fc1.weight", "fc10.weight"}
    with pytest.raises(ValueError, match="'fc' is not in list"):
        Alike().names_from("fc")


def test_sizes_count_what_is_trained() -> None:
    w = NET.init(Rng(0))
    assert NET.size == sum(w[name].numel() for name in w if name not in NET.buffers)
    assert NET.size < sum(math.prod(shape) for shape in NET.shapes.values())
    assert NET.feature_size == w["classifier.weight"].shape[1]
