"""A secure sum between seven sites: right for every way in which sites vanish, refused whenever somebody cheats."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from fedgist.federation.protocol.answered import OnDisk
from fedgist.secure import opening as openings
from fedgist.secure.graph import COMPLETE, CannotOpen, Refused, Sent, threshold
from fedgist.secure.opening import Opening
from fedgist.secure.party import BEFORE, COVERT, Identity, Party
from fedgist.secure.past import Forgetful
from parties import NAMES, Meeting, group, identities, parties, same, total_of, vectors

SUBSETS = [s for count in (5, 6, 7) for s in itertools.combinations(NAMES, count)]


def test_every_way_to_vanish_at_seven_sites() -> None:
    """n = 7, t = 5: every set that sends its vector, and every set of those that then opens the sum."""
    tried = 0
    for alive in SUBSETS:
        for responding in [s for s in SUBSETS if set(s) <= set(alive)]:
            meeting = Meeting(parties(), group(), alive)
            assert same(meeting.sum(meeting.revealed(responding)), total_of(alive)), (alive, responding)
            tried += 1
    assert threshold(7) == 5 and tried == 99


@pytest.mark.parametrize(("alive", "responding"), [(NAMES[:4], ()), (NAMES, NAMES[:4]), (NAMES[:6], NAMES[:4])])
def test_with_fewer_the_sum_stays_closed(alive: tuple[str, ...], responding: tuple[str, ...]) -> None:
    with pytest.raises(CannotOpen, match=r"5 are needed"):
        (meeting := Meeting(parties(), group(), alive)).sum(meeting.revealed(responding))


def test_what_is_sent_is_not_what_is_added() -> None:
    """The planted fault: without the own mask, who holds the pairs' keys could read a late vector."""
    meeting = Meeting(parties(), group(), NAMES)
    for name, hidden in meeting.masked.items():
        assert not same(hidden, vectors(name))
    assert not same(meeting.masked["a"], Meeting(parties(), group(), NAMES).masked["a"])


def test_a_large_cohort_stands_in_a_circle() -> None:
    names = [f"s{i:03d}" for i in range(COMPLETE + 10)]
    about = group(cohort=names)
    assert all(len(about.near(name)) == 33 and name in about.near(name) for name in names)
    assert all(name in about.near(other) for name in names for other in about.near(name))
    meeting = Meeting(parties(names), about, names[3:])
    assert same(meeting.sum(meeting.revealed(names[6:])), total_of(names[3:]))


# A malicious server


def test_asking_again_with_another_cohort_is_refused() -> None:
    party = parties()
    Meeting(party, group(), NAMES)
    with pytest.raises(Refused, match="asked round-000001-000000 before, for another set of sites"):
        party["a"].mask(group(cohort=NAMES[:6], nonce=1), vectors("a"))


def test_asking_again_for_the_same_set_is_answered() -> None:
    """As a server does that was killed and goes on from its checkpoint; keys and masks are new."""
    party = parties()
    first = Meeting(party, group(), NAMES)
    assert same(first.sum(first.revealed(NAMES)), total_of(NAMES))
    again = Meeting(party, group(nonce=1), NAMES)
    assert same(again.sum(again.revealed(NAMES)), total_of(NAMES))
    assert not same(first.masked["a"], again.masked["a"])


def test_the_set_of_a_sum_that_was_opened_cannot_shrink() -> None:
    party = parties()
    first = Meeting(party, group(), NAMES)
    first.revealed(NAMES)
    again = Meeting(party, group(nonce=1), NAMES[:6])
    with pytest.raises(Refused, match="has opened round-000001-000000 before, for another set of sites"):
        again.revealed(["a"])


def test_a_nonce_is_used_once() -> None:
    party = parties()
    Meeting(party, group(), NAMES)
    with pytest.raises(Refused, match="used a nonce twice"):
        party["a"].mask(group(), vectors("a"))


def test_keys_are_given_once_and_for_what_was_masked_last() -> None:
    party = parties()
    old = Meeting(party, group("round-000001-000000"), NAMES)
    Meeting(party, group("round-000002-000000", nonce=1), NAMES)
    with pytest.raises(Refused, match="holds no keys of round-000001-000000"):
        old.revealed(["a"])


@pytest.mark.parametrize(
    ("alive", "why"),
    [
        (NAMES[:4], "must be over at least 5"),
        (NAMES[1:], "cannot be that of this sum"),
        ((*NAMES, "stranger"), "cannot be that of this sum"),
        ((*NAMES[:6], "a"), "cannot be that of this sum"),
    ],
)
def test_a_set_that_cannot_be_is_refused(alive: tuple[str, ...], why: str) -> None:
    meeting = Meeting(parties(), group(), NAMES)
    with pytest.raises(Refused, match=why):
        meeting.party["a"].open(meeting.group.version, alive, meeting.opening.sealed_for("a"))


