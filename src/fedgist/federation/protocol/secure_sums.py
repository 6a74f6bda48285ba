"""Secure sums across machines: the two halves of their layer, made from the signed roster that both ends have.

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
from fedgist.engines.schemes import Masks
from fedgist.engines.secure_sum import SecureSite, SecureSum
from fedgist.federation.protocol.envelope import Start, seal
from fedgist.federation.protocol.keys import SiteKeys
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.roster import Roster
from fedgist.secure.party import Identity, OnDisk, Party
from fedgist.secure.ring import Grid


def server_layer(roster: Roster, grid: Grid, group: int) -> SecureSum:
    """The server's half, among the sites that have announced their keys."""
    layer = SecureSum(_enrolled(roster), Masks(bytes.fromhex(roster.digest)), grid, group)
    layer.told = {"roster": roster.digest, "group": group, "bits": grid.bits, "step": grid.step}
    return layer


def site_layer(name: str, start: Start, folder: Path, rules: Policy, roster: Roster, keys: SiteKeys) -> SiteLayer:
    """A site's half, as the start of a run says and the site's own roster and policy allow."""
    if not start.layer:
        check_plain(rules)
        return PlainSite()
    told = _read(start.layer)
    if told["roster"] != roster.digest:
        raise Refused(
            f"the run goes by another roster than this site's, which is number {roster.number}, {roster.digest[:16]}…"
        )
    if name not in _enrolled(roster):
        raise Refused(f"roster {roster.number} does not have this site's keys yet: they were announced just now")
    public = {one.name: (one.agreement, one.signing) for one in roster.members if one.enrolled}
    if public[name][0] != keys.agreement.public_key().public_bytes_raw():
        raise Refused(f"roster {roster.number} has other keys of this site than those in its kit")
    identity = Identity(name, keys.agreement, keys.signing, public, bytes.fromhex(roster.digest))
    party = Party(identity, OnDisk(_memory(start, folder)), max(rules.min_sum, told["group"]))
    return SecureSite(_enrolled(roster), identity.roster, Grid(told["bits"], told["step"]), party)


def check_plain(rules: Policy) -> None:
    """Whether replies may leave this site without a layer that hides them."""
    if rules.secure:
        raise Refused("its policy allows only runs with secure sums: start them with --secure masks")


def _enrolled(roster: Roster) -> list[str]:
    return [one.name for one in roster.members if one.enrolled]


def _read(text: str) -> Mapping[str, Any]:
    """What the server says of its half."""
    try:
        told = json.loads(text)
        whole = {name: told[name] for name in ("group", "bits", "step")}
        if not all(type(value) is int for value in whole.values()) or type(told["roster"]) is not str:
            raise ValueError("not numbers")
        Grid(told["bits"], told["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("the run wants secure sums of a kind that this site does not know") from error
    return told


def _memory(start: Start, folder: Path) -> Path:
    """The file of what this site answered, the same for all runs that differ by their name alone."""
    alike = hashlib.sha256(seal(dataclasses.replace(start, run="any", layer=""))).hexdigest()
    return folder / "sums" / f"{alike[:32]}.jsonl"
