"""A secure sum with a helper: right whoever vanishes, and what each of its refusals stands for."""

import itertools
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedgist.federation.protocol.answered import OnDisk
from fedgist.secure import helper as helpers
from fedgist.secure import masks
from fedgist.secure.graph import Group, Refused
from fedgist.secure.helper import SEALED, Helper, Seeded, form_of
from fedgist.secure.party import Identity
from fedgist.secure.past import Forgetful, Past
from parties import NAMES, Vectors, group, identities, same, total_of, vectors

Sent = dict[str, tuple[Vectors, bytes]]
KNOWN = identities((*NAMES, "helper"))


def sites(least: int = 3) -> dict[str, Seeded]:
    return {name: Seeded(KNOWN[name], "helper", Forgetful(), least) for name in NAMES}


def helper(folder: Path | None = None) -> Helper:
    return Helper(KNOWN["helper"], OnDisk(folder / "helped") if folder else Forgetful())


def masked(party: dict[str, Seeded], about: Group, seed: int = 0) -> dict[str, tuple[Vectors, bytes]]:
    found = {name: party[name].mask(about, vectors(name, seed)) for name in about.cohort}
    return {name: (hidden, sealed[0].tobytes()) for name, (hidden, sealed, _) in found.items()}


def opened(by: Helper, sent: dict[str, tuple[Vectors, bytes]], alive: Collection[str]) -> Vectors:
    off = by.total({name: sent[name][1] for name in alive}, form_of(sent["a"][0]))
    total = {key: np.sum([sent[name][0][key] for name in alive], axis=0, dtype=sent["a"][0][key].dtype) for key in "ab"}
    return {key: part - hides for (key, part), hides in zip(total.items(), off, strict=True)}


def test_the_sum_is_right_for_every_set() -> None:
    """n = 7: whoever vanishes, and with the same bytes asked again."""
    sent = masked(sites(), group())
    for count in (5, 6, 7):
        for alive in itertools.combinations(NAMES, count):
            by = helper()
            assert same(opened(by, sent, alive), total_of(alive)) and same(opened(by, sent, alive), total_of(alive))
    assert all(len(sealed) == SEALED and not same(hidden, vectors(name)) for name, (hidden, sealed) in sent.items())


