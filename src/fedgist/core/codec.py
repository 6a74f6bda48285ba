"""The codec: messages as bytes, checked before sending and before receiving, and sums of them.

The bytes are a safetensors file whose metadata names the message. A receiver knows which message it expects and how
large each dimension may be, and checks tag, names, dtypes, shapes and byte counts before it allocates anything, then
the values; nothing from the wire is ever executed. In one process values are not looked at: nobody there is a stranger,
and on a GPU every look would wait for it.
"""

import functools
import json
import math
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fedgist.core.message import DTYPES, SCALARS, Bounds, Exactly, Params, Wire, WireError, schema_of, tag_of
from fedgist.core.rows import Leaves as Leaves
from fedgist.core.rows import Part
from fedgist.core.work import Place

T = TypeVar("T")

MOST_SIDES = 64
"""Dimensions of a tensor, as many as torch knows: to multiply more could take very long."""


@dataclass(frozen=True)
class Size:
    """What a message costs: exact bytes, and the numbers that the paper counts."""

    header: int
    payload: int
    numbers: int

    @property
    def exact(self) -> int:
        """All bytes."""
        return self.header + self.payload

    @property
    def paper(self) -> int:
        """The paper's count: numbers times four."""
        return 4 * self.numbers


Described = tuple[str, torch.dtype, tuple[int, ...]]
"""The name, dtype and shape of a leaf."""


