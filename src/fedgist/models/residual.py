"""Residual architectures: ResNet9 and ResNet18 of the representation-sharing thesis, and ResNet18 for small images.

The two families differ in the block: the usual one (He et al. 2016) adds and then applies ReLU; the thesis (Berdoz
2022) applies ReLU before the addition. Convolutions have no bias where a norm layer follows, which would cancel it.
"""

from fedgist.models.layers import Conv, GlobalAvgPool, Layers, Linear, MaxPool, Relu, Residual, Tanh, norm_layer


def _conv_norm(suffix: str, kind: str, conv: tuple[int, int, int], stride: int = 1) -> Layers:
    """A convolution that keeps the size (at stride 1) and its norm layer; `conv` is (inputs, outputs, kernel)."""
    inputs, outputs, kernel = conv
    layer = Conv(inputs, outputs, kernel, stride, padding=kernel // 2, bias=kind == "none")
    return ((f"conv{suffix}", layer), *norm_layer(f"norm{suffix}", kind, outputs))


def _block(kind: str, inputs: int, outputs: int, stride: int = 1, relu_before_sum: bool = False) -> Residual:
    body = (
        *_conv_norm("1", kind, (inputs, outputs, 3), stride),
        ("relu1", Relu()),
        *_conv_norm("2", kind, (outputs, outputs, 3)),
    )
    if relu_before_sum:
        body = (*body, ("relu2", Relu()))
    return Residual(body, () if stride == 1 else _conv_norm("_shortcut", kind, (inputs, outputs, 1), stride))


def _stages(kind: str, channels: int, width: int, relu_before_sum: bool) -> Layers:
    """The trunk of both ResNet18: four stages of two blocks, each stage but the first halving the image."""
    layers: Layers = (*_conv_norm("1", kind, (channels, width, 3)), ("relu1", Relu()))
    inputs = width
    for i in range(8):
        outputs = width * 2 ** (i // 2)
        layers += ((f"block{i + 1}", _block(kind, inputs, outputs, outputs // inputs, relu_before_sum)),)
        if not relu_before_sum:
            layers += ((f"relu{i + 2}", Relu()),)
        inputs = outputs
    return (*layers, ("pool", GlobalAvgPool()))


def _tanh_head(inputs: int, feature_size: int, classes: int) -> Layers:
    """The end of the thesis's networks: features bounded by tanh."""
    return (
        ("fc1", Linear(inputs, feature_size)),
        ("tanh", Tanh()),
        ("classifier", Linear(feature_size, classes)),
    )


def resnet9(
    input_shape: tuple[int, int, int],
    classes: int,
    *,
    width: int = 64,
    feature_size: int = 128,
    norm: str = "batch",
) -> Layers:
    """ResNet9 with tanh features (Berdoz 2022); width=64, feature_size=128, norm=batch."""
    return (
        *_conv_norm("1", norm, (input_shape[0], width, 3)),
        ("relu1", Relu()),
        *_conv_norm("2", norm, (width, 2 * width, 3)),
        ("relu2", Relu()),
        ("pool2", MaxPool()),
        ("block1", _block(norm, 2 * width, 2 * width, relu_before_sum=True)),
        *_conv_norm("3", norm, (2 * width, 4 * width, 3)),
        ("relu3", Relu()),
        ("pool3", MaxPool()),
        *_conv_norm("4", norm, (4 * width, 4 * width, 3)),
        ("relu4", Relu()),
        ("pool4", MaxPool()),
        ("block2", _block(norm, 4 * width, 4 * width, relu_before_sum=True)),
        ("pool5", MaxPool()),
        ("pool", GlobalAvgPool()),
        *_tanh_head(4 * width, feature_size, classes),
    )


def resnet18_thesis(
    input_shape: tuple[int, int, int],
    classes: int,
    *,
    width: int = 64,
    feature_size: int = 256,
    norm: str = "batch",
) -> Layers:
    """ResNet18 with ReLU before the sum and tanh features (Berdoz 2022); width=64, feature_size=256, norm=batch."""
    trunk = _stages(norm, input_shape[0], width, relu_before_sum=True)
    return (*trunk, *_tanh_head(8 * width, feature_size, classes))


def resnet18(input_shape: tuple[int, int, int], classes: int, *, width: int = 64, norm: str = "batch") -> Layers:
    """ResNet18 for small images: 3×3 stem, no first pooling (after He et al. 2016); width=64, norm=batch."""
    trunk = _stages(norm, input_shape[0], width, relu_before_sum=False)
    return (*trunk, ("classifier", Linear(8 * width, classes)))
