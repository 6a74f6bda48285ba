"""Who holds which samples: the partitions of the federated literature, as pure functions of labels and a named `Rng`.

Each kind is a function (labels, clients, rng, *, options) giving the indices of every client; its keyword arguments are
the options that a user may set. To add a kind, write the function and name it in KINDS. The kind `group` is given who
each sample is from instead of its label, and `stratified-thesis` the labels of the test set, too.
"""

import random
from collections.abc import Callable

import numpy as np
from torch import Tensor

from fedgist.core.errors import FedgistError, check_known
from fedgist.core.rng import Rng
from fedgist.options import keywords

Parts = list[np.ndarray]
TRIES = 10_000


def split(
    labels: Tensor | np.ndarray,
    clients: int,
    rng: Rng,
    kind: str = "dirichlet",
    groups: Tensor | np.ndarray | None = None,
    tested: Tensor | np.ndarray | None = None,
    **given: float,
) -> Parts:
    """The sorted indices of each client's samples; no sample has two owners, and a client may have none.

    `groups` says who each sample is from, where that is known; only the kind `group` looks at it. `tested` are the
    labels of the test set; only the kind `stratified-thesis` looks at them. `given` are options of the kind, whose
    ranges the configuration of a run declares.
    """
    cut, held = _of_kind(kind), _as_array(labels)
    if kind == "group":
        if groups is None:
            raise FedgistError(
                "partition 'group' needs a data set that says who each sample is from; this one does not"
            )
        held = _as_array(groups)
    beside = [held if tested is None else _as_array(tested)] if kind == "stratified-thesis" else []
    parts = [np.sort(part) for part in cut(held, clients, rng, *beside, **given)]
    if not any(map(len, parts)):
        raise FedgistError(f"partition {kind!r} of {len(held)} samples leaves every client empty; use more data")
    return parts


def options(kind: str) -> dict[str, float]:
    """The options that a kind takes, with their defaults."""
    return keywords(_of_kind(kind))


def _of_kind(name: str) -> Callable[..., Parts]:
    check_known("partition", name, KINDS)
    return KINDS[name]


def iid(labels: np.ndarray, clients: int, rng: Rng) -> Parts:
    """Shuffled and cut into equal parts (McMahan et al. 2017)."""
    return np.array_split(_shuffled(np.arange(len(labels)), rng), clients)


def stratified(labels: np.ndarray, clients: int, rng: Rng) -> Parts:
    """Every client has the same number of each class (Berdoz 2022); sizes differ by at most one sample."""
    # Dealing the classes one after the other, like cards, evens out each class and the whole at once.
    deck = np.concatenate([_shuffled(members, rng("class", label)) for label, members in _classes(labels)])
    return [deck[client::clients] for client in range(clients)]


def stratified_thesis(labels: np.ndarray, clients: int, rng: Rng, tested: np.ndarray) -> Parts:
    """Equal sizes in the proportions of train and test set together, by turns (the code of Berdoz 2022).

    What a client's share asks for and is no longer there is made up from the classes that are left, the first ones
    first. So the last of many clients gets what nobody else took: of the first 1,200 digits of MNIST, the tenth of ten
    clients has two of class 2, 34 of class 7 and none of class 8, whatever the seed.
    """
    groups = _classes(labels)
    left = np.array([len(members) for _, members in groups])
    prior = left + np.array([np.count_nonzero(tested == label) for label, _ in groups])
    share = len(labels) // clients
    wanted = np.diff(np.round(np.cumsum(prior) * share / prior.sum()).astype(np.int64), prepend=0)
    sizes = []
    for _ in range(clients):
        taken = np.minimum(wanted, left)
        spare = left - taken
        more = np.clip(share - taken.sum() - (np.cumsum(spare) - spare), 0, spare)
        sizes.append(taken + more)
        left = left - sizes[-1]
    return _deal(groups, list(np.transpose(sizes)), rng)


def dirichlet(labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.5) -> Parts:
    """Each class is shared out in Dirichlet(alpha) proportions, independently (Yurochkin et al. 2019)."""
    groups = _classes(labels)
    draw = rng("proportions").numpy()
    sizes = [_sizes(_dirichlet(draw, alpha, clients), len(members)) for _, members in groups]
    return _deal(groups, sizes, rng)


