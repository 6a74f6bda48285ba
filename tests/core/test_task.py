"""What follows for any model from its layers: the names of its parts, and its size."""

import math
from itertools import pairwise

import pytest

from fedgist import models
from fedgist.core.rng import Rng

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


def test_a_name_that_begins_alike_is_another_layer() -> None:
    """`fc1` is not `fc10`: a name is a layer's up to its dot."""
    deep = models.build("mlp", (1, 4, 4), 3, hidden=(2,) * 10)
    assert deep.names_from("fc10") == {"fc10.weight", "fc10.bias", "classifier.weight", "classifier.bias"}
    assert deep.names_from("fc2") == deep.shapes.keys() - {"fc1.weight", "fc1.bias"}
    with pytest.raises(ValueError, match="'fc' is not in list"):
        deep.names_from("fc")


def test_sizes_count_what_is_trained() -> None:
    w = NET.init(Rng(0))
    assert NET.size == sum(w[name].numel() for name in w if name not in NET.buffers)
    assert NET.size < sum(math.prod(shape) for shape in NET.shapes.values())
    assert NET.feature_size == w["classifier.weight"].shape[1]
