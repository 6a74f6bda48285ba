"""What a Python caller brings: data of named or numbered clients, as tensors or data sets; one model or several."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedgist.core.errors import FedgistError, check_known
from fedgist.experiments.config import OWN

Pair = tuple[Tensor, Tensor]


def by_client(data: Any) -> dict[str, Any]:
    """Each client's data under its name; those without names are numbered, so that sorting names sorts clients."""
    if isinstance(data, Mapping):
        for name in data:
            if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", name)):
                raise FedgistError(f"a client's name is 1 to 60 letters, digits, dots, - and _, not {name!r}")
        return {name: data[name] for name in sorted(data)}
    if not isinstance(data, Sequence):
        raise FedgistError(f"data is a list, one item a client, or a dict by their names, not {type(data).__name__}")
    width = len(str(len(data) - 1))
    return {f"{i:0{width}d}": one for i, one in enumerate(data)}


def pair(owner: str, both: Any, device: str) -> Pair:
    """Inputs and labels of one client, or of the test set: tensors, or all items of a data set or of a loader's."""
    if isinstance(both, DataLoader):
        both = both.dataset
    if isinstance(both, TensorDataset):
        both = both.tensors
    elif isinstance(both, Dataset):
        items = list(both) if isinstance(both, IterableDataset) else [both[i] for i in range(len(both))]  # type: ignore[arg-type]
        both = _stacked(owner, items)
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise FedgistError(
            f"{owner} must be a pair (inputs, labels), a Dataset or a DataLoader, not {type(both).__name__}; data is a "
            "list of them, or a dict by clients' names"
        )
    return _checked(owner, both[0], both[1], device)


def _stacked(owner: str, items: list[Any]) -> tuple[Tensor, Tensor]:
    try:
        return torch.stack([torch.as_tensor(x) for x, _ in items]), torch.tensor([int(y) for _, y in items])
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedgistError(
            f"{owner}: every item of its data set must be (input, label), a tensor of one shape and a whole number "
            f"({error})"
        ) from error


def _checked(owner: str, x: Any, y: Any, device: str) -> Pair:
    x, y = _tensor(x), _tensor(y)
    if x is None or x.ndim < 2 or not x.is_floating_point():
        got = "what is no array of numbers" if x is None else f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
        raise FedgistError(
            f"{owner}: inputs must be floating-point [samples, columns] or [samples, channels, …], pixels as x / 255, "
            f"not {got}"
        )
    if y is None or y.ndim != 1 or y.is_floating_point() or len(x) != len(y) or (len(y) and int(y.min()) < 0):
        raise FedgistError(f"{owner}: labels must be {len(x)} whole numbers from 0, one for each input")
    if len(gaps := (~x.isfinite()).flatten(1).any(1).nonzero()):
        raise FedgistError(
            f"{owner}: sample {int(gaps[0])} has a value that is not finite (NaN or infinity), as have {len(gaps)} of "
            f"{len(x)}; fill in or leave out what is missing"
        )
    return x.to(device, torch.float32), y.to(device, torch.int64)


def _tensor(values: Any) -> Tensor | None:
    """Whatever numpy takes for an array of numbers: lists and tables of pandas, too."""
    if isinstance(values, Tensor):
        return values
    try:  # torch wants an array that may be written, and no negative strides
        return torch.as_tensor(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError, RuntimeError):
        return None


Chosen = str | nn.Module


def architectures(model: Any, clients: Sequence[str] | None) -> tuple[list[str], dict[str, nn.Module]]:
    """The names of the models in a caller's `model`, the server's first, and the modules among them.

    Several are one a client (in turn where a data set is split), or by the `clients`' names.
    """
    if isinstance(model, Mapping):
        if clients is None:
            raise FedgistError("model by clients' names needs data by clients' names; give a list of models")
        for name in model:
            check_known("client with a model", name, clients)
        if lacking := set(clients) - model.keys():
            raise FedgistError(f"model has none for the client {min(lacking)!r}")
        model = [model[name] for name in clients]
    one = not isinstance(model, Sequence) or isinstance(model, str)
    chosen = [model] if one else list(model)
    if not chosen:
        raise FedgistError("model is an empty list")
    names: dict[int, str] = {}  # of modules by their ids: one that several clients have has one name
    for each in chosen:
        if not isinstance(each, str | nn.Module):
            raise FedgistError(f"model must be a module or the name of a model, not {type(each).__name__}")
        if isinstance(each, nn.Module):
            names.setdefault(id(each), OWN if one else f"{OWN}{len(names) + 1}")
    modules = {names[id(each)]: each for each in chosen if isinstance(each, nn.Module)}
    return [each if isinstance(each, str) else names[id(each)] for each in chosen], modules
