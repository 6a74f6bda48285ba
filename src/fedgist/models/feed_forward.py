"""Feed-forward architectures: MLP, one for tables, one for signals, FedGen's CNN, LeNet5 in two forms, ConvNet, VGG13.

A builder takes (input_shape, classes) and keyword options and gives the layers; the last one is the classifier.
"""

from itertools import pairwise

from fedgist.core.errors import FedgistError
from fedgist.models.layers import (
    AvgPool,
    Conv,
    Conv1d,
    Embeddings,
    Flatten,
    GlobalAvgPool,
    Layers,
    Linear,
    MaxPool,
    MaxPool1d,
    Relu,
    Tanh,
    norm_layer,
)
from fedgist.models.model import output_size

FEATURES = ("relu", "tanh", "linear")
"""What the features are, as functions of the last hidden layer."""


def _norm_relu(index: int, kind: str, channels: int) -> Layers:
    return (*norm_layer(f"norm{index}", kind, channels), (f"relu{index}", Relu()))


def _activation(index: int, kind: str) -> Layers:
    """That of the features, or nothing for `linear`."""
    return {"relu": ((f"relu{index}", Relu()),), "tanh": (("tanh", Tanh()),), "linear": ()}[kind]


def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: tuple[int, ...] = (200,),
    feature_size: int | None = None,
    norm: str = "none",
    features: str = "relu",
) -> Layers:
    """Multilayer perceptron; hidden=(200,), feature_size adds a last hidden layer, norm=none, features=relu."""
    return _perceptron((("flatten", Flatten()),), input_shape, classes, hidden, feature_size, norm, features)


def _perceptron(
    layers: Layers,
    input_shape: tuple[int, ...],
    classes: int,
    hidden: tuple[int, ...],
    feature_size: int | None,
    norm: str,
    features: str,
) -> Layers:
    """Linear layers after what the first `layers` give."""
    widths = (output_size(layers, input_shape), *hidden, *([feature_size] if feature_size else []))
    for i, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        kind = features if i == len(widths) - 1 else "relu"
        layers += ((f"fc{i}", Linear(inputs, outputs)), *norm_layer(f"norm{i}", norm, outputs), *_activation(i, kind))
    return (*layers, ("classifier", Linear(widths[-1], classes)))


def tabular(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: tuple[int, ...] = (64, 32),
    feature_size: int | None = None,
    categories: tuple[int, ...] = (),
    embedding: int = 4,
    norm: str = "none",
    features: str = "relu",
) -> Layers:
    """MLP for tables; hidden=(64, 32), categories=() one-hot blocks at the end, each in embedding=4, norm=none."""
    if sum(categories) > input_shape[0]:
        raise FedgistError(f"categories name {sum(categories)} one-hot columns, and there are {input_shape[0]} in all")
    first: Layers = (("columns", Embeddings(categories, embedding) if categories else Flatten()),)
    return _perceptron(first, input_shape, classes, hidden, feature_size, norm, features)


def cnn1d(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 3,
    width: int = 32,
    kernel: int = 7,
    norm: str = "group",
) -> Layers:
    """CNN for signals: convolutions, pooling by two, a mean over time; depth=3, width=32, kernel=7, norm=group."""
    if kernel % 2 == 0:
        raise FedgistError(f"kernel must be odd, not {kernel}")
    channels = input_shape[0]
    layers: Layers = ()
    for i in range(1, depth + 1):
        layers += ((f"conv{i}", Conv1d(channels, width, kernel)), *_norm_relu(i, norm, width))
        layers += ((f"pool{i}", MaxPool1d()),) if i < depth else ()
        channels = width
    return (*layers, ("pool", GlobalAvgPool()), ("classifier", Linear(width, classes)))


