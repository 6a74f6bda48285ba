"""A site's half of a private run: its own budget, book and outbox, and noise that no seed of the server decides."""

import json
import math
from dataclasses import replace
from pathlib import Path

from fedgist.core.codec import Codec
from fedgist.core.method import Method
from fedgist.dp import randomness
from fedgist.dp.budget import Book, Limit, Outbox
from fedgist.dp.releases import SEEDED, declared, trains
from fedgist.engines.layer import SiteLayer
from fedgist.engines.private import NOISES, Kept, PrivateSite, Promise
from fedgist.federation.protocol.envelope import Start
from fedgist.federation.protocol.policy import Policy, Refused

BOOK = "privacy.jsonl"


def asked(start: Start) -> Promise | None:
    """What a run promises, as its start says; None where it promises nothing."""
    try:
        told = json.loads(start.layer).get("privacy") if start.layer else None
        if told is None:
            return None
        found = Promise(
            float(told["epsilon"]),
            float(told["delta"]),
            str(told["noise"]),
            int(told["threshold"]),
            int(told["colluders"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"the run describes a privacy that cannot be: {error}") from error
    sensible = found.epsilon > 0 and 0 < found.delta < 1 and found.noise in NOISES
    if not (sensible and 0 <= found.colluders < found.threshold):
        raise Refused("the run describes a privacy that cannot be")
    return found


def without(start: Start) -> Start:
    """The start as the layer inside sees it."""
    told = json.loads(start.layer) if start.layer else {}
    rest = {name: value for name, value in told.items() if name != "privacy"}
    return replace(start, layer=json.dumps(rest) if rest else "")


def site_layer(
    inner: SiteLayer, promise: Promise | None, method: Method, codec: Codec, folder: Path, run: Path, rules: Policy
) -> SiteLayer:
    """The layer around `inner`; the book lies in the site's folder, the outbox in the run's."""
    if promise is None:
        if rules.epsilon is not None:
            raise Refused("its policy has a privacy budget, and this run promises no differential privacy: set epsilon")
        return inner
    if trains(releases := declared(method, method.name)):
        raise Refused(SEEDED)
    if promise.noise == "sum" and inner.form.invitation is None:
        raise Refused("noise that suffices only in a sum needs a secure sum, and this run has none")
    limit = Limit(rules.epsilon or math.inf, rules.delta if rules.epsilon else promise.delta)
    kept = Kept(Outbox(run / "outbox"), codec)
    device = codec.place.device
    return PrivateSite(
        inner, promise, releases, Book(folder / BOOK), limit, lambda exchange, tag: randomness.secret(device), kept
    )
