"""Secure sums across machines: the halves of their layer, made from the signed roster that all ends have.

No key travels: a site takes everybody's public keys from the roster in its own kit, and refuses a run that goes by
another. What a site has answered is kept beside its runs and outlives them, in a file for all runs that begin alike:
those would make it send the same, so that two of them with two sets of sites would tell what a few sites sent.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgist.engines.layer import PlainSite, SiteLayer
from fedgist.engines.schemes import Helped, HelperSide, Masks, MaskSide
from fedgist.engines.secure_sum import SecureSite, SecureSum
from fedgist.federation.protocol.answered import OnDisk
from fedgist.federation.protocol.envelope import Start, seal
from fedgist.federation.protocol.keys import SiteKeys
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.roster import Roster
from fedgist.secure.helper import Helper, Seeded
from fedgist.secure.party import BEFORE, COVERT, Identity, Party
from fedgist.secure.ring import Grid

KIND = 3
"""Of the protocol of secure sums: ends of two kinds do not understand each other."""
HELPED = "helped.jsonl"
"""What a helper has opened."""
UNKNOWN = "the run wants secure sums of a kind that this site does not know"


def server_layer(roster: Roster, grid: Grid, group: int, trips: int = 2, helper: str = "") -> SecureSum:
    """The server's half, among the sites that have announced their keys."""
    digest = bytes.fromhex(roster.digest)
    layer = SecureSum(_enrolled(roster), Helped(digest, helper) if helper else Masks(digest, trips), grid, group)
    layer.told = {"kind": KIND, "roster": roster.digest, "group": group, "bits": grid.bits, "step": grid.step}
    layer.told |= {"trips": trips, "helper": helper}
    return layer


def site_layer(name: str, start: Start, folder: Path, rules: Policy, roster: Roster, keys: SiteKeys) -> SiteLayer:
    """A site's half, as the start of a run says and the site's own roster and policy allow."""
    if not start.layer:
        return plain(rules)
    told = _read(start.layer)
    check_roster(told["roster"], roster)
    identity, alike, least = identity_of(name, roster, keys), _alike(start), max(rules.min_sum, told["group"])
    memory = OnDisk(folder / "sums" / f"{alike[:32]}.jsonl")
    hiding: Party | Seeded
    if told["helper"]:
        if told["helper"] != rules.helper:
            raise Refused("its policy does not name the helper of this run, which would hold the keys to what it sends")
        if told["helper"] not in identity.public:
            raise Refused(f"roster {roster.number} does not have the keys of {rules.helper}")
        hiding = Seeded(identity, rules.helper, memory, least)
    elif told["trips"] < rules.sum_trips:
        raise Refused(f"its policy wants {rules.sum_trips} trips: start the run with --secure masks:trips=3")
    else:
        hiding = Party(identity, memory, least, told["trips"])
    grid = Grid(told["bits"], told["step"])
    site = SecureSite(_enrolled(roster), identity.roster, grid, hiding.mask, alike=alike)
    return MaskSide(site, hiding) if isinstance(hiding, Party) else site


def helper_side(name: str, folder: Path, rules: Policy, roster: Roster, keys: SiteKeys) -> HelperSide:
    """A helper's half, the same for all runs."""
    helper = Helper(identity_of(name, roster, keys), OnDisk(folder / HELPED), rules.min_sum)
    return HelperSide(_enrolled(roster), helper, 16 * rules.max_model)


def check_roster(digest: str, own: Roster) -> None:
    """Refuses a run that goes by a roster with this digest, if that is not the site's own."""
    if digest != own.digest:
        raise Refused(
            f"the run goes by another roster than this site's, which is number {own.number}, {own.digest[:16]}…"
        )


def identity_of(name: str, roster: Roster, keys: SiteKeys) -> Identity:
    """A member's own keys, and everybody's public ones."""
    public = {one.name: (one.agreement, one.signing) for one in roster.members if one.enrolled}
    if name not in public:
        raise Refused(f"roster {roster.number} does not have this site's keys yet: they were announced just now")
    if public[name][0] != keys.agreement.public_key().public_bytes_raw():
        raise Refused(f"roster {roster.number} has other keys of this site than those in its kit")
    return Identity(name, keys.agreement, keys.signing, public, bytes.fromhex(roster.digest))


def plain(rules: Policy) -> SiteLayer:
    """No layer hides this site's replies, if its policy lets them leave so."""
    if rules.secure:
        raise Refused("its policy allows only runs with secure sums: start them with --secure masks")
    return PlainSite()


def _enrolled(roster: Roster) -> list[str]:
    return [one.name for one in roster.members if one.enrolled]


def _read(text: str) -> Mapping[str, Any]:
    """What the server says of its half."""
    try:
        told = json.loads(text)
        kinds = {"kind": int, "group": int, "bits": int, "step": int, "trips": int, "roster": str, "helper": str}
        if any(type(told[name]) is not kind for name, kind in kinds.items()):
            raise Refused(UNKNOWN)
        if told["kind"] != KIND or told["trips"] not in (COVERT, BEFORE):
            raise Refused(UNKNOWN)
        Grid(told["bits"], told["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(UNKNOWN) from error
    return {name: told[name] for name in kinds}


def _alike(start: Start) -> str:
    """The digest of what a run is, as a site has understood it (`plain_start`): the same at all its sites, and for all
    runs that differ by their name alone."""
    return hashlib.sha256(seal(dataclasses.replace(start, run="any", model="any", layer=""))).hexdigest()
