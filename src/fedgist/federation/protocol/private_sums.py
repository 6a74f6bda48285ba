"""A site's half of a private run: its own budget, book and outbox, and noise that no seed of the server decides."""

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

from fedgist import storage
from fedgist.core.codec import Codec
from fedgist.core.method import Method
from fedgist.dp import randomness
from fedgist.dp.budget import Book, Limit, Outbox
from fedgist.dp.releases import declared, trains
from fedgist.engines.layer import Exchange, SiteLayer
from fedgist.engines.private import NOISES, Kept, PrivateSite, Promise
from fedgist.federation.protocol.envelope import Start, seal
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


def check(start: Start, rules: Policy) -> Promise | None:
    """The same, or why a site with a budget has no part in it: before anything is said that depends on its data."""
    if (promise := asked(start)) is None and rules.epsilon is not None:
        raise Refused("its policy has a privacy budget, and this run promises no differential privacy: set epsilon")
    return promise


def without(start: Start) -> Start:
    """The start as the layer inside sees it."""
    told = json.loads(start.layer) if start.layer else {}
    rest = {name: value for name, value in told.items() if name != "privacy"}
    return replace(start, layer=json.dumps(rest) if rest else "")


def site_layer(
    inner: SiteLayer, promise: Promise | None, method: Method, codec: Codec, folder: Path, start: Start, rules: Policy
) -> SiteLayer:
    """The layer around `inner`; the book lies in the site's folder, the outbox in the run's below it."""
    if promise is None:
        return inner
    if trains(releases := declared(method, method.name)) and promise.noise != "local":
        raise Refused("clients that train have noise of their own, and this run counts on that of all together")
    if promise.noise == "sum" and inner.form.invitation is None:
        raise Refused("noise that suffices only in a sum needs a secure sum, and this run has none")
    limit = Limit(rules.epsilon or math.inf, rules.delta if rules.epsilon else promise.delta)
    run = folder / "runs" / start.run
    kept = Kept(Outbox(run / "outbox"), codec)
    device = codec.place.device
    memory = hashlib.blake2b(own_key(run, start), digest_size=8).hexdigest()
    book = Book(folder / BOOK)

    def draw(exchange: Exchange, tag: str) -> randomness.Noise:
        return randomness.exact(randomness.secret(device))

    return PrivateSite(inner, promise, releases, book, limit, draw, kept, memory)


def own_secret(run: Path) -> bytes:
    """What batches and noise of training in a run are drawn from, and nobody else knows: from the operating system,
    kept in the run's folder, so that the same request, asked again after a crash, finds the same of both.
    """
    path = run / "secret"
    if not path.is_file():
        with storage.replacing(path) as draft:
            draft.touch(0o600)
            draft.write_bytes(os.urandom(32))
    return path.read_bytes()


def own_key(run: Path, start: Start) -> bytes:
    """The same for a run that was begun in just this way. A server may begin it again in another, with less noise or
    nothing to hide what only suffices in a sum: what is asked then is another release, and charged.
    """
    return hashlib.blake2b(seal(start), key=own_secret(run), digest_size=32).digest()
