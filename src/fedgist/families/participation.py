"""Who takes part in a round, and how much each weighs: the options and the one formula."""

from typing import Any, Protocol, TypeVar

from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.federation import Site
from fedgist.core.work import compute
from fedgist.families.local_training import constant
from fedgist.options import option

T = TypeVar("T")


def active_option() -> Any:
    return option(0.0, "Clients asked in a round: a number, a fraction below 1, or 0 for all.", low=0)


def weighting_option(*more: str) -> Any:
    return option("samples", "Weight of a client in an average.", choices=("samples", "uniform", *more))


def n_ref_option() -> Any:
    return option(1 << 20, "Sample count that weighs 1; no client may hold more.", low=1)


class Weighing(Protocol):
    """The options that a client's weight depends on."""

    @property
    def weighting(self) -> str: ...

    @property
    def n_ref(self) -> int: ...

    @property
    def noise_multiplier(self) -> float: ...


def client_weight(options: Weighing, me: Site) -> float:
    """A client's weight p_k: n_k / n_ref, or 1, or with weighting=inverse 1 / n_k; without data it is 0.

    With DP-SGD all that weigh the same do so with or without data, as nobody may know who has any.
    """
    if options.noise_multiplier and options.weighting == "uniform":
        return 1.0
    if me.data.n > options.n_ref:
        raise FedgistError(f"client {me.id} holds {me.data.n:,} samples: set n_ref to at least that")
    if options.weighting == "samples" or me.data.n == 0:
        return me.data.n / options.n_ref
    return 1.0 if options.weighting == "uniform" else 1 / me.data.n


async def weighted(what: T, p: float) -> T:
    """p times every tensor of a tree, for all clients of a stack at once."""
    return await compute(tree.scale, what, constant(p))
