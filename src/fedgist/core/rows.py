"""Messages of rows: what many clients send, as one message whose tensors have a row for each of them.

An engine that runs clients together leaves what they computed in stacks. What they send of it is packed, checked, cast,
counted and added up as it lies there, and a single message is taken out only where somebody looks at it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedgist.core.message import SCALARS, Params, partly, schema_of

Leaves = dict[str, Tensor]
"""A message as it lies on the wire: "field" or "field/name" -> tensor of the wire dtype, in the declared order."""


def find_stack(rows: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows these are, one after the other, or as much of one."""
    first = rows[0]
    stack, shape, stride = first._base, first.shape, first.stride()
    if stack is None or (stack.dtype, stack.shape[1:], stack.stride()[1:]) != (first.dtype, shape, stride):
        return None
    step, at = stack.stride(0), first.storage_offset()
    begin, beyond = divmod(int(at) - int(stack.storage_offset()), max(1, int(step)))
    for row in rows:
        if row._base is not stack or (row.storage_offset(), row.stride(), row.shape) != (at, stride, shape):
            return None
        at += step
    return None if beyond or not step else stack if len(rows) == len(stack) else stack.narrow(0, begin, len(rows))


def join(messages: Mapping[str, Any]) -> tuple[tuple[str, ...], Any] | None:
    """Messages of one type as one, and the sender of each row; None unless their tensors are the rows of stacks."""
    some = [(_first_tensor(msg), id) for id, msg in messages.items()]
    order = tuple(id for _, id in sorted((tensor.storage_offset(), id) for tensor, id in some if tensor is not None))
    if len(order) < len(messages):
        return None
    each = [messages[id] for id in order]
    fields: dict[str, Any] = {}
    for name, (kind, _) in schema_of(type(each[0])).items():
        values = [getattr(msg, name) for msg in each]
        if kind in SCALARS:
            fields[name] = values
        elif kind == Params:
            if any(value.keys() != values[0].keys() for value in values):
                return None
            fields[name] = {key: find_stack([value[key] for value in values]) for key in values[0]}
        else:
            fields[name] = find_stack(values)
        found = fields[name].values() if kind == Params else [fields[name]]
        if any(part is None for part in found):
            return None
    return order, partly(type(each[0]), fields)


def by_stack(messages: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Messages by the stack that the first tensor of each is in; one that is in none goes alone."""
    groups: dict[int | str, dict[str, Any]] = {}
    for sender, msg in messages.items():
        tensor = _first_tensor(msg)
        stack = None if tensor is None else tensor._base
        groups.setdefault(sender if stack is None else id(stack), {})[sender] = msg
    yield from groups.values()


def _first_tensor(msg: Any) -> Tensor | None:
    for value in vars(msg).values():
        if isinstance(value, Tensor):
            return value
        if isinstance(value, dict) and value:
            return next(iter(value.values()))  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True, eq=False)
class Part:
    """Packed messages of one form; where there are several, each leaf has a row for every sender."""

    ids: tuple[str, ...]
    leaves: Leaves

    @property
    def rows(self) -> bool:
        return len(self.ids) > 1

    def of(self, i: int) -> Leaves:
        return {name: leaf[i] for name, leaf in self.leaves.items()} if self.rows else self.leaves


class Replies(Mapping[str, Leaves]):
    """Packed messages by sender, in the order of their names; a stack's are taken apart when one is looked at."""

    def __init__(self, parts: Iterable[Part]):
        self.parts = tuple(parts)
        at = {id: (part, i) for part in self.parts for i, id in enumerate(part.ids)}
        self._at = {id: at[id] for id in sorted(at)}

    @classmethod
    def apart(cls, replies: Mapping[str, Leaves]) -> "Replies":
        """Messages that came one by one."""
        return cls(Part((id,), leaves) for id, leaves in sorted(replies.items()))

    def __getitem__(self, id: str) -> Leaves:
        part, i = self._at[id]
        return part.of(i)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)
