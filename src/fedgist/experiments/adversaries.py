"""What `--adversary` and `--defence` mean: which clients are bad, which layer holds against them, what is refused."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from fedgist.core.errors import FedgistError, check_known
from fedgist.core.federation import State
from fedgist.core.message import schema_of
from fedgist.core.method import Method
from fedgist.core.rng import Rng
from fedgist.core.task import Samples, Task
from fedgist.data.client_data import ClientData
from fedgist.engines.adversary import POISONS, STRENGTH, TARGET, TOGETHER, Adversary, Bad, poisoned, triggered
from fedgist.engines.layer import Layer, Plain
from fedgist.engines.robust import WAYS, Robust
from fedgist.experiments.config import RunConfig
from fedgist.learning.evaluation import Correct

log = logging.getLogger("fedgist")

KINDS = (*STRENGTH, *POISONS)


@dataclass(frozen=True)
class Attackers:
    """A text such as `sign-flip:3` or `scale:1:strength=100`, read."""

    kind: str
    count: int
    strength: float


def read(text: str) -> Attackers:
    """What `--adversary` says."""
    kind, _, rest = text.partition(":")
    check_known("kind of bad client", kind, KINDS)
    count, _, strength = rest.partition(":strength=")
    try:
        found = Attackers(kind, int(count or 1), float(strength or STRENGTH.get(kind, 1.0)))
    except ValueError:
        raise FedgistError(f"adversary is written KIND:CLIENTS, as in sign-flip:3, not {text!r}") from None
    if found.count < 1:
        raise FedgistError("adversary needs at least one bad client, as in sign-flip:1")
    return found


def read_defence(text: str) -> tuple[str, float]:
    """What `--defence` says: the way, and the norm that clients clip to themselves, if any."""
    way, _, norm = text.partition(":norm=")
    check_known("defence", way, WAYS)
    try:
        bound = float(norm or 0)
    except ValueError:
        bound = -1.0
    if bound < 0 or (norm and way != "clip"):
        raise FedgistError(f"defence is one of {', '.join(WAYS)}, or clip:norm=X for clients that clip, not {text!r}")
    return way, bound


def check(config: RunConfig, method: Method) -> None:
    """Refuses what cannot be, and says what a defence does not do."""
    if config.adversary is not None:
        bad = read(config.adversary)
        if bad.count >= config.clients:
            raise FedgistError(f"{bad.count} bad clients of {config.clients} leave no honest one")
        if bad.kind in TOGETHER and bad.count < 2:
            raise FedgistError(f"{bad.kind} is what several clients agree upon: {bad.kind}:2")
        if bad.kind in TOGETHER and config.secure:
            raise FedgistError(f"{bad.kind} is simulated on single replies, which a secure sum hides: leave out one")
    if config.adversary is None and config.defence is None:
        return
    if config.topology is not None:
        raise FedgistError("adversary and defence are about clients of a server: leave out topology")
    if config.defence is not None:
        _check_defence(config, method)


def _check_defence(config: RunConfig, method: Method) -> None:
    way, norm = read_defence(config.defence or "")
    replies = {handler.reply for handler in method.handlers.values()}
    images = {wire.shape for reply in replies for _, wire in schema_of(reply).values() if wire.holds == "images"}
    if way == "filter" and images != {("images", "input")}:
        raise FedgistError(f"defence=filter is for images with labels, which {method.name} does not share")
    if way == "filter" and config.finish is not None:
        raise FedgistError("a finish sends sums, and defence=filter looks at images alone: leave out one")
    if way != "filter" and images:
        others = "defence=filter" if images == {("images", "input")} else "no defence yet"
        raise FedgistError(f"{method.name} shares images, of which there is no {way}: there is {others}")
    if config.secure and not norm:
        raise FedgistError(
            f"defence={config.defence} looks at single replies, which a secure sum hides: defence=clip:norm=X has "
            "clients clip themselves, which binds only those that run this code"
        )
    if norm:
        log.warning("clients clip themselves: that binds those that run this code, and nobody who means harm")


def count(config: RunConfig) -> int:
    """How many clients send something else than what was made for them, and noised."""
    bad = read(config.adversary) if config.adversary else None
    return bad.count if bad is not None and bad.kind in STRENGTH else 0


def bad_ids(config: RunConfig, ids: Collection[str]) -> list[str]:
    """Which clients are bad: drawn by the seed, the same whatever they do."""
    if not config.adversary:
        return []
    order = Rng(config.seed)("adversary").permutation(len(ids)).tolist()
    return sorted(sorted(ids)[i] for i in order[: read(config.adversary).count])


def sites(config: RunConfig, sites: Mapping[str, ClientData], task: Task) -> dict[str, ClientData]:
    """The clients' data, with what bad ones have made of theirs."""
    bad = read(config.adversary) if config.adversary else None
    if bad is None or bad.kind not in POISONS:
        return dict(sites)
    return {**sites, **{id: poisoned(sites[id], bad.kind, task) for id in bad_ids(config, sites)}}


def around(config: RunConfig, ids: Collection[str], inner: Layer | None) -> Layer | None:
    """The layers of a run in one process: bad clients next to the wire, and what holds against them around those."""
    if config.adversary and (bad := read(config.adversary)).kind in STRENGTH:
        made = Bad(bad.kind, bad.strength, Rng(config.seed)("bad").seed)
        inner = Adversary(inner or Plain(), made, bad_ids(config, ids))
    if config.defence:
        inner = Robust(inner or Plain(), *read_defence(config.defence))
    return inner


def opened(config: RunConfig, method: Method, state: State, test: Samples) -> dict[str, float]:
    """Where bad clients planted a backdoor: how many samples of other classes the server's model takes for its class
    once they have the trigger."""
    w = method.weights(state)
    if not config.adversary or read(config.adversary).kind != "backdoor" or w is None:
        return {}
    others = test[1] != TARGET
    if w.keys() != method.model.shapes.keys() or not others.any():
        return {}
    shown, wanted = triggered(test[0][others], method.task), torch.full_like(test[1][others], TARGET)
    with torch.no_grad():
        obeyed = Correct(method.model)(w, shown, wanted)
    return {"backdoor": float(obeyed) / len(wanted)}
