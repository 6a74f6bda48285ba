"""What every client decides for itself: options of the run, and the single clients that choose otherwise."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from fedgist.core.errors import FedgistError
from fedgist.options import build, options

T = TypeVar("T")


class OwnChoices(Generic[T]):
    """The options `kind` of each client: those of the run, changed by texts such as `3:lambda_kd=0:peers=1+2`."""

    def __init__(self, kind: type[T], config: object, texts: Sequence[str]):
        usual = {name: getattr(config, name) for name in options(kind)}
        self.everybody: T = kind(**usual)
        self.single: dict[str, T] = {}
        for id, own in map(_parse, texts):
            if id in self.single:
                raise FedgistError(f"choices has client {id} twice: join its choices, as in {id}:key=value:key=value")
            self.single[id] = build(kind, {**usual, **own})

    def of(self, id: str) -> T:
        return self.single.get(id, self.everybody)

    def all(self) -> list[T]:
        return [self.everybody, *self.single.values()]


def _parse(text: str) -> tuple[str, dict[str, str]]:
    id, *pairs = text.split(":")
    if not pairs or not all("=" in pair for pair in pairs):
        raise FedgistError(f"choices are written client:key=value:key=value, not {text!r}")
    return id, {key: value.replace("+", ",") for key, _, value in (pair.partition("=") for pair in pairs)}