def test_within_a_round_a_set_changes_by_many_or_not_at_all() -> None:
    """Of two sums of nearly the same, over sets that differ by one, the difference is nearly what that one sent."""
    party = parties()
    first = Meeting(party, group("round-000001-000000"), NAMES)
    first.revealed(NAMES)
    second = Meeting(party, group("round-000001-000001", nonce=1), NAMES[:6])
    with pytest.raises(Refused, match=r"together with round-000001-000000 the sum .* would tell of fewer than 3"):
        second.revealed(["a"])
    later = Meeting(party, group("round-000002-000000", nonce=2), NAMES[:6])
    assert same(later.sum(later.revealed(NAMES[:6])), total_of(NAMES[:6]))


def test_replayed_shares_are_not_opened() -> None:
    party = parties()
    old = Meeting(party, group("round-000001-000000"), NAMES)
    new = Meeting(party, group("round-000002-000000", nonce=1), NAMES)
    with pytest.raises(Refused, match="what b sealed for this site is not from it, or not of this exchange"):
        party["a"].open(new.group.version, NAMES, old.opening.sealed_for("a"))


def test_exchanged_keys_make_nothing_readable() -> None:
    """A server that gave a another key for b than the roster has: b's seals do not open for a, and a says so."""
    known = identities()
    stranger = identities(["x"])["x"].public["x"]
    party = {name: Party(identity, Forgetful()) for name, identity in known.items()}
    deceived = Identity("a", known["a"].agreement, known["a"].signing, {**known["a"].public, "b": stranger}, bytes(32))
    party["a"] = Party(deceived, Forgetful())
    with pytest.raises(CannotOpen, match="a and b do not have the same mask: one of the two lies"):
        Meeting(party, group(), NAMES)


def test_who_is_not_in_the_roster_is_in_no_sum() -> None:
    with pytest.raises(Refused, match="with new, which is not in the roster"):
        parties()["a"].mask(group(cohort=(*NAMES, "new")), vectors("a"))


def test_too_few_sites_are_refused_whatever_the_server_says() -> None:
    with pytest.raises(Refused, match="a sum over 2 sites is one over fewer than 3"):
        parties()["a"].mask(group(cohort="ab"), vectors("a"))
    with pytest.raises(Refused, match="not in"):
        parties()["a"].mask(group(cohort="bcdefg"), vectors("a"))


def test_what_was_answered_survives_a_kill(tmp_path: Path) -> None:
    known = identities()
    party = {name: Party(identity, OnDisk(tmp_path / name)) for name, identity in known.items()}
    meeting = Meeting(party, group(), NAMES)
    meeting.revealed(NAMES)
    with (tmp_path / "a").open("a") as file:
        file.write('{"version":"round-0')  # it was killed here
    again = Party(known["a"], OnDisk(tmp_path / "a"))
    with pytest.raises(Refused, match="for another set of sites"):
        again.mask(group(cohort=NAMES[:6], nonce=1), vectors("a"))
    again.mask(group(nonce=2), vectors("a"))
    with pytest.raises(Refused, match="for another set"):
        again.open(group().version, NAMES[:6], meeting.opening.sealed_for("a"))


def test_what_the_server_told_others_shows_afterwards() -> None:
    """It told a and b of all seven, and the others of six; no set has the signatures of five that were told of it."""
    party, about = parties(), group()
    meeting = Meeting(party, about, NAMES)
    seven = {name: party[name].open(about.version, NAMES, meeting.opening.sealed_for(name))[1] for name in "ab"}
    six = {}
    for name in "cdef":
        near = [other for other in NAMES[:6] if other != name]
        rows = [meeting.sent[o].shares[about.others(o).index(name)] for o in near]
        six[name] = party[name].open(about.version, NAMES[:6], np.stack(rows))[1]
    with pytest.raises(Refused, match="the server told other sites of another set in round-000001-000000: 2 of 7"):
        party["a"].believe(about.version, seven | six)
    honest = Meeting(parties(), about, NAMES)
    signed = {n: honest.party[n].open(about.version, NAMES, honest.opening.sealed_for(n))[1] for n in NAMES[:5]}
    honest.party["a"].believe(about.version, signed)
    assert not honest.party["a"].past.unproven and honest.party["b"].past.unproven


def test_a_server_that_never_shows_it_is_not_answered_for_ever() -> None:
    party = parties()
    for i in range(9):
        meeting = Meeting(party, group(f"round-{i:06d}-000000", nonce=i), NAMES)
        meeting.revealed(NAMES)
    with pytest.raises(Refused, match="does not show that all sites were told of the same sets"):
        party["a"].mask(group("round-000010-000000", nonce=10), vectors("a"))


