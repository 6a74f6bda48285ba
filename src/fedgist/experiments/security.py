"""What `--secure` means: which layer lies between the clients' replies and the server, and what stays visible."""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from fedgist.core.errors import FedgistError, check_known
from fedgist.core.federation import cohort
from fedgist.core.method import Method, who_sees_what
from fedgist.engines import schemes
from fedgist.engines.layer import Layer
from fedgist.engines.secure_sum import Scheme, SecureSum
from fedgist.experiments.config import RunConfig, model_spec
from fedgist.secure.ring import Grid

log = logging.getLogger("fedgist")

WAYS = ("masks", "helper", "additive")
"""masks: only sums leave a client. helper: the same, with a second party in place of masks between clients. additive:
what is summed is protected by masks, all else is as visible as before."""


@dataclass(frozen=True)
class Security:
    """A text such as `masks:bits=32:step=20:group=5`, read."""

    way: str
    group: int = 3
    bits: int = 64
    step: int = 0
    trips: int = 2
    by: str = ""
    """The helper, across machines."""

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.step)


def read(text: str) -> Security:
    """What `--secure` says."""
    way, given = model_spec(text)
    check_known("way to secure sums", way, WAYS)
    kinds = {"group": int, "bits": int, "step": int, **({"by": str} if way == "helper" else {"trips": int})}
    for key, value in given.items():
        if type(value) is not kinds.get(key):
            known = ", ".join(f"{name}={'NAME' if kind is str else 'N'}" for name, kind in kinds.items())
            raise FedgistError(f"--secure {way} takes {known}, as in {way}:group=5, not {key}={value}")
    found = Security(way, **given)
    if found.trips not in (2, 3):
        raise FedgistError(f"an exchange has 2 or 3 trips, not {found.trips}")
    if found.group < 2:
        raise FedgistError("a sum over one client is that client's: group must be at least 2")
    try:
        found.grid  # noqa: B018 - it says what is wrong with bits and step
    except ValueError as error:
        raise FedgistError(f"secure: {error}") from error
    return found


def check(config: RunConfig, method: Method) -> None:
    """Refuses what a secure sum cannot protect, and says what stays visible where that is asked for."""
    if config.secure is None:
        return
    chosen = read(config.secure)
    asked = 1 if method.pooled else cohort(getattr(config.options, "active", 0), config.clients)
    if asked < chosen.group:
        raise FedgistError(
            f"a secure sum is over at least {chosen.group} clients, and a round of {method.name} asks {asked}: "
            f"have it ask more, let fewer suffice, as in {chosen.way}:group=2, or leave out secure"
        )
    for name in ("topology", "delay"):
        if getattr(config, name):
            raise FedgistError(f"secure sums are for a server that asks all at once: leave out {name}")
    shown = [f"{reply}.{field}" for _, reply, field, additive in who_sees_what(method) if not additive]
    if shown and chosen.way != "additive":
        raise FedgistError(
            f"{method.name} shows the server {', '.join(shown)} of each client, which no sum hides; "
            "--secure additive protects the rest"
        )
    if shown:
        log.warning(f"the server still sees of each client: {', '.join(shown)}; only what is summed is protected")


def helper(config: RunConfig, members: Collection[str]) -> str:
    """Who of a federation helps with a run's sums, and is in none of them; empty where nobody does."""
    chosen = read(config.secure) if config.secure else None
    if chosen is None or chosen.way != "helper":
        return ""
    if chosen.by not in members:
        named = f"which has no member {chosen.by}" if chosen.by else "as in --secure helper:by=NAME"
        raise FedgistError(f"a helper is a member of the federation with a second operator, {named}")
    return chosen.by


def in_process(config: RunConfig, ids: Collection[str]) -> Layer | None:
    """The layer of a run whose clients are all here."""
    if not config.secure:
        return None
    chosen = read(config.secure)
    if chosen.way == "helper":
        if chosen.by:
            raise FedgistError("in one process the helper has no name: leave out by")
        if schemes.HELPER in ids:
            raise FedgistError(f"a client cannot be called {schemes.HELPER} where a helper is")
        scheme: Scheme = schemes.helped_here(ids, chosen.group)
    else:
        scheme = schemes.masks_here(ids, chosen.group, chosen.trips)
    return SecureSum(list(ids), scheme, chosen.grid, chosen.group)