@pytest.mark.parametrize("checked", [True, False])
def test_two_sets_of_one_exchange_are_refused(checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a helper that was killed in between, and also of an exchange that was masked again; else g's is bare."""
    if not checked:
        monkeypatch.setattr(Past, "open", lambda *_: None)
    party = sites()
    seven = opened(helper(tmp_path), masked(party, group()), NAMES)
    again = masked(party, group(nonce=1))
    if checked:
        with pytest.raises(Refused, match="before, for another set of sites"):
            opened(helper(tmp_path), again, NAMES[:6])
    else:
        six = opened(helper(tmp_path), again, NAMES[:6])
        assert same({key: seven[key] - six[key] for key in seven}, vectors("g"))


def test_what_sites_want_holds_whatever_the_helper_wants() -> None:
    """Seven that are asked open for five or more; a site of another policy for seven, or sums that differ by six."""
    sent = masked(sites(), group())
    with pytest.raises(Refused, match="must be over at least 5"):
        opened(helper(), sent, NAMES[:4])
    strict = {**sites(), "a": Seeded(KNOWN["a"], "helper", Forgetful(), 7)}
    with pytest.raises(Refused, match="must be over at least 7"):
        opened(helper(), masked(strict, group()), NAMES[:6])
    by, party = helper(), sites()
    opened(by, masked(party, group("round-000001-000000")), NAMES)
    with pytest.raises(Refused, match="would tell of fewer than 3 of them"):
        opened(by, masked(party, group("round-000001-000001", nonce=1)), NAMES[:6])
    opened(by, masked(party, group("round-000002-000000", nonce=2)), NAMES[:6])


def test_another_run_that_is_called_the_same_is_another() -> None:
    """Exchanges of runs that are alike are one exchange, and of others not."""
    by = helper()
    opened(by, masked(sites(), replace(group(), alike="one")), NAMES)
    with pytest.raises(Refused, match="before, for another set"):
        opened(by, masked(sites(), replace(group(), alike="one", run="another")), NAMES[:6])
    opened(by, masked(sites(), replace(group(), alike="two")), NAMES[:6])


@pytest.mark.parametrize("checked", [True, False])
def test_another_roster_is_no_other_exchange(checked: bool) -> None:
    """A member joins or renews its keys: what was opened before stays so, or the difference would be what g sent."""
    by, sums = helper(), []
    for i, (roster, alive) in enumerate(((b"1" * 32, NAMES), (b"2" * 32, NAMES[:6]))):
        about = replace(group(nonce=i), roster=roster, alike="" if checked else roster.hex())  # as if it were in it
        sent = masked(sites(), about)
        if checked and i:
            with pytest.raises(Refused, match="before, for another set"):
                opened(by, sent, alive)
            return
        sums.append(opened(by, sent, alive))
    assert same({key: sums[0][key] - sums[1][key] for key in sums[0]}, vectors("g"))


@pytest.mark.parametrize("blinded", [True, False])
def test_a_helper_cannot_guess_an_answer(blinded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply that is one of few, as a count is, would be found by trying all."""
    if not blinded:
        monkeypatch.setattr(Identity, "blinded", lambda self, text: helpers._digest(text))
    sealed = sites()["a"].mask(group(), vectors("a"), ("asked", "42"))[1][0].tobytes()
    scopes = helper()._note("a", sealed)[-1]
    guesses = [helpers._digest(str(n)) in scopes for n in range(100)]
    assert any(guesses) == (not blinded)


def test_what_was_sealed_in_another_exchange_is_not_mixed_in() -> None:
    party = sites()
    old, new = masked(party, group()), masked(party, group("round-000002-000000", nonce=1))
    with pytest.raises(Refused, match="g sealed another exchange than others, or the server mixes"):
        opened(helper(), {**new, "g": old["g"]}, NAMES)


@pytest.mark.parametrize("checked", [True, False])
def test_the_form_is_what_sites_say(checked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same streams added up in fewer bits give the sums' carries away, which the sum does not tell."""
    sent = masked(sites(), group())
    if not checked:
        monkeypatch.setattr(helpers, "form_digest", lambda form: helpers._digest("any"))
        sent = masked(sites(), group())
    by, sealed = helper(), {name: one for name, (_, one) in sent.items()}
    whole = form_of(sent["a"][0])
    by.total(sealed, whole)
    narrow = [(bits // 4 if bits == 64 else bits, count * 4 if bits == 64 else count) for bits, count in whole]
    if checked:
        with pytest.raises(Refused, match="a and b and c and d and e and f and g sealed another form"):
            by.total(sealed, narrow)
    else:
        assert not np.array_equal(by.total(sealed, narrow)[0], by.total(sealed, whole)[0].view(np.uint16))


def test_seals_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that makes up seeds in six sites' names has what the seventh sent."""
    sent = masked(sites(), group())
    forged = {**sent, "b": sent["c"]}
    with pytest.raises(Refused, match="what b sealed for the helper is not from it"):
        opened(helper(), forged, NAMES)
    with pytest.raises(Refused, match="x is not in the roster"):
        helper().total({"x": sent["a"][1]}, form_of(sent["a"][0]))
    with pytest.raises(Refused, match="over no site"):
        helper().total({}, [])
    honest, plain = Identity.unseal, helpers.NOTE
    note = honest(KNOWN["helper"], "a", sent["a"][1], helpers.PURPOSE)
    assert note is not None
    made_up = {name: plain.pack(bytes(32), *plain.unpack(note)[1:]) for name in NAMES[1:]}
    monkeypatch.setattr(Identity, "unseal", lambda self, sender, *_: made_up.get(sender, note))
    total = helper().total(dict.fromkeys(NAMES, b""), form_of(sent["a"][0]))
    known = {key: np.zeros_like(part) for key, part in sent["a"][0].items()}
    for _ in NAMES[1:]:
        masks.mask(known, bytes(32), 1)
    bare = {key: sent["a"][0][key] - (part - known[key]) for (key, part) in zip("ab", total, strict=True)}
    assert same(bare, vectors("a"))


def test_a_site_remembers_too() -> None:
    party = sites()
    masked(party, group())
    with pytest.raises(Refused, match="for another set of sites"):
        party["a"].mask(group(cohort=NAMES[:6], nonce=1), vectors("a"))
    with pytest.raises(Refused, match="cannot both help with a sum and be in it"):
        party["a"].mask(group(cohort=(*NAMES, "helper"), version="round-000002-000000", nonce=2), vectors("a"))


def lying(sent: Sent, names: Collection[str], **lie: object) -> Sent:
    """The same, with something else in what these have sealed."""
    told = dict(sent)
    for name in names:
        data = KNOWN["helper"].unseal(name, sent[name][1], helpers.PURPOSE)
        assert data is not None
        note = helpers.Note(*helpers.NOTE.unpack(data))._replace(**lie)  # type: ignore[arg-type]
        told[name] = sent[name][0], KNOWN[name].seal("helper", helpers.NOTE.pack(*note), helpers.PURPOSE)
    return told


LIES: list[tuple[dict[str, object], str]] = [
    ({"group": bytes(32)}, "sealed another exchange than others, or the server mixes what sites sealed"),
    ({"exchange": bytes(32)}, "sealed another exchange than others"),
    ({"fewest": 2**32 - 1}, "sealed another number of sites than others"),
    ({"common": bytes(96)}, "sealed another round than others"),
]


@pytest.mark.parametrize(("lie", "says"), LIES)
@pytest.mark.parametrize("liars", ["g", "efg"])
def test_who_seals_what_others_do_not_is_named(lie: dict[str, object], says: str, liars: str) -> None:
    """As a site does that wants sums to fail; by the others, as long as most of them are honest."""
    sent = masked(sites(), group())
    with pytest.raises(Refused, match=f"^{' and '.join(liars)} {says}"):
        opened(helper(), lying(sent, liars, **lie), NAMES)
    with pytest.raises(Refused, match=r"^half of the sites or more sealed another"):
        opened(helper(), lying(sent, "def", **lie), NAMES[:6])
    assert same(opened(helper(), sent, NAMES), total_of(NAMES))


@pytest.mark.parametrize(("lie", "says"), LIES)
def test_without_that_check_nobody_is(lie: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "COMMON", {})
    by = helper()
    opened(by, lying(masked(sites(), group()), "g", **lie), NAMES)


def test_who_wants_what_makes_sums_fail_is_named() -> None:
    """A form that is not that of the numbers; more sites than there are; something in common with every sum."""
    sent = masked(sites(), group())
    with pytest.raises(Refused, match="of the numbers c and g sealed another form than the server says"):
        opened(helper(), lying(sent, "cg", form=bytes(32)), NAMES)
    with pytest.raises(Refused, match="over at least 4294967295: so g sealed"):
        opened(helper(), lying(sent, "g", apart=2**32 - 1), NAMES)
    by, always = helper(), b"always the same".ljust(64, b"-")
    told = {}
    for number in (1, 2):
        honest = masked(sites(), group(f"round-{number:06d}-000000", nonce=number))
        data = KNOWN["helper"].unseal("g", honest["g"][1], helpers.PURPOSE)
        told[number] = lying(honest, "g", common=helpers.Note(*helpers.NOTE.unpack(data or b"")).common[:32] + always)
    opened(by, told[1], NAMES)
    with pytest.raises(Refused, match=r"fewer than 3 of them; that these sums have something .* g sealed"):
        opened(by, told[2], NAMES[1:])
    with pytest.raises(Refused, match="fewer than 5 of them; that it must be so many is what b sealed; that"):
        opened(by, lying(told[2], "b", apart=5), NAMES[1:])
    opened(by, honest, NAMES[1:])
