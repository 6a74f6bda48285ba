"""Options as frozen dataclasses: a sentence, a type and a range for every field; built strictly from TOML or text.

    @dataclass(frozen=True)
    class Config:
        lr: float = option(0.1, "Learning rate of the clients.", above=0)
        hidden: tuple[int, ...] = option((200, 100), "Widths of the hidden layers.", low=1)

`build(Config, {"lr": "0.5"})` gives `Config(lr=0.5)`; whatever is wrong is one sentence that names the key, the value
and what is allowed. `toml` writes what `build` reads.
"""

import dataclasses
import enum
import inspect
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from fedgist.core.errors import FedgistError, unknown

Options = TypeVar("Options")

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
ALL = 2**63 - 1
"""What the word all stands for where a number may be as large as there is data."""
LARGEST = {int: ALL, float: 3.4e38}  # what int64 and float32, in which all is computed, can hold
SMALLEST = 1.2e-38
"""What float32 still holds whole; below it, a number that was refused as 0 would be one where it is used."""
MOST = 2**48
"""A count that is larger than this, where nothing else is said, is more than a machine has bytes, and beyond int64 once
it is multiplied."""


class Role(enum.Flag):
    """What sets an option apart; one without a role says what is computed, wherever that is."""

    NONE = 0
    GROUND = enum.auto()
    """Methods that are compared stand on it: it is the same for all of them."""
    SIMULATION = enum.auto()
    """Only clients that are simulated on one machine have it; a federation refuses it."""
    SITES = enum.auto()
    """In a federation the sites decide it, not whoever starts the run."""
    EXECUTION = enum.auto()
    """How, where or with which seed a run is made, not which run it is."""
    LATER = enum.auto()
    """It came when runs had names already: as it is without saying so, it is no part of them."""


