"""A model and its weights as an `nn.Module`, for those who use what was learned."""

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor, nn

from fedgist.core.message import Params
from fedgist.core.task import Model
from fedgist.models.torch_module import ModuleModel


def as_module(model: Model, w: Params) -> nn.Module:
    """In eval mode, on the CPU, with weights of its own: class scores of normalised inputs."""
    module = model.module(w) if isinstance(model, ModuleModel) else Net(model, w)
    return module.cpu().eval()


@final
class Net(nn.Module):
    """A built-in model with weights, whose `state_dict` has the model's own names."""

    def __init__(self, model: Model, w: Params):
        super().__init__()
        self._model = model
        for name, tensor in w.items():
            path, _, leaf = name.rpartition(".")
            part: nn.Module = self
            for step in path.split("."):
                if step not in part._modules:
                    part.add_module(step, nn.Module())
                part = part.get_submodule(step)
            own = tensor.detach().clone()
            if name in model.buffers:
                part.register_buffer(leaf, own)
            else:
                part.register_parameter(leaf, nn.Parameter(own))

    def forward(self, x: Tensor) -> Tensor:
        output = self._model({**dict(self.named_parameters()), **dict(self.named_buffers())}, x, self.training)
        for name, new in output.buffers.items():  # in train mode, as BatchNorm of torch does
            self.get_buffer(name).copy_(new.detach())
        return output.logits


@final
class Normalised(nn.Module):
    """A module that is given pixels from 0 to 1 and normalises them as the training data was."""

    def __init__(self, module: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.module = module
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (part.view(-1, *[1] * (x.ndim - 2)) for part in (self.get_buffer("mean"), self.get_buffer("std")))
        return cast(Tensor, self.module((x - mean) / std))
