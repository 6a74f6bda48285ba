"""How much work a client's step is."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedgist.core import tree
from fedgist.core.work import Compute, Place, Scan, steps


def numbers_written(work: Compute | Scan, place: Place) -> int:
    """What the operations of a call, or of a scan's first step, write for one client, gradients included."""
    fn: Callable[..., Any]
    if isinstance(work, Compute):
        fn, args = work.fn, place.put(work.args)
    else:
        fn, args = work.step, (place.put(work.carry), next(iter(steps(work.xs, place))), *place.put(work.consts))
    with torch.no_grad(), _Counter() as counter:
        fn(*args)
    return counter.numbers


class _Counter(TorchDispatchMode):
    """Counts the numbers in what operations give back; a view writes none."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if not op.is_view:
            self.numbers += sum(leaf.numel() for leaf in tree.leaves(made) if isinstance(leaf, Tensor))
        return made
