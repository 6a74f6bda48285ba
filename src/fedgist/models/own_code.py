"""A model that is code of an operator's own, `package:factory`, and what everybody else knows of it.

Code is named by whoever runs it, on a command line, and by nobody else: a site announces how many features its model
has and a fingerprint of its tensors, as `module:features=64:form=0123456789abcdef`, and no name that comes from another
machine is ever imported. Who named code with the same fingerprint can average weights.
"""

import hashlib
import importlib
import re
from dataclasses import dataclass
from typing import NoReturn, final

import torch
from torch import Tensor, nn

from fedgist.core.errors import FedgistError
from fedgist.core.message import Params
from fedgist.core.rng import Rng
from fedgist.core.task import Model, Output, Tap
from fedgist.models import registry
from fedgist.models.torch_module import ModuleModel, from_module

ELSEWHERE = "module"
"""What a model is called where its code is not."""
ANNOUNCED = re.compile(rf"{ELSEWHERE}:features=([1-9][0-9]{{0,6}})(?::form=[0-9a-f]{{16}})?")
MOST_FEATURES = 1 << 20


def is_code(spec: str) -> bool:
    """Whether a model is code, `package:factory`; what begins with the name of a model here has options behind it."""
    package, _, factory = spec.partition(":")
    named = factory.isidentifier() and all(part.isidentifier() for part in package.split("."))
    return named and package not in registry.ARCHITECTURES


def load(spec: str, shape: tuple[int, ...], classes: int) -> ModuleModel:
    """What `factory(shape, classes)` of a package makes, an `nn.Module`; it begins at the same weights every time."""
    package, _, factory = spec.partition(":")
    try:
        make = getattr(importlib.import_module(package), factory)
    except (ImportError, AttributeError) as error:
        raise FedgistError(
            f"--model {spec}: there is no such factory ({error}); it has to be in a package that this Python has "
            "installed, or in a folder that PYTHONPATH names"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = make(shape, classes)
    if not isinstance(made, nn.Module):
        raise FedgistError(f"--model {spec}: it has to return an nn.Module, not a {type(made).__name__}")
    return from_module(made, shape, classes)


def announced(model: ModuleModel) -> str:
    """What others are told of a model that is code: equal for those whose tensors have the same names and forms."""
    tensors = [(name, *shape, name in model.buffers) for name, shape in model.shapes.items()]
    form = hashlib.sha256(repr((tensors, model.classifier)).encode()).hexdigest()[:16]
    return f"{ELSEWHERE}:features={model.feature_size}:form={form}"


def from_afar(spec: str, shape: tuple[int, ...], classes: int) -> "Elsewhere":
    """What can be known of a model that was announced so."""
    found = ANNOUNCED.fullmatch(spec)
    if found is None or int(found[1]) > MOST_FEATURES:
        raise FedgistError(f"a model that is code is announced as {ELSEWHERE}:features=64:form=…, not as {spec}")
    return Elsewhere(shape, classes, int(found[1]))


@final
@dataclass(frozen=True)
class Elsewhere(Model):
    """A model whose code is at its site alone; nothing can be computed with it here."""

    input_shape: tuple[int, ...]
    classes: int
    features: int
    name: str = ELSEWHERE

    def init(self, rng: Rng) -> Params:
        self._refuse()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {}

    @property
    def buffers(self) -> frozenset[str]:
        return frozenset()

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"classifier": (self.features,)}

    def __call__(
        self, w: Params, x: Tensor, train: bool = False, start: str | None = None, tap: Tap | None = None
    ) -> Output:
        self._refuse()

    def head(self, w: Params, features: Tensor) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FedgistError(
            "a model is code that is not here: name it here, too, with --model package:factory, or take a method whose "
            "clients keep their models, as repshare or feddistill"
        )
