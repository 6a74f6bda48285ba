"""A user's own `nn.Module` as a model.

The module's own weights are the start. Its parameters and floating-point buffers become the weights; integer buffers
(`num_batches_tracked`) are not learned and stay as they are. Parameters with `requires_grad=False` are not trained.
Features are what enters the last `nn.Linear` in the order of registration, or the submodule that the user names.

What Dropout drops follows from one more number among the weights, `DRAWS`: the run's seed gives it, every training step
counts it up, and like the statistics of a BatchNorm it is averaged where models are. So a run repeats itself.
"""

import copy
import functools
import threading
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from fedgist.core.errors import FedgistError, unknown
from fedgist.core.message import Params
from fedgist.core.rng import Rng, uniform
from fedgist.core.task import Model, Output, Tap
from fedgist.models.layers import batch_norm
from fedgist.models.model import checked_shape

DRAWS, MOST_DRAWS = "dropout.draws", 2**23
"""A counter, whole numbers that float32 can tell apart."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def from_module(
    module: nn.Module, input_shape: Sequence[int], classes: int, classifier: str | None = None
) -> "ModuleModel":
    """A model that runs `module`; `classifier` names the submodule that turns features into logits (else the last
    Linear)."""
    return ModuleModel(module, checked_shape(input_shape), classes, classifier)


class _Worker:
    """One thread's copy of the module: `functional_call` swaps tensors in place, so threads must not share one."""

    def __init__(self, template: nn.Module, classifier: str, device: torch.device):
        self.module = copy.deepcopy(template)
        if any(tensor.device != device for tensor in (*template.parameters(), *template.buffers())):
            self.module.to(device)  # only then: a thread that first meets the module under vmap may not move it
        self.classifier = self.module.get_submodule(classifier)
        self.features: Tensor | None = None
        self.buffers: Params | None = None
        self.tap: Tap | None = None
        self.draws: Tensor | None = None
        self.classifier.register_forward_pre_hook(self._keep_features)
        for name, part in self.module.named_modules():
            if _has_statistics(part):
                # torch's own forward updates the statistics in place, which vmap refuses for shared buffers
                part.forward = functools.partial(self._batch_norm, name, part)
            elif _drops(part):
                part.forward = functools.partial(self._dropout, Rng(0)("dropout", name).seed, part)

    def _keep_features(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        self.features = args[0]

    def _batch_norm(self, name: str, part: Any, x: Tensor) -> Tensor:
        names = f"{name}.running_mean", f"{name}.running_var"
        mean, variance = part.running_mean, part.running_var
        return batch_norm(
            x, part.weight, part.bias, mean, variance, names, self.buffers, self.tap, part.momentum, part.eps
        )

    def _dropout(self, layer: int, part: Any, x: Tensor) -> Tensor:
        """torch's dropout with numbers of its own: of each value, or (1d, 2d, 3d) of each channel."""
        if self.buffers is None or self.draws is None:
            return x
        shape = x.shape if type(part) is nn.Dropout else (*x.shape[:2], *[1] * (x.dim() - 2))
        kept = uniform(self.draws.round().long() ^ layer, tuple(shape)) >= part.p
        return x * kept / max(1 - part.p, 1e-12)

    def run(self, w: Params, x: Tensor, buffers: Params | None, tap: Tap | None) -> tuple[Tensor | None, Any]:
        """(features, output); new statistics go into `buffers`."""
        self.draws = w.get(DRAWS)
        w = {name: tensor for name, tensor in w.items() if name != DRAWS}
        train = buffers is not None
        if self.module.training != train:
            self.module.train(train)
        self.buffers, self.tap = buffers, tap
        try:
            output = functional_call(self.module, w, (x,))
            return self.features, output
        finally:
            self.features = self.buffers = self.tap = self.draws = None


@final
class ModuleModel(Model):
    """Equal only to itself: what a module computes cannot be compared. Use one object for all clients that share it."""

    def __init__(self, module: nn.Module, input_shape: tuple[int, ...], classes: int, classifier: str | None = None):
        self.name = type(module).__name__
        self.input_shape = input_shape
        self.classes = classes
        self._template = copy.deepcopy(module)  # later changes to the user's object must not reach running clients
        self._classifier = _find_classifier(self._template, classifier)
        _refuse_what_is_not_pure(self._template)
        parameters = {name: p for name, p in self._template.named_parameters() if p.is_floating_point()}
        buffers = {name: b for name, b in self._template.named_buffers() if b.is_floating_point()}
        self._start = {name: tensor.detach() for name, tensor in (parameters | buffers).items()}
        self._buffers = frozenset(buffers) | {name for name, p in parameters.items() if not p.requires_grad}
        # Buffers of other layers may be changed in place during training: they get a copy to change.
        statistics = {
            f"{name}.{key}"
            for name, part in self._template.named_modules()
            if _has_statistics(part)
            for key in ("running_mean", "running_var")
        }
        self._other_buffers = tuple(name for name in buffers if name not in statistics)
        self._draws = any(map(_drops, self._template.modules()))
        self._workers = threading.local()
        self._feature_size = self._probe()

    def init(self, rng: Rng) -> Params:
        """Copies of the weights that the module came with, whatever `rng`, which says only what Dropout drops."""
        own = {name: tensor.clone() for name, tensor in self._start.items()}
        return own | ({DRAWS: rng("dropout").integers(MOST_DRAWS // 2).float()} if self._draws else {})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {name: tuple(tensor.shape) for name, tensor in self._start.items()}
        return own | ({DRAWS: ()} if self._draws else {})

    @property
    def buffers(self) -> frozenset[str]:
        return self._buffers | ({DRAWS} if self._draws else set())

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Only the classifier: the order of the other layers is known to the module alone."""
        return {self._classifier: (self._feature_size,)}

    def __call__(
        self, w: Params, x: Tensor, train: bool = False, start: str | None = None, tap: Tap | None = None
    ) -> Output:
        if start is not None:
            self._check_layer(start)
            return Output(x, self.head(w, x), {})
        new: Params | None = {name: w[name].clone() for name in self._other_buffers} if train else None
        own = {name: w[name] for name in self._start} | (new or {})
        if train and self._draws:
            own |= {DRAWS: w[DRAWS]}
        features, logits = self._worker(x.device).run(own, x, new, tap)
        if new is not None and self._draws:
            new[DRAWS] = (w[DRAWS] + 1) % MOST_DRAWS
        assert features is not None  # the probe has seen the classifier called
        return Output(features, logits, new or {})

    def head(self, w: Params, features: Tensor) -> Tensor:
        worker = self._worker(features.device)
        prefix = f"{self._classifier}."
        own = {name.removeprefix(prefix): w[name] for name in self._start if name.startswith(prefix)}
        try:
            logits: Tensor = functional_call(worker.classifier, own, (features,))
            return logits
        finally:
            worker.features = None

    def module(self, w: Params) -> nn.Module:
        """The user's module with these weights; its integer buffers are those that it came with."""
        module = copy.deepcopy(self._template)
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name in self._start:
                own[name].copy_(w[name])
        return module

    def _worker(self, device: torch.device) -> _Worker:
        workers = vars(self._workers)  # this thread's own, one for each device: integer buffers must lie where x lies
        key = str(device)
        if key not in workers:
            workers[key] = _Worker(self._template, self._classifier, device)
        worker: _Worker = workers[key]
        return worker

    def _check_layer(self, layer: str) -> None:
        if layer != self._classifier:
            raise FedgistError(
                f"a model made from a module can be cut only at its classifier {self._classifier!r}, not at {layer!r}"
            )

    def _probe(self) -> int:
        """Run two inputs through the module once, to find mistakes now and with words; gives the feature size."""
        any_weight = next(iter(self._start.values()))
        x = Rng(0)("probe").uniform(2, *self.input_shape).to(any_weight.device, any_weight.dtype)
        with torch.no_grad():
            try:
                features, logits = self._worker(x.device).run(self._start, x, None, None)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                shape = "×".join(map(str, self.input_shape))
                raise FedgistError(f"{self.name} cannot run on inputs of {shape}: {error}") from error
            if not isinstance(logits, Tensor) or tuple(logits.shape) != (2, self.classes):
                got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
                raise FedgistError(
                    f"{self.name} must return a score for each of {self.classes} classes, [batch, {self.classes}], but "
                    f"for 2 inputs gave {got}"
                )
            if features is None or features.dim() != 2:
                raise FedgistError(
                    f"the layer {self._classifier!r} of {self.name} is not given [batch, features]; "
                    "name the submodule that turns features into logits with classifier=..."
                )
            if not torch.allclose(self.head(self._start, features), logits, rtol=1e-3, atol=1e-5):
                raise FedgistError(
                    f"{self.name} does not return what its layer {self._classifier!r} gives; return that layer's "
                    "output as it is (no softmax), or name the submodule that gives the logits with classifier=..."
                )
        return features.shape[1]


def is_dense(module: nn.Module) -> bool:
    """Whether all its weights are those of linear and norm layers."""
    weighted = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
    return all(isinstance(part, (nn.Linear, nn.LayerNorm, nn.BatchNorm1d)) for part in weighted)


def _has_statistics(part: nn.Module) -> bool:
    return type(part) in _BATCH_NORMS and getattr(part, "running_mean", None) is not None


def _drops(part: nn.Module) -> bool:
    return type(part) in _DROPOUTS and getattr(part, "p", 0) > 0


def _find_classifier(module: nn.Module, classifier: str | None) -> str:
    parts = dict(module.named_modules())
    del parts[""]
    if classifier is not None:
        if classifier not in parts:
            raise unknown(f"submodule of {type(module).__name__}", classifier, parts)
        return classifier
    if isinstance(module, nn.Linear):
        raise FedgistError("a model that is an nn.Linear itself has no name for it: put it into an nn.Sequential")
    linear = [name for name, part in parts.items() if isinstance(part, nn.Linear)]
    if not linear:
        raise FedgistError(
            f"{type(module).__name__} has no nn.Linear; name the submodule that gives the logits with classifier=..."
        )
    return linear[-1]


def _refuse_what_is_not_pure(module: nn.Module) -> None:
    for name, part in module.named_modules():
        inside = isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0
        if inside or (isinstance(part, _DropoutNd) and part.p > 0 and not _drops(part)):
            raise FedgistError(
                f"layer {name!r} is {type(part).__name__}, which draws from torch's global generator: runs would not "
                f"repeat; set its {'dropout' if inside else 'p'} to 0, and put an nn.Dropout beside it if wanted"
            )
        if _has_statistics(part) and getattr(part, "momentum", None) is None:
            raise FedgistError(
                f"layer {name!r} averages its statistics over all batches; give it a momentum such as 0.1"
            )