def cnn(
    input_shape: tuple[int, int, int],
    classes: int,
    *,
    feature_size: int = 32,
    norm: str = "batch",
    features: str = "linear",
) -> Layers:
    """FedGen's CNN: two strided convolutions (Zhu et al. 2021); feature_size=32, norm=batch, features=linear."""
    layers: Layers = (
        ("conv1", Conv(input_shape[0], 6, kernel=3, stride=2, padding=1)),
        *_norm_relu(1, norm, 6),
        ("conv2", Conv(6, 16, kernel=3, stride=2, padding=1)),
        *_norm_relu(2, norm, 16),
        ("flatten", Flatten()),
    )
    last = Linear(output_size(layers, input_shape), feature_size)
    return (*layers, ("fc1", last), *_activation(3, features), ("classifier", Linear(feature_size, classes)))


def lenet5(input_shape: tuple[int, int, int], classes: int, *, norm: str = "none") -> Layers:
    """LeNet5, the usual form with ReLU and max pooling (after LeCun et al. 1998); norm=none."""
    layers: Layers = (
        ("conv1", Conv(input_shape[0], 6, kernel=5, padding=2)),
        *_norm_relu(1, norm, 6),
        ("pool1", MaxPool()),
        ("conv2", Conv(6, 16, kernel=5)),
        *_norm_relu(2, norm, 16),
        ("pool2", MaxPool()),
        ("flatten", Flatten()),
    )
    return (
        *layers,
        ("fc1", Linear(output_size(layers, input_shape), 120)),
        ("relu3", Relu()),
        ("fc2", Linear(120, 84)),
        ("relu4", Relu()),
        ("classifier", Linear(84, classes)),
    )


def lenet5_thesis(
    input_shape: tuple[int, int, int], classes: int, *, feature_size: int = 84, norm: str = "none"
) -> Layers:
    """LeNet5 with global pooling and tanh features (Berdoz 2022); feature_size=84, norm=none."""
    return (
        ("conv1", Conv(input_shape[0], 6, kernel=5, padding=2)),
        *_norm_relu(1, norm, 6),
        ("pool1", MaxPool()),
        ("conv2", Conv(6, 16, kernel=5, padding=2)),
        *_norm_relu(2, norm, 16),
        ("pool2", MaxPool()),
        ("conv3", Conv(16, 120, kernel=3, padding=1)),
        *_norm_relu(3, norm, 120),
        ("pool3", GlobalAvgPool()),
        ("fc1", Linear(120, feature_size)),
        ("tanh", Tanh()),
        ("classifier", Linear(feature_size, classes)),
    )


def convnet(
    input_shape: tuple[int, int, int], classes: int, *, depth: int = 3, width: int = 128, norm: str = "instance"
) -> Layers:
    """ConvNet of dataset condensation and FedDM (Zhao and Bilen 2023); depth=3, width=128, norm=instance."""
    channels = input_shape[0]
    layers: Layers = ()
    for i in range(1, depth + 1):
        # one channel: 28×28 becomes 32×32, so that grey and colour images give the same 2048 features
        padding = 3 if i == 1 and channels == 1 else 1
        conv = Conv(channels, width, kernel=3, padding=padding)
        layers += ((f"conv{i}", conv), *_norm_relu(i, norm, width), (f"pool{i}", AvgPool()))
        channels = width
    layers += (("flatten", Flatten()),)
    return (*layers, ("classifier", Linear(output_size(layers, input_shape), classes)))


def vgg13(input_shape: tuple[int, int, int], classes: int, *, width: int = 64, norm: str = "none") -> Layers:
    """VGG13 for 32×32 images, one linear layer (after Simonyan and Zisserman 2015); width=64, norm=none."""
    channels = input_shape[0]
    layers: Layers = ()
    for stage, factor in enumerate((1, 2, 4, 8, 8), start=1):
        for i in (2 * stage - 1, 2 * stage):
            conv = Conv(channels, factor * width, kernel=3, padding=1, he=True)  # torch's default would stay at chance
            layers += ((f"conv{i}", conv), *_norm_relu(i, norm, factor * width))
            channels = factor * width
        layers += ((f"pool{stage}", MaxPool()),)
    layers += (("flatten", Flatten()),)
    return (*layers, ("classifier", Linear(output_size(layers, input_shape), classes)))