@pytest.mark.parametrize("trips", [COVERT, BEFORE])
def test_with_three_trips_keys_follow_signatures(trips: int) -> None:
    """Five must have signed the set that a site was told of, before it gives anything."""
    known = identities()
    party = {name: Party(known[name], Forgetful(), trips=trips) for name in NAMES}
    meeting = Meeting(party, group(), NAMES)
    version, sealed = group().version, meeting.opening.sealed_for("a")
    signed = {name: party[name].sign(version, NAMES) for name in "abcd"}
    signed["e"] = party["e"].sign(version, NAMES[:5])  # of another set
    if trips == BEFORE:
        for shown in ({}, signed):
            with pytest.raises(
                Refused, match=f"told other sites of another set .* {min(len(shown), 4)} of 7 have signed"
            ):
                party["a"].open(version, NAMES, sealed, shown)
    signed["f"] = party["f"].sign(version, NAMES)
    party["a"].open(version, NAMES, sealed, signed)
    assert (version in party["a"].past.unproven) == (trips == COVERT)
    with pytest.raises(Refused, match="has opened round-000001-000000 before, for another set"):
        party["e"].sign(version, NAMES)


def test_the_same_question_in_another_round_is_of_the_same_state() -> None:
    """As after a round that was skipped: its sums and those of the next tell together of three sites or more."""
    names, question = tuple("abcdefghij"), ["what was asked", "what was said"]
    party = parties(names)

    def ask(round: int, alive: tuple[str, ...], scopes: list[str]) -> None:
        about = group(f"round-{round:06d}-000000", names, round)
        for name in alive:
            party[name].mask(about, vectors(name), scopes)
            party[name].sign(about.version, alive)

    ask(1, names, question)
    with pytest.raises(Refused, match="together with round-000001-000000 the sum over this set"):
        ask(2, names[1:], question)
    with pytest.raises(Refused, match="together with round-000001-000000 the sum over this set"):
        ask(3, names[1:], ["another question", "what was said"])
    ask(4, names[1:], ["another question", "another answer"])
    ask(5, names[3:], question)
    ask(6, names, question)


# A malicious site


def test_wrong_keys_are_found_and_the_sum_is_right() -> None:
    """b lies about its own keys and about its shares of g's, which has vanished: others' shares do."""
    meeting = Meeting(parties(), group(), NAMES)
    revealed = meeting.revealed(NAMES[:6])
    revealed["b"] = revealed["b"] ^ 1
    assert same(meeting.sum(revealed), total_of(NAMES))
    assert meeting.opening.wrong == {"b": "gave, or was given, a wrong share of the keys of g"}


def test_wrong_shares_are_named() -> None:
    meeting = Meeting(parties(), group(), NAMES)
    revealed = meeting.revealed(NAMES)
    revealed["g"][0] ^= 1
    revealed["c"] = revealed["c"][:-1]
    assert same(meeting.sum(revealed), total_of(NAMES))
    assert meeting.opening.wrong == {
        "g": "gave, or was given, a wrong share of the keys of g",
        "c": "gave shares in another number than was asked for",
    }


def test_a_liar_among_many_is_left_out() -> None:
    """Of 33 neighbours there are more choices of shares than anybody tries."""
    names = [f"s{i:03d}" for i in range(COMPLETE + 1)]
    meeting = Meeting(parties(names), group(cohort=names), names)
    revealed = meeting.revealed(names)
    revealed["s000"] ^= 1
    assert same(meeting.sum(revealed), total_of(names)) and set(meeting.opening.wrong) == {"s000"}


def test_too_many_liars_close_the_sum() -> None:
    meeting = Meeting(parties(), group(), NAMES)
    revealed = meeting.revealed(NAMES[:6])
    for liar in "abc":
        revealed[liar] = revealed[liar] ^ 1
    with pytest.raises(CannotOpen, match=r"the shares of \w's keys do not fit each other"):
        meeting.sum(revealed)


def test_the_commitments_are_what_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: without them, a lie would be a wrong sum."""
    monkeypatch.setattr(openings.Opening, "_fits", lambda self, name, keys: True)
    meeting = Meeting(parties(), group(), NAMES)
    revealed = meeting.revealed(NAMES)
    revealed["b"][0] ^= 1
    assert not same(meeting.sum(revealed), total_of(NAMES))


def test_wrong_lengths_and_other_masks_are_named() -> None:
    meeting = Meeting(parties(), group(), NAMES)
    short = {**meeting.sent, "b": Sent(meeting.sent["b"].shares[:-1], meeting.sent["b"].commitments)}
    with pytest.raises(CannotOpen, match="b sent shares of another form"):
        Opening(meeting.group, short)
    other = meeting.sent["b"].commitments.copy()
    other[3] ^= 1
    with pytest.raises(CannotOpen, match="b and d do not have the same mask"):
        Opening(meeting.group, {**meeting.sent, "b": Sent(meeting.sent["b"].shares, other)})