def dirichlet_balanced(labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.5, min_size: int = 10) -> Parts:
    """Dirichlet(alpha) by class, passing over clients that have their even share (NIID-Bench, Li et al. 2022).

    Redrawn until every client has `min_size` samples.
    """
    groups = _classes(labels)
    share = len(labels) / clients

    def attempt(draw: np.random.Generator) -> list[np.ndarray]:
        return _fill(draw, alpha, clients, [len(members) for _, members in groups], share)

    return _deal(groups, _until_large_enough(attempt, clients, len(labels), rng, alpha, min_size), rng)


def dirichlet_fedgen(
    labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.5, ratio: float = 0.5, min_size: int = 10
) -> Parts:
    """Balanced Dirichlet(alpha) on part of the data, capped by class (the code of FedGen, Zhu et al. 2021).

    A client's share is `ratio` of the data divided by the clients. A client that holds its share is passed over, and no
    more than one share of each class is used at all: of MNIST with 20 clients and ratio 0.5, 1,500 images a class,
    15,000 in all. Classes are shared out in random order; redrawn until every client has `min_size` samples.
    """
    groups = _classes(labels)
    share = ratio * len(labels) / clients
    used = [int(min(share, ratio * len(members))) for _, members in groups]

    def attempt(draw: np.random.Generator) -> list[np.ndarray]:
        order = draw.permutation(len(groups))
        sizes = _fill(draw, alpha, clients, [used[k] for k in order], share)
        return [sizes[k] for k in np.argsort(order)]

    return _deal(groups, _until_large_enough(attempt, clients, sum(used), rng, alpha, min_size), rng)


def fedgen_released(
    labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.5, ratio: float = 0.5, min_size: int = 10
) -> Parts:
    """As dirichlet-fedgen, draw by draw as FedGen's released script: partition_seed=42 is its very split.

    It takes numbers from the generators that the script seeds, Python's and numpy's old one, in its order.
    """
    groups = [members for _, members in _classes(labels)]
    order, draw = list(range(len(groups))), np.random.RandomState(rng.root % 2**32)
    random.Random(rng.root).shuffle(order)
    share = ratio * len(labels) / clients
    used = [int(min(share, int(ratio * len(members)))) if ratio < 1 else len(members) for members in groups]
    for _ in range(TRIES if clients * min_size <= sum(used) else 0):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for k in order:
            shuffled = list(groups[k])
            draw.shuffle(shuffled)
            proportions = draw.dirichlet(np.full(clients, min(alpha, 1e15)))
            proportions = proportions * [len(part) < share for part in parts]
            if not 0 < proportions.sum() < np.inf:  # too small an alpha for floats: the script would fail
                break
            cuts = (np.cumsum(proportions / proportions.sum()) * used[k]).astype(int)[:-1]
            for part, more in zip(parts, np.split(np.array(shuffled[: used[k]], np.int64), cuts), strict=True):
                part.extend(more)
        else:
            if min(map(len, parts)) >= min_size:
                return [np.array(part, np.int64) for part in parts]
    raise _not_found(sum(used), clients, alpha, min_size)


def shards(labels: np.ndarray, clients: int, rng: Rng, *, shards_per_client: int = 2) -> Parts:
    """Sorted by label and cut into shards, of which each client gets a few (McMahan et al. 2017)."""
    pieces = np.array_split(np.argsort(labels, kind="stable"), clients * shards_per_client)
    order = rng.permutation(len(pieces)).tolist()
    return [np.concatenate([pieces[k] for k in order[client::clients]]) for client in range(clients)]


def quantity(labels: np.ndarray, clients: int, rng: Rng, *, alpha: float = 0.5) -> Parts:
    """Sizes follow Dirichlet(alpha), labels are i.i.d. (quantity skew of Li et al. 2022)."""
    sizes = _sizes(_dirichlet(rng("proportions").numpy(), alpha, clients), len(labels))
    return np.split(_shuffled(np.arange(len(labels)), rng("order")), np.cumsum(sizes)[:-1])


