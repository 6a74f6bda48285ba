"""What each check of a secure sum stands for: with one taken out, who cheats gets what it keeps, or spoils a sum."""

import numpy as np
import pytest

from fedgist.secure import masks, shamir
from fedgist.secure.graph import CannotOpen, Group, Refused
from fedgist.secure.opening import Opening
from fedgist.secure.party import Forgetful, Party
from parties import NAMES, Meeting, Vectors, group, identities, parties, same, total_of, vectors


def minus(a: Vectors, b: Vectors) -> Vectors:
    return {key: a[key] - b[key] for key in a}


def opened(meeting: Meeting) -> Vectors:
    return meeting.sum(meeting.revealed(meeting.alive))


def without(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    monkeypatch.setattr(Party, check, lambda *_: None)


# A malicious server


def test_who_may_be_asked_keeps_one_site_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same exchange for seven sites and for six: the difference is what the seventh sent."""
    without(monkeypatch, "_check")
    without(monkeypatch, "_check_alive")
    party = parties()
    seven = opened(Meeting(party, group(), NAMES))
    six = opened(Meeting(party, group(cohort=NAMES[:6], nonce=1), NAMES[:6]))
    assert same(minus(seven, six), vectors("g"))


def test_who_may_be_in_an_opened_sum_keeps_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set shrinks by one, in the same exchange or in the next of the round."""
    without(monkeypatch, "_check_alive")
    for version in ("round-000001-000000", "round-000001-000001"):
        party = parties()
        first = opened(Meeting(party, group(), NAMES))
        again = opened(Meeting(party, group(version, nonce=1), NAMES[:6]))
        assert same(minus(first, again), vectors("g"))


def test_of_a_sum_over_two_each_has_the_other_s() -> None:
    """A server that is in league with b has what a sent."""
    with pytest.raises(Refused, match="a sum over 2 sites is one over fewer than 3"):
        Meeting(parties(), group(cohort="ab"), "ab")
    both = opened(Meeting(parties(least=2), group(cohort="ab"), "ab"))
    assert same(minus(both, vectors("b")), vectors("a"))


@pytest.mark.parametrize("nonce", [0, 1])
def test_a_nonce_twice_makes_masks_twice(nonce: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has opened two sums knows the sites' own masks; if the others are the same, a site's change is bare."""
    without(monkeypatch, "_check")
    party, bare = parties(), []
    for number, seed in ((0, 0), (nonce, 1)):
        meeting = Meeting(party, group(nonce=number), NAMES, seed)
        own = meeting.revealed("a")["a"][0].tobytes()
        masks.mask(meeting.masked["a"], own, -1)
        bare.append(meeting.masked["a"])
    assert same(minus(*bare), minus(vectors("a", 0), vectors("a", 1))) == (nonce == 0)


def test_seals_of_one_exchange_alone_keep_the_keys_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they not bound to it, shares that are replayed would open an exchange whose keys nobody has given."""
    monkeypatch.setattr(Group, "context", bytes(32))
    party = parties()
    old = Meeting(party, group("round-000001-000000"), NAMES)
    new = Meeting(party, group("round-000002-000000", nonce=1), NAMES)
    shares = []
    for name in "bcdef":
        rows, _ = party[name].open(new.group.version, NAMES, old.opening.sealed_for(name))
        shares.append(rows[1])  # of a's own key: a is the first of its neighbours
    key = shamir.join(np.stack(shares), [NAMES.index(name) + 1 for name in "bcdef"])
    assert masks.commit(key.tobytes()) == old.sent["a"].commitments[0].tobytes()


def test_signatures_are_what_shows_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site did not look at them, a server could show it anything."""
    party = parties()
    Meeting(party, group(), NAMES).revealed("a")
    forged = {name: bytes(64) for name in NAMES}
    with pytest.raises(Refused, match="told other sites of another set"):
        party["a"].believe(group().version, forged)
    monkeypatch.setattr(Party, "_signed", lambda *_: True)
    party["a"].believe(group().version, forged)
    assert not party["a"].unproven


def test_memory_is_what_survives_a_kill() -> None:
    """A site that forgets, and is asked for seven and then for six, gives away what the seventh sent."""
    known, sums = identities(), []
    for cohort in (NAMES, NAMES[:6]):
        party = {name: Party(known[name], Forgetful()) for name in NAMES}
        sums.append(opened(Meeting(party, group(cohort=cohort), cohort)))
    assert same(minus(*sums), vectors("g"))


# A malicious site


def test_commitments_are_compared_so_that_two_masks_are_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """b masks with another stream than d: the sum is noise, and without the comparison nobody would know."""
    honest = Party._key

    def other(self: Party, purpose: bytes, about: Group, name: str) -> bytes:
        key = honest(self, purpose, about, name)
        return bytes(32) if (self.identity.name, name) == ("b", "d") else key

    monkeypatch.setattr(Party, "_key", other)
    with pytest.raises(CannotOpen, match="b and d do not have the same mask"):
        Meeting(parties(), group(), NAMES)
    monkeypatch.setattr(Opening, "__post_init__", lambda self: setattr(self, "alive", tuple(sorted(self.sent))))
    assert not same(opened(Meeting(parties(), group(), NAMES)), total_of(NAMES))


def test_a_share_of_who_vanished_is_held_against_its_commitment(monkeypatch: pytest.MonkeyPatch) -> None:
    """g vanishes and a lies about its share: another choice of shares fits; taken as it comes the sum is wrong."""
    sums = []
    for planted in (False, True):
        meeting = Meeting(parties(), group(), NAMES)
        revealed = meeting.revealed(NAMES[:6])
        revealed["a"][-1] ^= 1
        if planted:
            monkeypatch.setattr(Opening, "_fits", lambda *_: True)
        sums.append(meeting.sum(revealed))
        assert planted or meeting.opening.wrong == {"a": "gave a wrong share of the keys of g"}
    assert [same(one, total_of(NAMES)) for one in sums] == [True, False]
