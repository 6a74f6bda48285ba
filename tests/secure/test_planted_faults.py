"""What each check of a secure sum stands for: with one taken out, who cheats gets what it keeps, or spoils a sum."""

import itertools
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from fedgist.secure import masks, shamir
from fedgist.secure import past as pasts
from fedgist.secure.graph import CannotOpen, Group, Refused
from fedgist.secure.opening import Opening
from fedgist.secure.party import Identity, Party
from fedgist.secure.past import Forgetful, Past
from parties import NAMES, Meeting, Vectors, group, identities, parties, same, total_of, vectors


def minus(a: Vectors, b: Vectors) -> Vectors:
    return {key: a[key] - b[key] for key in a}


def opened(meeting: Meeting) -> Vectors:
    return meeting.sum(meeting.revealed(meeting.alive))


def without(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """Past.open still takes note of the set, which signatures need."""
    honest = getattr(Past, check)

    def unchecked(self: Past, *given: object, **more: object) -> None:
        fresh = Past(Forgetful(), 1)
        honest(fresh, *given, **more)
        self._asked |= fresh._asked
        self._opened |= fresh._opened

    monkeypatch.setattr(Past, check, unchecked)


# A malicious server


def test_who_may_be_asked_keeps_one_site_s_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same exchange for seven sites and for six: the difference is what the seventh sent."""
    without(monkeypatch, "ask")
    without(monkeypatch, "open")
    party = parties()
    seven = opened(Meeting(party, group(), NAMES))
    six = opened(Meeting(party, group(cohort=NAMES[:6], nonce=1), NAMES[:6]))
    assert same(minus(seven, six), vectors("g"))


def test_who_may_be_in_an_opened_sum_keeps_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set shrinks by one, in the same exchange or in the next of the round."""
    without(monkeypatch, "open")
    for version in ("round-000001-000000", "round-000001-000001"):
        party = parties()
        first = opened(Meeting(party, group(), NAMES))
        again = opened(Meeting(party, group(version, nonce=1), NAMES[:6]))
        assert same(minus(first, again), vectors("g"))


def test_keys_come_from_shares_alone_so_that_two_stories_open_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server tells g of all seven, and six of themselves, as if g had vanished.

    They give the keys that they share with g, and g one share of its own key, where five count. Were a site's own key
    its own to give, as it is planted here, the server would have what g sent.
    """
    drawn: list[np.ndarray] = []
    split = shamir.split
    monkeypatch.setattr(shamir, "split", lambda keys, *given: drawn.append(keys) or split(keys, *given))
    party = parties()
    meeting = Meeting(party, group(), NAMES)
    one = party["g"].open(group().version, NAMES, meeting.opening.sealed_for("g"))[0][:1]
    others = Opening(meeting.group, {name: meeting.sent[name] for name in NAMES[:6]})
    given = {name: party[name].open(group().version, NAMES[:6], others.sealed_for(name))[0] for name in NAMES[:6]}
    bare = meeting.masked["g"]
    for _, shared_with_g in others.keys(given).values():
        masks.mask(bare, shared_with_g, 1)
    with pytest.raises(CannotOpen, match="1 sites gave shares of the keys of g: 5 are needed"):
        meeting.opening._joined("g", {"g": one})
    assert not same(bare, vectors("g"))
    masks.mask(bare, drawn[NAMES.index("g")][0].tobytes(), -1)
    assert same(bare, vectors("g"))


@pytest.mark.parametrize("checked", [True, False])
def test_a_neighbourhood_is_not_told_away(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 96 sites 32 may be missing, and each has 32 neighbours. Each neighbour of one site is told that the other 31
    are missing, and gives its shares of the keys that hide that site from them: together they are all its keys."""
    if not checked:
        monkeypatch.setattr(Group, "thin", lambda *_: [])
    names = [f"s{i:03d}" for i in range(96)]
    about, victim = group(cohort=names), "s042"
    meeting = Meeting(parties(names), about, names)
    near = about.others(victim)
    shares: dict[str, dict[str, np.ndarray]] = {name: {} for name in (victim, *near)}
    for holder in near:
        story = [name for name in names if name == holder or name not in near]
        given = [name for name in about.others(holder) if name in story]
        sealed = [meeting.sent[name].shares[about.others(name).index(holder)] for name in given]
        if checked:
            with pytest.raises(Refused, match=r"and its neighbours fewer than 23 are in the set"):
                meeting.party[holder].open(about.version, story, np.stack(sealed))
            return
        rows = meeting.party[holder].open(about.version, story, np.stack(sealed))[0]
        before = [holder, *given[: given.index(victim)]]
        start = sum(1 + len(about.missing(name, story)) for name in before)
        for key, row in zip([victim, *about.missing(victim, story)], rows[start:], strict=False):
            shares[key][holder] = row
    bare = meeting.masked[victim]
    for name, parts in shares.items():
        points = [about.near(victim).index(holder) + 1 for holder in parts]
        key = shamir.join(np.stack(list(parts.values()))[: about.needed], points[: about.needed]).tobytes()
        masks.mask(bare, key, -1 if name == victim or victim < name else 1)
    assert same(bare, vectors(victim))


def test_of_a_sum_over_two_each_has_the_other_s() -> None:
    """A server that is in league with b has what a sent."""
    with pytest.raises(Refused, match="a sum over 2 sites is one over fewer than 3"):
        Meeting(parties(), group(cohort="ab"), "ab")
    both = opened(Meeting(parties(least=2), group(cohort="ab"), "ab"))
    assert same(minus(both, vectors("b")), vectors("a"))


def test_strangers_in_a_group_are_the_server_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that the server has made up, with keys that it gave a: it subtracts what they sent."""
    known = identities("abc")
    roster = {"a": known["a"].public["a"]}
    alone = Identity("a", known["a"].agreement, known["a"].signing, roster, bytes(32))
    about = group(cohort="abc")
    with pytest.raises(Refused, match="with b, which is not in the roster"):
        Party(alone, Forgetful()).mask(about, vectors("a"))
    monkeypatch.setattr(Identity, "check", lambda *_: None)
    party = {name: Party(identity, Forgetful()) for name, identity in known.items()}
    party["a"] = Party(
        Identity("a", known["a"].agreement, known["a"].signing, known["b"].public, bytes(32)), Forgetful()
    )
    assert same(minus(opened(Meeting(party, about, "abc")), total_of("bc")), vectors("a"))


@pytest.mark.parametrize("nonce", [0, 1])
def test_a_nonce_twice_makes_masks_twice(nonce: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has opened two sums knows the sites' own masks; if the others are the same, a site's change is bare."""
    without(monkeypatch, "ask")
    party, bare = parties(), []
    for number, seed in ((0, 0), (nonce, 1)):
        meeting = Meeting(party, group(nonce=number), NAMES, seed)
        own = meeting.opening.keys(meeting.revealed(NAMES))["a"][0]
        masks.mask(meeting.masked["a"], own, -1)
        bare.append(meeting.masked["a"])
    assert same(minus(*bare), minus(vectors("a", 0), vectors("a", 1))) == (nonce == 0)


@pytest.mark.parametrize("bound", [True, False])
def test_keys_are_bound_to_what_a_run_is(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with another seed has a memory of its own, and may be called the same, by the same nonce: without that
    binding it would have the same masks, too."""
    if not bound:
        monkeypatch.setattr(Group, "context", property(lambda self: self.nonce + self.nonce))
    known, bare = identities(), []
    for alike, seed in (("one", 0), ("two", 1)):
        party = {name: Party(known[name], Forgetful()) for name in NAMES}
        meeting = Meeting(party, replace(group(), alike=alike), NAMES, seed)
        masks.mask(meeting.masked["a"], meeting.opening.keys(meeting.revealed(NAMES))["a"][0], -1)
        bare.append(meeting.masked["a"])
    assert same(minus(*bare), minus(vectors("a", 0), vectors("a", 1))) == (not bound)


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


def test_keys_are_those_of_the_exchange_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one exchange could be opened twice, for seven sites and, by another name, for six."""
    party = parties()
    first = Meeting(party, group(), NAMES)
    seven = opened(first)
    six = Meeting(party, group(nonce=1), NAMES[:6])
    other = "round-000009-000000"
    with pytest.raises(Refused, match="holds no keys of round-000009-000000"):
        party["a"].open(other, NAMES[:6], six.opening.sealed_for("a"))
    monkeypatch.setattr(Party, "_kept_of", lambda self, version: self._kept)
    given = {name: party[name].open(other, NAMES[:6], six.opening.sealed_for(name))[0] for name in NAMES[:6]}
    assert same(minus(seven, six.sum(given)), vectors("g"))


def test_signatures_are_what_shows_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site did not look at them, a server could show it anything."""
    party = parties()
    Meeting(party, group(), NAMES).revealed("a")
    forged = {name: bytes(64) for name in NAMES}
    with pytest.raises(Refused, match="told other sites of another set"):
        party["a"].believe(group().version, forged)
    monkeypatch.setattr(Identity, "signed", lambda *_: True)
    party["a"].believe(group().version, forged)
    assert not party["a"].past.unproven


@pytest.mark.parametrize("most", [8, 100])
def test_a_server_that_shows_nothing_ends(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit on sums that are not proven, a server that never shows a signature is never found out."""
    monkeypatch.setattr(pasts, "MOST_UNPROVEN", most)
    party, answered = parties("abc"), 0
    for i in range(12):
        about = group(f"round-{i:06d}-000000", "abc", i)
        try:
            Meeting(party, about, "abc").revealed("abc")
        except Refused:
            break
        answered += 1
    assert answered == (9 if most == 8 else 12)


def test_memory_is_what_survives_a_kill() -> None:
    """A site that forgets, and is asked for seven and then for six, gives away what the seventh sent."""
    known, sums = identities(), []
    for cohort in (NAMES, NAMES[:6]):
        party = {name: Party(known[name], Forgetful()) for name in NAMES}
        sums.append(opened(Meeting(party, group(cohort=cohort), cohort)))
    assert same(minus(*sums), vectors("g"))


@pytest.mark.parametrize("rule", ["groups", "pairs"])
def test_several_sums_together_tell_of_no_fewer(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these four sets each two differ by four sites or more: half the first three taken off the last leaves j.

    So it does not do to compare sets in pairs.
    """
    if rule == "pairs":
        monkeypatch.setattr(pasts, "fewest_apart", lambda sets: min(len({*a} ^ {*b}) for a, b in pairs_of(sets)))
    sites, past, allowed = "abcdefghij", Past(Forgetful(), 3), []
    for i, alive in enumerate(["abcdef", "defghi", "abcghi", sites]):
        with suppress(Refused):
            past.open(f"round-{i:06d}-000000", tuple(alive), 3, ["one question"])
            allowed.append([name in alive for name in sites])
    sums, alone = np.array(allowed, float).T, np.eye(10)[9]
    off = np.linalg.lstsq(sums, alone, rcond=None)[1]
    assert len(allowed) == (4 if rule == "pairs" else 3)
    assert (off.size == 1 and off[0] < 1e-20) == (rule == "pairs")


def pairs_of(sets: list[Collection[str]]) -> Iterable[tuple[Collection[str], Collection[str]]]:
    return itertools.combinations(sets, 2) if len(sets) > 1 else [(sets[0], ())]


# A malicious site


def test_commitments_are_compared_so_that_two_masks_are_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """b masks with another stream than d: the sum is noise, and without the comparison nobody would know."""
    honest = Party._pair_key

    def other(self: Party, about: Group, name: str) -> bytes:
        return bytes(32) if (self.identity.name, name) == ("b", "d") else honest(self, about, name)

    monkeypatch.setattr(Party, "_pair_key", other)
    with pytest.raises(CannotOpen, match="b and d do not have the same mask"):
        Meeting(parties(), group(), NAMES)
    monkeypatch.setattr(Opening, "_same_mask", lambda *_: True)
    assert not same(opened(Meeting(parties(), group(), NAMES)), total_of(NAMES))


def test_a_share_is_held_against_its_commitment(monkeypatch: pytest.MonkeyPatch) -> None:
    """g vanishes and a lies about its share: another choice of shares fits; taken as it comes the sum is wrong."""
    sums = []
    for planted in (False, True):
        meeting = Meeting(parties(), group(), NAMES)
        revealed = meeting.revealed(NAMES[:6])
        revealed["a"][-1] ^= 1
        if planted:
            monkeypatch.setattr(Opening, "_fits", lambda *_: True)
        sums.append(meeting.sum(revealed))
        assert planted or meeting.opening.wrong == {"a": "gave, or was given, a wrong share of the keys of g"}
    assert [same(one, total_of(NAMES)) for one in sums] == [True, False]


def test_lengths_are_looked_at_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """b sends one commitment too few: named; without the look the server's own program ends."""
    meeting = Meeting(parties(), group(), NAMES)
    meeting.sent["b"] = replace(meeting.sent["b"], commitments=meeting.sent["b"].commitments[:3])
    with pytest.raises(CannotOpen, match="b sent shares of another form"):
        Opening(meeting.group, meeting.sent)
    monkeypatch.setattr(Opening, "_check_form", lambda *_: None)
    with pytest.raises(IndexError):
        Opening(meeting.group, meeting.sent)