def _header(cls: type, described: Iterable[Described]) -> bytes:
    """The length prefix and JSON header of a safetensors file, padded to eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"fedgist": tag_of(cls)}}
    end = 0
    for name, dtype, shape in described:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _describe(leaves: Leaves, rows: bool = False) -> tuple[Described, ...]:
    """The leaves of one message; with `rows`, of which each holds many."""
    return tuple([(name, leaf.dtype, leaf.shape[1:] if rows else leaf.shape) for name, leaf in leaves.items()])


def size(cls: type, leaves: Leaves, rows: bool = False) -> Size:
    """The size of a packed message, without encoding it; with `rows`, that of each of many."""
    return _size(cls, _describe(leaves, rows))


@functools.lru_cache(maxsize=256)  # a run sends few forms of message, and sends them very often
def _size(cls: type, described: tuple[Described, ...]) -> Size:
    schema = schema_of(cls)
    return Size(
        header=len(_header(cls, described)),
        payload=sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in described),
        numbers=sum(math.prod(shape) for name, _, shape in described if schema[name.split("/")[0]][1].paper),
    )


class Codec:
    """Packs and unpacks messages under the bounds that both ends agreed on; what is received lies in `place`."""

    def __init__(self, bounds: Bounds, place: Place = Place()):
        self.bounds = bounds
        self.place = place
        self._layouts: dict[type, dict[str, tuple[Wire, tuple[int | str, ...]]]] = {}
        # What has passed passes again; what is refused is not remembered.
        self._check_once: Callable[[type, tuple[Described, ...]], None] = functools.lru_cache(maxsize=256)(self._check)

    def layout(self, cls: type) -> dict[str, tuple[Wire, tuple[int | str, ...]]]:
        """Wire name -> (how it travels, its shape with names for what may vary)."""
        if cls not in self._layouts:
            made: dict[str, tuple[Wire, tuple[int | str, ...]]] = {}
            for name, (kind, declared) in schema_of(cls).items():
                if kind == Params:
                    template = self.bounds.get(typing.cast(str, declared.shape))
                    if not isinstance(template, Mapping):
                        raise TypeError(f"{tag_of(cls)}.{name}: no template {declared.shape!r} is bound")
                    made.update({f"{name}/{key}": (declared, tuple(shape)) for key, shape in template.items()})
                else:
                    made[name] = (declared, tuple(size for side in declared.shape for size in self._sides(side)))
            self._layouts[cls] = made
        return self._layouts[cls]

    def _sides(self, side: int | str) -> tuple[int | str, ...]:
        """What a part of a declared shape stands for: exact sizes, or the name of one that may vary."""
        bound = self.bounds.get(side) if isinstance(side, str) else None
        return bound if isinstance(bound, tuple) else (int(bound),) if isinstance(bound, Exactly) else (side,)

    def _check(self, cls: type, described: tuple[Described, ...]) -> None:
        """The one test of what may travel: used before sending and, on the header alone, before receiving."""
        layout = self.layout(cls)
        found = {name: (dtype, shape) for name, dtype, shape in described}
        if found.keys() != layout.keys():
            odd = sorted(found.keys() ^ layout.keys())[:3]
            raise WireError(f"{tag_of(cls)}: fields differ from the declaration at {', '.join(map(repr, odd))}")
        sizes: dict[str, int] = {}
        for name, (declared, shape) in layout.items():
            dtype, actual = found[name]
            if dtype not in declared.dtypes:
                raise WireError(f"{tag_of(cls)}.{name}: {dtype} was not declared")
            fits = len(actual) == len(shape) and all(
                have == (want if isinstance(want, int) else sizes.setdefault(want, have))
                for have, want in zip(actual, shape, strict=True)
            )
            if not fits:
                raise WireError(f"{tag_of(cls)}.{name}: shape {tuple(actual)} does not fit {shape}")
        for dimension, value in sizes.items():
            bound = self.bounds.get(dimension)
            if not isinstance(bound, int):
                raise TypeError(f"{tag_of(cls)}: no bound for the dimension {dimension!r}")
            if not 0 <= value <= bound:
                raise WireError(f"{tag_of(cls)}: {dimension} = {value} is above the agreed {bound}")

    def pack(self, msg: Any, *, summed: bool = False, rows: bool = False) -> Leaves:
        """The message as it would lie on the wire: checked, cast, and sharing nothing with the sender.

        With `summed`, its additive fields may share memory with the sender, who does nothing until they are added up.
        With `rows` it is many messages, each of which is a row of its fields (rows.py).
        """
        cls, leaves = type(msg), {}
        for name, (kind, declared) in schema_of(cls).items():
            value = getattr(msg, name)
            if kind in SCALARS:  # on the host, where the receiver reads it
                number = torch.tensor(value)
                leaves[name] = number if number.dtype in declared.dtypes else number.to(declared.dtypes[0])
                continue
            own = not (summed and declared.additive)
            for key, tensor in value.items() if kind == Params else [("", value)]:
                sent = tensor.detach().to(self.place.device, declared.dtype_of(tensor), copy=own)
                leaves[f"{name}/{key}" if key else name] = sent.contiguous()
        self._check_once(cls, _describe(leaves, rows))
        return {name: leaves[name] for name in self.layout(cls)}

    def values(self, cls: type, leaves: Leaves, additive: bool | None = None) -> dict[str, Any]:
        """Field values as a receiver sees them: tensors where and as it computes, scalars as Python numbers.

        With `additive` given, only the fields of that kind.
        """
        seen: dict[str, Any] = {}
        for name, (kind, declared) in schema_of(cls).items():
            if additive is not None and declared.additive != additive:
                continue
            put = self._put_as_it_came if torch.float64 in declared.dtypes else self.place.put
            if kind == Params:
                prefix = name + "/"
                found = {key: leaf for key, leaf in leaves.items() if key.startswith(prefix)}
                seen[name] = {key.removeprefix(prefix): put(leaf) for key, leaf in found.items()}
            else:
                seen[name] = kind(leaves[name].item()) if kind in SCALARS else put(leaves[name])
        return seen

    def _put_as_it_came(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.place.device)

    def unpack(self, cls: type[T], leaves: Leaves) -> T:
        """The message that a receiver sees."""
        return cls(**self.values(cls, leaves))

    def encode(self, msg: Any) -> bytes:
        return to_bytes(type(msg), self.pack(msg))

    def limit(self, cls: type) -> int:
        """The most bytes that a message of this type may have."""
        return self._largest(cls).exact

    def _largest(self, cls: type) -> Size:
        """The size of the largest message of this type, which also has the longest header."""
        largest = []
        for name, (declared, shape) in self.layout(cls).items():
            bounded = [side if isinstance(side, int) else self.bounds[side] for side in shape]
            widest = max(declared.dtypes, key=lambda dtype: dtype.itemsize)
            largest.append((name, widest, typing.cast("tuple[int, ...]", tuple(bounded))))
        return _size(cls, tuple(largest))

    def read(self, cls: type, data: bytes, trusted: bool = False) -> Leaves:
        """The packed message in `data`, or a `WireError`; nothing larger than the declared limit is ever allocated.

        Values are checked unless they are `trusted`, as one's own record of a run is.
        """
        most = self._largest(cls)
        if len(data) > most.exact:
            raise WireError(f"{tag_of(cls)}: {len(data):,} bytes, at most {most.exact:,} were agreed")
        self._check(cls, tuple((name, *claimed) for name, claimed in read_header(cls, data, most.header).items()))
        try:
            found = load(data)
        except SafetensorError as error:
            raise WireError(f"{tag_of(cls)}: {error}") from error
        # Into memory as torch aligns it: the last bit of a product may depend on where its factors lie.
        leaves = {name: found[name].clone() for name in self.layout(cls)}
        if not trusted:
            self._check_values(cls, leaves)
        return leaves

    def _check_values(self, cls: type, leaves: Leaves) -> None:
        """What a header does not show: whether numbers are finite and in the range of their field."""
        for name, (declared, _) in self.layout(cls).items():
            leaf, where = leaves[name], f"{tag_of(cls)}.{name}"
            if leaf.numel() == 0:
                continue
            if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
                raise WireError(f"{where} holds a number that is not finite")
            high = leaves[declared.high].item() if isinstance(declared.high, str) else declared.high
            if declared.below is not None:
                high = typing.cast(int, self.bounds[declared.below]) - 1
            if declared.low is not None and leaf.min().item() < declared.low:
                raise WireError(f"{where} holds {leaf.min().item():g}, below the {declared.low:g} that it may be")
            if high is not None and leaf.max().item() > high:
                raise WireError(f"{where} holds {leaf.max().item():g}, above the {high:g} that it may be")

    def decode(self, cls: type[T], data: bytes) -> T:
        """The message in `data` as a receiver sees it, or a `WireError`."""
        return self.unpack(cls, self.read(cls, data))


def to_bytes(cls: type, leaves: Leaves) -> bytes:
    """A packed message as it travels."""
    body = [leaf.cpu().numpy().tobytes() for leaf in leaves.values()]
    return b"".join([_header(cls, _describe(leaves)), *body])


def read_header(cls: type, data: bytes, longest: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What the header claims, after checking that it accounts for every byte that follows.

    One that is longer than `longest` is not even parsed: that could take many times its size, and very long.
    """
    entries, body = _parse(data, longest)
    if entries.pop("__metadata__", None) != {"fedgist": tag_of(cls)}:
        raise WireError(f"expected a message {tag_of(cls)}")
    names = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    end = 0
    for name, entry in entries.items():
        try:
            dtype, shape, (start, stop) = names[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            good = entry.keys() == {"dtype", "shape", "data_offsets"} and len(shape) <= MOST_SIDES
            good = good and all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, stop))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise WireError(f"{tag_of(cls)}.{name}: malformed header") from error
        if not good or start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise WireError(f"{tag_of(cls)}.{name}: malformed header")
        found[name], end = (dtype, shape), stop
    if end != body:
        raise WireError(f"{tag_of(cls)}: {body:,} bytes follow the header, which accounts for {end:,}")
    return found


