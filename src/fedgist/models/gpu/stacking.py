"""How kernels whose tensors begin with clients run under vmap: its clients make the first dimension longer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def run_stacked(function: Callable[..., Any], info: Any, dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
    """A vmap rule: the outputs of `function`, a tensor or several, and where their clients are.

    A tensor that all clients share is not copied.
    """
    size = info.batch_size

    def merge(each: Any, dim: int | None) -> Any:
        if not isinstance(each, Tensor):
            return each
        return (each.expand(size, *each.shape) if dim is None else each.movedim(dim, 0)).flatten(0, 1)

    outputs = function(*(merge(each, dim) for each, dim in zip(inputs, dims, strict=True)))
    if isinstance(outputs, Tensor):
        return outputs.unflatten(0, (size, -1)), 0
    return tuple(each.unflatten(0, (size, -1)) for each in outputs), (0,) * len(outputs)
