"""Names, sizes and refusals."""

import dataclasses

import pytest

from fedgist.core.errors import FedgistError
from fedgist.models import build, model
from fedgist.models.registry import ARCHITECTURES

GREY, COLOUR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "options", "size", "feature_size"),
    [
        ("mlp", GREY, 10, {}, 784 * 200 + 200 + 2010, 200),
        ("mlp", GREY, 10, {"hidden": [64], "feature_size": 32}, 784 * 64 + 64 + 64 * 32 + 32 + 330, 32),
        ("cnn", GREY, 10, {}, 26_434, 32),
        ("cnn", GREY, 26, {}, 26_962, 32),
        ("lenet5", GREY, 10, {}, 61_706, 84),
        ("lenet5", GREY, 10, {"norm": "batch"}, 61_706 + 2 * (6 + 16), 84),
        ("lenet5-thesis", GREY, 10, {}, 30_986, 84),
        ("lenet5-thesis", GREY, 10, {"norm": "batch"}, 30_986 + 2 * (6 + 16 + 120), 84),
        ("convnet", COLOUR, 10, {}, 320_010, 2048),
        ("convnet", GREY, 10, {}, 317_706, 2048),
        ("convnet", COLOUR, 100, {}, 504_420, 2048),
        ("vgg13", COLOUR, 10, {}, 9_410_122, 512),
        ("vgg13", COLOUR, 10, {"norm": "batch"}, 9_416_010, 512),
        ("resnet9", GREY, 10, {}, 2_470_730, 128),
        ("resnet18", COLOUR, 10, {}, 11_173_962, 512),
        ("resnet18", COLOUR, 10, {"norm": "group"}, 11_173_962, 512),
        ("resnet18", COLOUR, 10, {"norm": "instance"}, 11_173_962, 512),
        ("resnet18-thesis", COLOUR, 10, {}, 11_302_730, 256),
    ],
)
def test_sizes(name, shape, classes, options, size, feature_size):
    model = build(name, shape, classes, **options)
    assert model.size == size
    assert model.feature_size == feature_size
    assert (model.name, model.input_shape, model.classes) == (name, shape, classes)


def test_only_batch_norm_keeps_statistics():
    assert build("cnn", GREY, 10).buffers == {f"norm{i}.running_{s}" for i in (1, 2) for s in ("mean", "var")}
    for norm in ("instance", "group", "none"):
        assert not build("cnn", GREY, 10, norm=norm).buffers


@pytest.mark.parametrize("name", ["mlp", "cnn", "convnet", "lenet5-thesis", "resnet18"])
def test_fits_the_8x8_digits(name):
    assert build(name, (1, 8, 8), 10).layer_shapes["classifier"]


def test_every_model_has_one_line():
    lines = [(builder.__doc__ or "").partition("\n")[0] for builder in ARCHITECTURES.values()]
    assert all(line.endswith(".") and len(line) < 120 for line in lines)


def test_equal_arguments_give_the_same_object_and_equal_values_are_equal():
    model = build("convnet", [1, 8, 8], 10, width=8)
    assert build("convnet", (1, 8, 8), 10, width=8, depth=3) is model
    twin = dataclasses.replace(model)
    assert twin is not model
    assert twin == model
    assert hash(twin) == hash(model)
    others = [build("convnet", (1, 8, 8), 10, width=8, norm="group"), build("convnet", (1, 8, 8), 9, width=8)]
    assert len({model, twin, *others}) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("lenet", GREY, 10), {}, "unknown model 'lenet'; did you mean 'lenet5'"),
        (("mlp", GREY, 10), {"hiden": (3,)}, "unknown option of model mlp 'hiden'; did you mean 'hidden'"),
        (("mlp", GREY, 10), {"hidden": "200"}, "hidden of model mlp must be positive whole numbers"),
        (("mlp", GREY, 10), {"hidden": (20, 0)}, "hidden of model mlp must be positive whole numbers"),
        (("mlp", GREY, 10), {"hidden": (2**63 - 1,)}, "must be positive whole numbers, at most 67,108,864, not"),
        (("cnn", GREY, 10), {"feature_size": 10**30}, "must be a positive whole number, at most 67,108,864, not"),
        (("cnn", GREY, 10), {"feature_size": 1.5}, "feature_size of model cnn must be a positive whole number"),
        (("cnn", GREY, 10), {"feature_size": None}, "feature_size of model cnn must be a positive whole number"),
        (("cnn", GREY, 10), {"norm": "bach"}, "unknown norm 'bach'; did you mean 'batch'"),
        (("tabular", (4,), 10), {"categories": (3, 2)}, "categories name 5 one-hot columns, and there are 4 in all"),
        (("cnn1d", (30,), 10), {}, "cnn1d takes signals .* has the form 30: take mlp, tabular"),
        (("cnn1d", (1, 30), 10), {"kernel": 4}, "kernel must be odd, not 4"),
        (("cnn", (28, 28), 10), {}, "cnn takes images .* and an input here has the form 28×28: take mlp, cnn1d"),
        (("mlp", (0, 28), 10), {}, r"must be 1 to 8 positive whole numbers, channels first, .* not \(0, 28\)"),
        (("mlp", (2**14, 2**14), 10), {}, "with a product of at most 67,108,864"),
        (("cnn", GREY, 0), {}, "number of classes must be a positive whole number, at most 67,108,864, not 0"),
        (("lenet5", (1, 8, 8), 10), {}, "lenet5 does not fit inputs of 1×8×8: its layer 'conv2'"),
        (("resnet9", (1, 8, 8), 10), {}, "resnet9 does not fit inputs of 1×8×8: its layer 'pool5'"),
        (("vgg13", GREY, 10), {}, "vgg13 does not fit inputs of 1×28×28: its layer 'pool5'"),
        # instance norm of a single value returns its bias whatever the input
        (("mlp", GREY, 10), {"norm": "instance"}, "its layer 'norm1' cannot work on an activation of shape 200"),
        (("resnet18", (3, 8, 8), 10), {"norm": "instance", "width": 4}, "its layer 'block7'"),
    ],
)
def test_mistakes_are_named(arguments, options, message):
    with pytest.raises(FedgistError, match=message):
        build(*arguments, **options)


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {"tabular", "cnn1d"}))
def test_layers_fit_together_alike_where_a_model_is_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no number of it is made to see that; a network of terabytes is described in no time."""
    small = build(name, (3, 32, 32), 10)
    monkeypatch.setattr(model, "MOST_BLANK", 0)
    assert build(name, (3, 32, 32), 10).layer_shapes == small.layer_shapes


def test_a_model_of_terabytes_is_counted_and_not_made() -> None:
    assert build("mlp", (1, 8, 8), 10, hidden=(10**6, 10**6)).size == 64 * 10**6 + 10**12 + 10**7 + 2 * 10**6 + 10