def _parse(data: bytes, longest: int) -> tuple[dict[str, Any], int]:
    """The JSON header and the number of bytes behind it."""
    header_end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < 8 or header_end > len(data):
        raise WireError("not a fedgist message: cut short")
    if header_end > longest:
        raise WireError(f"not a message that was agreed on: a header of {header_end:,} bytes, at most {longest:,}")
    try:
        entries = json.loads(data[8:header_end], object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise WireError("not a fedgist message: unreadable header") from error
    if not isinstance(entries, dict):
        raise WireError("not a fedgist message: unreadable header")
    return entries, len(data) - header_end


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def add_up(cls: type, parts: Iterable[Leaves | Part]) -> Leaves:
    """The sum of the additive fields over several packed messages, in float64: a receiver rounds once."""
    additive = {name: kind for name, (kind, declared) in schema_of(cls).items() if declared.additive}
    addends: dict[str, list[Tensor]] = {}
    stacks: dict[str, list[Tensor]] = {}
    for part in parts:
        leaves, rows = (part.leaves, part.rows) if isinstance(part, Part) else (part, False)
        for name, leaf in leaves.items():
            if name.split("/")[0] in additive:
                (stacks if rows else addends).setdefault(name, []).append(leaf)
    total: Leaves = {}
    for name in addends or stacks:
        single, stacked = addends.get(name, []), stacks.get(name, [])
        if len({leaf.shape for leaf in single} | {leaf.shape[1:] for leaf in stacked}) > 1:
            raise WireError(f"{tag_of(cls)}.{name}: additive fields must have one shape, got several")
        total[name] = (_sum_of_numbers if additive.get(name) in SCALARS else _wide_sum)(single, stacked)
    return total


def added_up(cls: type, parts: Sequence[Part]) -> list[Part]:
    """The same messages, of whose additive fields only the sum is left, which is nobody's: a part without senders."""
    additive = {name for name, (_, declared) in schema_of(cls).items() if declared.additive}
    seen = [(p, {name: leaf for name, leaf in p.leaves.items() if name.split("/")[0] not in additive}) for p in parts]
    return [Part((), add_up(cls, parts)), *(Part(part.ids, leaves) for part, leaves in seen if part.ids)]


def _wide_sum(addends: list[Tensor], stacks: list[Tensor]) -> Tensor:
    """One after the other, as they come; adding to a wide total widens what is added, so it need not be done before.

    On a GPU the rows of a stack are added by one call. On a CPU that would widen all of them first.
    """
    everything = addends + stacks
    wide = torch.float64 if any(addend.is_floating_point() for addend in everything) else torch.int64
    if everything[0].is_cuda:
        addends, stacks = addends + [stack.sum(0, dtype=wide) for stack in stacks], []
    each = [*addends, *(row for stack in stacks for row in stack.unbind())]
    total = each[0].to(wide, copy=True)  # its sender may still hold it
    for addend in each[1:]:
        total += addend
    return total


def _sum_of_numbers(addends: list[Tensor], stacks: list[Tensor]) -> Tensor:
    """The same sum of single numbers, which lie on the host, where Python is several times faster."""
    each = [addend.item() for addend in addends] + [number for stack in stacks for number in stack.tolist()]
    total = each[0]
    for number in each[1:]:
        total += number
    return torch.tensor(total, dtype=torch.float64 if isinstance(total, float) else torch.int64)