def group(groups: np.ndarray, clients: int, rng: Rng) -> Parts:
    """One client for each writer, person or hospital; with fewer clients, several of them together."""
    owners = np.unique(groups)
    if clients > len(owners):
        raise FedgistError(f"the samples are from {len(owners)} groups, so that there can be no {clients} clients")
    if clients < len(owners):
        owners = _shuffled(owners, rng)
    return [np.flatnonzero(np.isin(groups, owners[client::clients])) for client in range(clients)]


KINDS: dict[str, Callable[..., Parts]] = {
    "iid": iid,
    "stratified": stratified,
    "stratified-thesis": stratified_thesis,
    "dirichlet": dirichlet,
    "dirichlet-balanced": dirichlet_balanced,
    "dirichlet-fedgen": dirichlet_fedgen,
    "fedgen-released": fedgen_released,
    "shards": shards,
    "quantity": quantity,
    "group": group,
}


def _as_array(labels: Tensor | np.ndarray) -> np.ndarray:
    return labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)


def _shuffled(indices: np.ndarray, rng: Rng) -> np.ndarray:
    return indices[rng.permutation(len(indices)).numpy()]


def _classes(labels: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Each label that occurs, with the indices of its samples."""
    return [(int(label), np.flatnonzero(labels == label)) for label in np.unique(labels)]


def _dirichlet(draw: np.random.Generator, alpha: float, parts: int) -> np.ndarray:
    # Beyond 1e15 the proportions are equal to float precision, and numpy's sum of gammas would overflow in the end.
    return draw.dirichlet(np.full(parts, min(alpha, 1e15)))


def _sizes(proportions: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers in these proportions that add up to `total`, by rounding the cuts down as the published codes do.

    It matters for the balanced kinds: a client with nearly all of a class then stays one sample short of its share.
    """
    cuts = (np.cumsum(proportions) * total).astype(np.int64)
    cuts[-1] = total
    return np.diff(cuts, prepend=0)


def _fill(draw: np.random.Generator, alpha: float, clients: int, totals: list[int], share: float) -> list[np.ndarray]:
    """How many samples of each class each client gets when clients that hold their `share` are passed over.

    The sources draw for all clients, set the full ones to zero and renormalise. What remains of a Dirichlet vector is,
    renormalised, itself Dirichlet, so it is drawn for the others alone: the same law, and never 0/0 at a small alpha.
    """
    held = np.zeros(clients, np.int64)
    sizes = []
    for total in totals:
        proportions = np.zeros(clients)
        takers = held < share
        proportions[takers] = _dirichlet(draw, alpha, int(takers.sum()))
        sizes.append(_sizes(proportions, total))
        held += sizes[-1]
    return sizes


def _until_large_enough(
    attempt: Callable[[np.random.Generator], list[np.ndarray]],
    clients: int,
    total: int,
    rng: Rng,
    alpha: float,
    min_size: int,
) -> list[np.ndarray]:
    draw = rng("proportions").numpy()
    for _ in range(TRIES if clients * min_size <= total else 0):
        sizes = attempt(draw)
        if np.sum(sizes, axis=0).min() >= min_size:
            return sizes
    raise _not_found(total, clients, alpha, min_size)


def _not_found(total: int, clients: int, alpha: float, min_size: int) -> FedgistError:
    return FedgistError(
        f"no partition of {total} samples with alpha {alpha} was found that gives each of {clients} clients at least "
        f"{min_size}; use fewer clients, a larger alpha or a smaller min_size"
    )


def _deal(groups: list[tuple[int, np.ndarray]], sizes: list[np.ndarray], rng: Rng) -> Parts:
    """Random samples of each class in the given numbers; what the numbers leave over belongs to nobody."""
    hands = [
        np.split(_shuffled(members, rng("class", label)), np.cumsum(size))[:-1]
        for (label, members), size in zip(groups, sizes, strict=True)
    ]
    return [np.concatenate(hand) for hand in zip(*hands, strict=True)]
