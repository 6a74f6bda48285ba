"""Models by name: `build("lenet5", (1, 28, 28), 10, norm="batch")`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from fedgist.core.errors import FedgistError, unknown
from fedgist.models.feed_forward import FEATURES, cnn, cnn1d, convnet, lenet5, lenet5_thesis, mlp, tabular, vgg13
from fedgist.models.layers import NORMS, Layers
from fedgist.models.model import MOST_INPUTS, LayeredModel, checked_shape, is_count
from fedgist.models.residual import resnet9, resnet18, resnet18_thesis
from fedgist.options import keywords

ARCHITECTURES: dict[str, Callable[..., Layers]] = {
    "mlp": mlp,
    "tabular": tabular,
    "cnn1d": cnn1d,
    "cnn": cnn,
    "lenet5": lenet5,
    "lenet5-thesis": lenet5_thesis,
    "convnet": convnet,
    "vgg13": vgg13,
    "resnet9": resnet9,
    "resnet18": resnet18,
    "resnet18-thesis": resnet18_thesis,
}

ANY, TABLES, SIGNALS, IMAGES = range(4)
FORMS = {
    TABLES: "tables (columns)",
    SIGNALS: "signals (channels × length)",
    IMAGES: "images (channels × height × width)",
}
RANKS = {"mlp": ANY, "tabular": TABLES, "cnn1d": SIGNALS}
"""How many dimensions an input of a model has; where nothing is said, it is an image."""

UP_TO = f"at most {MOST_INPUTS:,}"
WORDS = {"norm": NORMS, "features": FEATURES}
"""Options that are one of some words."""


def build(name: str, input_shape: Sequence[int], classes: int, **options: Any) -> LayeredModel:
    """The named model for inputs of `input_shape`, channels first; equal arguments give the same object."""
    if name not in ARCHITECTURES:
        raise unknown("model", name, ARCHITECTURES)
    shape = checked_shape(input_shape)
    if RANKS.get(name, IMAGES) not in (len(shape), ANY):
        fitting = [other for other in ARCHITECTURES if RANKS.get(other, IMAGES) in (len(shape), ANY)]
        form = "×".join(map(str, shape))
        raise FedgistError(
            f"{name} takes {FORMS[RANKS.get(name, IMAGES)]}, and an input here has the form {form}: take "
            f"{', '.join(fitting)}"
        )
    if not is_count(classes):
        raise FedgistError(f"the number of classes must be a positive whole number, {UP_TO}, not {classes!r}")
    return _build(name, shape, classes, tuple(_chosen(name, options).items()))


def spell_out(name: str, **options: Any) -> str:
    """A model as `mlp:hidden=200x100:norm=none`, with all its options, so that other defaults do not change it."""
    chosen = {key: value for key, value in _chosen(name, options).items() if value not in (None, ())}
    texts = [f"{key}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in chosen.items()]
    return ":".join([name, *texts])


def _chosen(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a model, checked."""
    defaults = keywords(ARCHITECTURES[name])
    for option in options:
        if option not in defaults:
            raise unknown(f"option of model {name}", option, defaults)
    return {key: _checked(name, key, options.get(key, default), default) for key, default in defaults.items()}


@cache
def _build(name: str, input_shape: tuple[int, ...], classes: int, options: tuple[tuple[str, Any], ...]) -> LayeredModel:
    try:
        return LayeredModel(name, input_shape, classes, ARCHITECTURES[name](input_shape, classes, **dict(options)))
    except FedgistError as error:
        shape = "×".join(map(str, input_shape))
        raise FedgistError(
            f"{name} does not fit inputs of {shape}: {error}; take another model or larger inputs"
        ) from error


def _checked(name: str, option: str, value: Any, default: Any) -> Any:
    """An option is a norm, a kind of features, some widths or a number, as its name or its default shows."""
    if option in WORDS:
        if value not in WORDS[option]:
            raise unknown(option, str(value), WORDS[option])
    elif isinstance(default, tuple):
        value = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        if not all(is_count(n) for n in value):
            raise FedgistError(f"{option} of model {name} must be positive whole numbers, {UP_TO}, not {value!r}")
    elif not (is_count(value) or (value is None and default is None)):
        raise FedgistError(f"{option} of model {name} must be a positive whole number, {UP_TO}, not {value!r}")
    return value
