"""The two views of a federation: `Federation` for the node that drives a round, `Site` for a client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.core.task import Data
from fedgist.core.work import Suspend

SERVER = "server"

R = TypeVar("R")

State = dict[str, Any]
"""What a node or a site remembers: trees of tensors and scalars under names that its method chooses."""


class TooFewAnswers(Exception):
    """An exchange got fewer answers than it needs; the round is skipped and nothing is lost."""


@dataclass(frozen=True)
class Answers(Generic[R]):
    """What came back from one exchange: a sum of the additive fields, and the visible fields of each client.

    Both are replies of which the other fields are not there: reading one says where it is seen.
    """

    ids: tuple[str, ...]
    sum: R
    visible: Mapping[str, R]
    late: Mapping[str, int] = field(default_factory=dict)
    """The round in which a reply was made, for those that come from an earlier one."""

    def __getitem__(self, id: str) -> R:
        return self.visible[id]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)


@dataclass(frozen=True, eq=False)
class Ask:
    """A request that a round coroutine hands to its engine."""

    node: str
    to: Mapping[str, object]
    reply: type
    at_least: int


@dataclass(frozen=True, eq=False)
class Exhibit:
    """Images [n, channels, height, width] or features [n, d] that a round made, for a person to look at."""

    name: str
    values: Tensor
    labels: Tensor | None
    """The class of each, or a probability for every class."""
    owner: str
    """The client that they come from, where it is one."""
    stretched: bool
    """Whether each image has a scale of its own, rather than that of the data's pixels."""


def cohort(active: float, clients: int) -> int:
    """How many of the clients a round asks: a number, a fraction below 1, or 0 for all."""
    return max(1, round(active * clients)) if 0 < active < 1 else int(active) or clients


@dataclass(frozen=True)
class Federation:
    """All that a node driving a round may know and do."""

    node: str
    ids: tuple[str, ...]
    round: int
    rng: Rng
    info: Mapping[str, Mapping[str, str]]
    shown: list[Exhibit] = field(default_factory=list, compare=False, repr=False)

    def sample(self, active: int | float | None = None) -> list[str]:
        """A random choice of clients: a number of them, a fraction below 1, or all."""
        if active is None or active == 0:
            return list(self.ids)
        count = cohort(active, len(self.ids))
        if not 1 <= count <= len(self.ids) or (active > 1 and active != count):
            raise FedgistError(f"active = {active}: choose a whole number from 1 to {len(self.ids)}, or a fraction")
        chosen = self.rng("sample").permutation(len(self.ids))[:count]
        return sorted(self.ids[i] for i in chosen.tolist())

    async def ask(
        self, to: Sequence[str] | Mapping[str, object], msg: object, reply: type[R], at_least: int = 1
    ) -> Answers[R]:
        """Send `msg` to the clients in `to` (a mapping: each its own, `msg` is None) and await the replies."""
        addressed = dict(to) if isinstance(to, Mapping) else dict.fromkeys(to, msg)
        answers: Answers[R] = await Suspend(Ask(self.node, addressed, reply, at_least))
        return answers

    def show(
        self, name: str, values: Tensor, labels: Tensor | None = None, owner: str = "", stretched: bool = False
    ) -> None:
        """Puts up something worth looking at. A run may keep it for its report; nothing else depends on it."""
        self.shown.append(Exhibit(name, values, labels, owner, stretched))


@dataclass
class Site:
    """All that a client may touch. `state` is kept by the engine, never sent, and committed when a round ends."""

    id: str
    round: int
    data: Data
    state: State
    rng: Rng
    info: Mapping[str, str]
    """What it announced: its architecture as `model`."""
    secret: Callable[[str], Callable[[int], Tensor]] | None = None
    """Random bits by a name, which only the site can know; None in a simulation, where nothing is secret."""