def option(
    default: Any,
    help: str,
    choices: Iterable[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    group: str = "",
    role: Role = Role.NONE,
    flag: str | None = None,
    safe: Iterable[Any] | None = None,
    reveals: str = "",
    or_all: bool = False,
    formerly: str | None = None,
) -> Any:
    """A dataclass field with its sentence; `low` and `high` are allowed values, `above` is not.

    `group` is the heading under which it is shown, `flag` what stands for its value where it is a flag of commands.
    `safe` is what a site in a federation bears unless its operator says more: values, and ranges as in "10..1000";
    `reveals` says what else would tell of the site's data. Without it, the rest only costs time or memory. With
    `or_all` it may be the word all. `formerly` is the name under which files of before have it.
    """
    limits = {"choices": None if choices is None else tuple(choices), "low": low, "high": high, "above": above}
    return dataclasses.field(
        default=default,
        metadata={"help": help, **limits, "group": group, "role": role, "flag": flag, "or_all": or_all}
        | {"safe": None if safe is None else tuple(safe), "reveals": reveals, "formerly": formerly},
    )


@dataclass(frozen=True)
class Option:
    """One field of an options class, as the command line, the TOML writer and the documentation see it."""

    name: str
    kind: Any
    default: Any
    help: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    group: str = ""
    role: Role = Role.NONE
    flag: str | None = None
    safe: tuple[Any, ...] | None = None
    reveals: str = ""
    or_all: bool = False
    formerly: str | None = None

    @property
    def sentences(self) -> str:
        """What it is for, and what it may be where that is a list of names."""
        if self.choices is None:
            return self.help
        count = "Any" if self.is_list else "One"
        return f"{self.help}\n{count} of: {', '.join(map(str, self.choices))}."

    @property
    def is_list(self) -> bool:
        """Whether its value is a list, written with commas."""
        return get_origin(self.kind) is tuple

    def read(self, value: Any) -> Any:
        """`value` (from TOML, from text, from Python) as this option's type and within its range, or an error."""
        value = ALL if self.or_all and value == "all" else convert(self.name, value, self.kind)
        for part in value if isinstance(value, tuple) else (value,):
            self._check(part)
        return value

    def written(self, value: Any) -> Any:
        """The value as a person writes it."""
        return "all" if self.or_all and value == ALL else value

    def _check(self, value: Any) -> None:
        if value is None:
            return
        if self.choices is not None and value not in self.choices:
            if isinstance(value, str):
                raise unknown(self.name, value, map(str, self.choices))
            raise FedgistError(f"{self.name} must be one of {', '.join(map(str, self.choices))}, not {value}")
        if self.above is not None and not value > self.above:
            raise FedgistError(f"{self.name} must be greater than {self.above}, not {value}")
        if self.low is not None and not value >= self.low:
            raise FedgistError(f"{self.name} must be at least {self.low}, not {value}")
        if self.high is not None and not value <= self.high:
            raise FedgistError(f"{self.name} must be at most {self.high}, not {value}")
        if isinstance(value, float) and 0 < abs(value) < SMALLEST:
            raise FedgistError(f"{self.name} must not be as near to 0 as {value}: float32 ends at {SMALLEST}")
        if self.high is None and isinstance(value, int) and value > MOST and not (self.or_all and value == ALL):
            raise FedgistError(f"{self.name} must be at most {MOST}, not {value}")


def within(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether a value, or each part of one that is a tuple, is among those allowed: values, and ranges of numbers."""
    entries = [_ends(entry) or entry for entry in allowed]
    parts = value if isinstance(value, tuple) else ("none" if value is None else value,)
    return all(any(_matches(part, entry) for entry in entries) for part in parts)


def _matches(value: Any, entry: Any) -> bool:
    if isinstance(entry, tuple):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and entry[0] <= value <= entry[1]
    return isinstance(value, bool) == isinstance(entry, bool) and bool(value == entry)


def _ends(entry: Any) -> tuple[float, float] | None:
    """The two ends of a range such as "10..1000"; None for anything else."""
    low, dots, high = entry.partition("..") if isinstance(entry, str) else ("", "", "")
    try:
        return (float(low), float(high)) if dots else None
    except ValueError:
        raise FedgistError(f'a range is written with two numbers, as in "10..1000", not {entry!r}') from None


def options(of: Any) -> dict[str, Option]:
    """The options of a class made with `option(...)`, or of one of its instances, in order."""
    return dict(_of_class(of if isinstance(of, type) else type(of)))


def having(of: Any, role: Role) -> list[str]:
    """The names of the options with one of these roles."""
    return [name for name, option in options(of).items() if option.role & role]


@cache
def _of_class(cls: Any) -> dict[str, Option]:
    hints = get_type_hints(cls)
    return {
        f.name: Option(f.name, hints[f.name], f.default, **f.metadata)
        for f in dataclasses.fields(cls)
        if "help" in f.metadata
    }


def keywords(of: Callable[..., Any]) -> dict[str, Any]:
    """The options of what is a function: its keyword-only arguments, with their defaults."""
    parameters = inspect.signature(of).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def build(cls: type[Options], values: Mapping[str, Any]) -> Options:
    """`cls` from a mapping: unknown keys are an error, each value is converted and checked."""
    known = options(cls)
    for key in values:
        if key not in known:
            raise unknown("option", key, known)
    return cls(**{key: known[key].read(value) for key, value in values.items()})


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: bool, int, float, str, a tuple of these, or one of them or None (written "none")."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (k for k in get_args(kind) if k is not type(None))
        if value is None or value == "none":
            return None
    if get_origin(kind) is tuple:
        return _convert_tuple(name, value, get_args(kind))
    converted = _convert_scalar(value, kind)
    if converted is None:
        raise FedgistError(f"{name} must be {KINDS[kind]}, not {value!r}")
    if kind in LARGEST and abs(converted) > LARGEST[kind]:
        raise FedgistError(f"{name} must be {KINDS[kind]} of at most {LARGEST[kind]:.2g} in size, not {value}")
    return converted


def _convert_tuple(name: str, value: Any, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    parts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(parts)
    if len(parts) != len(kinds):
        raise FedgistError(f"{name} must be {len(kinds)} values, as in 1,2, not {len(parts)}")
    return tuple(convert(name, part, kind) for part, kind in zip(parts, kinds, strict=True))


def _convert_scalar(value: Any, kind: type) -> Any:
    """The value, or None where it does not fit: 2.5 and true are no whole numbers, "maybe" is not true or false."""
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = value.lower() if isinstance(value, str) else None
        return True if text in TRUE else False if text in FALSE else None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if kind is int and isinstance(value, float):
        return None
    try:
        number = kind(value)
    except OverflowError:  # a whole number beyond all real ones
        return math.inf
    except ValueError:
        return None
    return None if number != number else number


def toml(known: Mapping[str, Option], values: Mapping[str, Any]) -> str:
    """The values as TOML, each under its sentences, the first of a group under its heading."""
    lines, group = [], ""
    for name, value in values.items():
        if known[name].group != group:
            group = known[name].group
            lines.append(f"## {group}\n")
        lines += [f"# {sentence}" for sentence in known[name].sentences.splitlines()]
        lines.append(f"{name} = {toml_value(known[name].written(value))}\n")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """One value as TOML writes it."""
    if value is None:
        return '"none"'  # TOML has no null; `convert` reads it back where None is allowed
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def only_images(option: str, shape: Iterable[int]) -> None:
    """Refuses what means nothing but for images, where an input is something else."""
    if len(sides := tuple(shape)) != 3:
        form = "×".join(map(str, sides))
        raise FedgistError(f"{option} is for images, and an input here has the form {form}: leave it out")
