"""Secure sums over a wire: the same states as in one process, sites and server killed, a server that cheats."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from safetensors.torch import load

from fedgist import methods, storage
from fedgist.core.codec import to_bytes
from fedgist.core.errors import FedgistError
from fedgist.core.message import WireError
from fedgist.engines import executor
from fedgist.engines.layer import SiteLayer
from fedgist.engines.schemes import HelperSide, Simulated
from fedgist.engines.secure_sum import SecureSum, masked
from fedgist.experiments.inputs import build_model
from fedgist.families.global_model import Local
from fedgist.federation.protocol import audit
from fedgist.federation.protocol.envelope import Question, Refusal, Request, Start, Unfitting, seal, unseal
from fedgist.federation.protocol.helper_host import HelperHost
from fedgist.federation.protocol.keys import SiteKeys
from fedgist.federation.protocol.policy import Policy, Refused
from fedgist.federation.protocol.remote_engine import Lost, RemoteEngine
from fedgist.federation.protocol.roster import Member, Roster, make
from fedgist.federation.protocol.secure_sums import helper_side, server_layer, site_layer
from fedgist.federation.protocol.site_host import SiteHost
from fedgist.federation.sim import TRIAL
from fedgist.options import build
from fedgist.secure.helper import SEALED, Seeded
from fedgist.secure.ring import Grid
from toys import toy, toy_federation

IDS = [str(i) for i in range(7)]
PRIVATE = {id: SiteKeys(Ed25519PrivateKey.generate(), X25519PrivateKey.generate()) for id in IDS}


def member(id: str) -> Member:
    own = PRIVATE[id]
    return Member(
        id,
        id.encode() * 32,
        own.signing.public_key().public_bytes_raw(),
        own.agreement.public_key().public_bytes_raw(),
    )


ROSTER = make(1, "trial", map(member, IDS))


def everybody(method: str, clients: int = 7) -> dict[str, Any]:
    """So many clients, all of which are asked."""
    return {"clients": clients} | ({} if method == "gist" else {"active": 0})


class Wire:
    """Carries envelopes to hosts here; `spoil` may change or lose what a site is sent, and `after` what it answers."""

    def __init__(self, method: str, folder: Path, rules: Policy = TRIAL, clients: Sequence[str] = IDS):
        self.config, self.inputs = toy(method, **everybody(method, len(clients)))
        self.folder, self.rules = folder, rules
        self.spoil: Callable[[str, bytes], bytes | Lost] = lambda id, data: data
        self.after: Callable[[str, bytes], bytes | Lost] = lambda id, data: data
        self.hosts = {id: self.host(id) for id in clients}
        self.seen: list[tuple[str, Any]] = []

    def host(self, id: str) -> SiteHost:
        def prepare(start: Start) -> Any:
            kind = methods.find(start.method)
            task = self.inputs.task
            named = {spec: build_model(spec, task.shape, task.classes) for spec in start.task["models"]}
            told = replace(task, models=named, model=start.task["model"])
            return kind(build(kind.Config, start.options), told), self.inputs.sites[id]

        def layer(start: Start, folder: Path) -> SiteLayer:
            return site_layer(id, start, folder, self.rules, ROSTER, PRIVATE[id])

        return SiteHost(id, self.folder / id, prepare, executor("sequential"), self.rules, layer=layer)

    def exchange(self, requests: Any, timeout: float, enough: int) -> dict[str, bytes | Lost]:
        found: dict[str, bytes | Lost] = {}
        for id, data in requests.items():
            given = self.spoil(id, data)
            answer = given if isinstance(given, Lost) else self.after(id, self.hosts[id].handle(given))
            found[id] = answer
            with suppress(WireError):  # what a test has damaged
                self.seen += [(id, unseal(answer)[0])] if isinstance(answer, bytes) else []
        return found

    def engine(self, roster: Roster = ROSTER, trips: int = 2, helper: str = "") -> RemoteEngine:
        built = methods.find(self.config.method)(self.config.options, self.inputs.task)
        layer = server_layer(roster, Grid(), 3, trips, helper)
        return RemoteEngine(built, self, self.inputs.info, seed=0, executor=executor("sequential"), layer=layer)

    def whys(self) -> set[str]:
        return {header.why for _, header in self.seen if hasattr(header, "why")}


def kind_of(data: bytes) -> str:
    header = unseal(data)[0]
    return header.type if isinstance(header, Request) else type(header).__name__


@pytest.mark.parametrize("method", ["fedavg", "codream", "gist"])
def test_the_same_states_as_in_one_process(method: str, tmp_path: Path) -> None:
    near = toy_federation(method, **everybody(method), between=SecureSum(IDS, Simulated()))
    wire = Wire(method, tmp_path)
    far = wire.engine()
    for _ in range(2):
        assert (near.run_round().skipped, far.run_round().skipped) == (None, None)
    assert near.evaluate(wire.inputs.test) == far.evaluate(wire.inputs.test)
    assert storage.digest(near.states) == storage.digest(far.states)
    assert not wire.whys()


def test_a_site_that_vanishes_between_the_trips_is_in_the_sum(tmp_path: Path) -> None:
    whole, less = Wire("fedavg", tmp_path / "whole").engine(), Wire("fedavg", tmp_path / "less")
    less.spoil = lambda id, data: Lost("is gone") if id == "3" and kind_of(data).endswith("Unmask") else data
    engine = less.engine()
    assert engine.run_round().skipped is None and whole.run_round().skipped is None
    assert engine.digest() == whole.digest() and engine.missing["3"].startswith("is gone")


def test_a_site_that_never_answers_is_not(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path)
    wire.spoil = lambda id, data: Lost("is gone") if id == "3" and kind_of(data) == "global_model.Global" else data
    layer = SecureSum(IDS, Simulated())
    near = toy_federation("fedavg", **everybody("fedavg"), between=layer, offline=lambda id, *_: id == "3")
    engine = wire.engine()
    assert engine.run_round().skipped is None and near.run_round().skipped is None
    assert storage.digest(engine.states) == storage.digest(near.states)


def test_with_too_few_the_round_is_skipped_and_says_so(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path)
    wire.spoil = lambda id, data: Lost("is gone") if id in "456" and kind_of(data).endswith("Unmask") else data
    engine = wire.engine()
    report = engine.run_round()
    assert report.skipped and "4 sites gave shares of the keys of 0: 5 are needed" in report.skipped
    wire.spoil, engine.gone, engine.lost = lambda id, data: data, {}, set()
    assert engine.run_round().skipped is None  # nobody takes too few signatures for those of another set


def test_who_says_that_keys_do_not_fit_is_as_one_who_vanishes(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path)
    unfit = seal(Unfitting("w", 7, "needs more"))
    wire.spoil = lambda id, data: Lost("") if id == "3" and kind_of(data).endswith("Unmask") else data
    exchange = wire.exchange

    def lie(requests: Any, timeout: float, enough: int) -> dict[str, bytes | Lost]:
        return {id: unfit if found == Lost("") else found for id, found in exchange(requests, timeout, enough).items()}

    wire.exchange = lie  # type: ignore[method-assign]
    engine = wire.engine()
    assert engine.run_round().skipped is None
    assert engine.missing == {"3": "did not help to open the sum: needs more"}


def test_with_three_trips_everybody_has_seen_the_signatures(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path / "three", replace(TRIAL, sum_trips=3))
    two, three, whole = wire.engine(), wire.engine(trips=3), Wire("fedavg", tmp_path / "two").engine()
    with pytest.raises(FedgistError, match="policy wants 3 trips: start the run with --secure masks:trips=3"):
        two.run_round()
    for _ in range(2):
        assert three.run_round().skipped is None and whole.run_round().skipped is None
    assert three.digest() == whole.digest()
    wire.spoil = lambda id, data: Lost("is gone") if id in "456" and kind_of(data).endswith("Agree") else data
    report = three.run_round()
    assert report.skipped and "4 sites have signed whose sum it is: 5 are needed" in report.skipped


def test_the_same_question_of_a_round_that_was_skipped(tmp_path: Path) -> None:
    """Site 6 goes; in the next round the same is asked of six, so that the difference is what 6 sent."""
    wire = Wire("fedavg", tmp_path)
    engine = wire.engine()
    start, before = dict(engine.states), dict(engine.versions)
    engine.run_round()
    engine.states, engine.versions, engine.gone = start, before, {"6": "left out on purpose"}
    report = engine.run_round()
    assert report.skipped and "cannot be summed" in report.skipped
    assert {why.partition(" the sum")[0] for why in wire.whys()} == {"together with round-000001-000000"}
    engine.gone |= {"5": "left out, too", "4": "left out, too"}
    assert engine.run_round().skipped is None


def test_a_late_reply_is_that_of_a_site_that_vanished(tmp_path: Path) -> None:
    """Site 3 masked and its vector came too late: the sum is that of the six, and the next round has all."""
    wire = Wire("fedavg", tmp_path)
    wire.after = lambda id, data: Lost("is late") if id == "3" and b"masked.Local" in data[:300] else data
    layer = SecureSum(IDS, Simulated())
    near = toy_federation("fedavg", **everybody("fedavg"), between=layer, offline=lambda id, *_: id == "3")
    engine = wire.engine()
    assert engine.run_round().skipped is None and near.run_round().skipped is None
    assert storage.digest(engine.states) == storage.digest(near.states)
    wire.after, engine.gone, engine.lost = lambda id, data: data, {}, set()
    report = engine.run_round()
    assert report.skipped is None and report.answered == 7


def test_everybody_killed_and_resumed(tmp_path: Path) -> None:
    """Server and sites die after round 1 and in the middle of round 2; new ones go on to the same end."""
    whole = Wire("codream", tmp_path / "whole").engine()
    for _ in range(3):
        whole.run_round()
    wire = Wire("codream", tmp_path / "killed")
    first = wire.engine()
    first.run_round()
    storage.save(first.snapshot(), tmp_path / "checkpoint")
    first.run_round()  # its end was never written down
    wire = Wire("codream", tmp_path / "killed")
    second = wire.engine()
    second.restore(storage.load(tmp_path / "checkpoint"))
    for _ in range(2):
        assert second.run_round().skipped is None
    assert second.digest() == whole.digest()


# A server that cheats


def test_the_same_exchange_for_another_set_is_refused(tmp_path: Path) -> None:
    """It asks round 1 again without site 6: the difference of the two sums would be what 6 sent."""
    wire = Wire("fedavg", tmp_path)
    engine = wire.engine()
    engine.run_round()
    for again in (engine, wire.engine()):  # also under another name: the run would be the same
        again.gone, again.rounds_done = {"6": "left out on purpose"}, 0
        report = again.run_round()
        assert report.skipped and "0 of 7 answered" in report.skipped
    assert wire.whys() == {
        "it has answered round-000001-000000 already, and was asked something else then",
        "the server asked round-000001-000000 before, for another set of sites",
    }


RESAID: dict[str, Callable[[Start], Start]] = {
    "order": lambda start: replace(start, options=dict(reversed(start.options.items()))),
    "text": lambda start: replace(start, options=start.options | {"lr": str(start.options["lr"])}),
    "left out": lambda start: replace(start, options={k: v for k, v in start.options.items() if k != "momentum"}),
    "zero": lambda start: replace(start, options=start.options | {"momentum": -0.0}),
    "protocol": lambda start: replace(start, protocol=1),
    "model": lambda start: replace(
        start, model=(spec := start.model + ":norm=none"), task=start.task | {"models": [spec], "model": spec}
    ),
    "models": lambda start: replace(start, task=start.task | {"models": [start.model, start.model + ":norm=none"]}),
    "more": lambda start: replace(start, task=start.task | {"more": 1}),
    "numbers": lambda start: replace(start, task=start.task | {"classes": float(start.task["classes"])}),
}


@pytest.mark.parametrize("how", RESAID)
def test_the_same_run_in_other_words_is_the_same(how: str, tmp_path: Path) -> None:
    """Round 1 once more without site 6, of a run that is begun in other words."""

    def otherwise(id: str, data: bytes) -> bytes:
        header, payload = unseal(data)
        if not isinstance(header, Start):
            return data
        said = seal(RESAID[how](header), payload)
        assert said != data
        return said

    wire = Wire("fedavg", tmp_path)
    assert wire.engine().run_round().skipped is None
    wire.spoil, again = otherwise, wire.engine()
    again.gone = {"6": "left out on purpose"}
    report = again.run_round()
    assert report.skipped and "0 of 7 answered" in report.skipped
    assert wire.whys() == {"the server asked round-000001-000000 before, for another set of sites"}


def test_a_set_that_shrinks_at_the_second_trip_is_refused(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path)
    wire.engine().run_round()
    again = wire.engine()
    wire.after = lambda id, data: Lost("is dropped on purpose") if id == "6" and b"masked.Local" in data[:300] else data
    report = again.run_round()
    assert report.skipped and "cannot be summed" in report.skipped
    assert wire.whys() == {"the server has opened round-000001-000000 before, for another set of sites"}


def test_another_roster_is_refused(tmp_path: Path) -> None:
    stranger = Member("2", b"x" * 32, b"y" * 32, b"z" * 32)
    swapped = make(1, "trial", [member(id) if id != "2" else stranger for id in IDS])
    wire = Wire("fedavg", tmp_path)
    with pytest.raises(FedgistError, match=r"too few sites are left \(--min-sites 1; "):
        wire.engine(swapped).run_round()
    assert all("goes by another roster than this site's, which is number 1" in why for why in wire.whys())
    assert len(wire.whys()) == 1


def test_a_server_that_wants_the_reply_itself_is_refused(tmp_path: Path) -> None:
    """No invitation, or one for a set without the site: nothing leaves."""
    wire = Wire("fedavg", tmp_path)
    wire.engine().run_round()

    def bare(id: str, data: bytes) -> bytes:
        header, payload = unseal(data)
        if isinstance(header, Request) and header.invited:
            return seal(Request(**{**vars(header), "round": 2, "invited": 0}), payload[header.invited :])
        return data

    wire.spoil = bare
    report = wire.engine().run_round()
    assert report.skipped and "0 of 7 answered" in report.skipped
    assert not any(type(header).__name__ == "Reply" and header.type == "global_model.Local" for _, header in wire.seen)


def test_a_policy_may_want_secure_sums_and_more_of_them(tmp_path: Path) -> None:
    rules = replace(TRIAL, secure=True, min_sum=8)
    wire = Wire("fedavg", tmp_path, rules)
    assert wire.engine().run_round().skipped
    assert wire.whys() == {"a sum over 7 sites is one over fewer than 8"}
    start = Start("run-1", "fedavg", 0, "mlp", {}, {})
    with pytest.raises(Refused, match="allows only runs with secure sums"):
        site_layer("0", start, tmp_path, rules, ROSTER, PRIVATE["0"])
    known = dict(server_layer(ROSTER, Grid(), 3).told)
    site_layer("0", replace(start, layer=json.dumps(known)), tmp_path, rules, ROSTER, PRIVATE["0"])
    for told in ("[]", "{}", *(json.dumps({**known, key: 7}) for key in ("bits", "kind", "trips", "roster"))):
        with pytest.raises(Refused, match="of a kind that this site does not know"):
            site_layer("0", replace(start, layer=told), tmp_path, rules, ROSTER, PRIVATE["0"])


# A site that cheats


def test_a_site_with_wrong_keys_is_named_and_the_sum_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, lying = Wire("fedavg", tmp_path / "whole").engine(), Wire("fedavg", tmp_path / "lying")

    def lie(id: str, data: bytes) -> bytes:
        if id != "2" or b"secure_sum.Unmasked" not in data[:400]:
            return data
        header, payload = unseal(data)
        first = 8 + int.from_bytes(payload[:8], "little")  # of its share of its own key
        return seal(header, payload[:first] + bytes([payload[first] ^ 1]) + payload[first + 1 :])

    lying.after = lie
    engine = lying.engine()
    assert engine.run_round().skipped is None and whole.run_round().skipped is None
    assert engine.digest() == whole.digest()
    assert "site 2 gave, or was given, a wrong share of the keys of 2; the sum is right without it" in caplog.text


def test_what_is_cut_short_is_its_sender_s_failure(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path)
    wire.after = lambda id, data: data[:-5] if id == "2" and b"masked.Local" in data[:300] else data
    engine = wire.engine()
    assert engine.run_round().skipped is None
    assert engine.missing["2"].startswith("sent what cannot be used")


@pytest.mark.parametrize("how", ["bits", "length"])
def test_a_vector_of_another_form_is_left_out(how: str, tmp_path: Path) -> None:
    def other(id: str, data: bytes) -> bytes:
        if id != "2" or b"masked.Local" not in data[:300]:
            return data
        header, payload = unseal(data)
        leaves = load(payload)
        name = max(leaves, key=lambda name: leaves[name].numel() * name.startswith("pw/"))
        leaves[name] = leaves[name].to(torch.int32) if how == "bits" else leaves[name][1:].contiguous()
        return seal(header, to_bytes(masked(Local), leaves))

    layer = SecureSum(IDS, Simulated())
    near = toy_federation("fedavg", **everybody("fedavg"), between=layer, offline=lambda id, *_: id == "2")
    wire = Wire("fedavg", tmp_path)
    wire.after, engine = other, wire.engine()
    assert engine.run_round().skipped is None and near.run_round().skipped is None
    assert storage.digest(engine.states) == storage.digest(near.states)
    assert ("in another shape than" if how == "bits" else "sent what cannot be used") in engine.missing["2"]


# A helper


@pytest.fixture
def helped(tmp_path: Path) -> Wire:
    """Six sites, and the seventh as their helper."""
    wire = Wire("fedavg", tmp_path, replace(TRIAL, helper="6"), clients=IDS[:6])
    wire.hosts["6"] = helper_host(tmp_path)  # type: ignore[assignment]
    return wire


def helper_host(folder: Path, rules: Policy = TRIAL) -> HelperHost:
    def side(known: Roster) -> HelperSide:
        return helper_side("6", folder / "6", rules, known, PRIVATE["6"])

    return HelperHost("6", folder / "6", lambda told: b"", lambda: ROSTER, side)


def test_a_helper_gives_the_states_of_one_process(helped: Wire) -> None:
    ids = IDS[:6]
    near = toy_federation("fedavg", clients=6, active=0, between=SecureSum(ids, Simulated()))
    far = helped.engine(helper="6")
    for _ in range(2):
        assert (near.run_round().skipped, far.run_round().skipped) == (None, None)
    assert storage.digest(near.states) == storage.digest(far.states) and not helped.whys()
    asked = [header.type for id, header in helped.seen if id == "6"]
    assert asked == ["secure_sum.MaskSum"] * 2


def test_a_helper_that_is_gone_skips_the_round_and_comes_back(helped: Wire) -> None:
    engine = helped.engine(helper="6")
    helped.spoil = lambda id, data: Lost("is gone") if id == "6" else data
    report = engine.run_round()
    assert report.skipped and "6 does not give the sum of the masks" in report.skipped
    helped.spoil = lambda id, data: data
    assert engine.run_round().skipped is None


def test_a_helper_remembers_what_it_opened_also_when_it_was_killed(helped: Wire, tmp_path: Path) -> None:
    """Site 5's vector is dropped and round 1 asked again: the sites answer, and do not know of the set."""
    helped.engine(helper="6").run_round()
    helped.hosts["6"] = helper_host(tmp_path)  # type: ignore[assignment]
    helped.after = lambda id, data: Lost("is dropped on purpose") if id == "5" and b"masked.L" in data[:300] else data
    report = helped.engine(helper="6").run_round()
    assert report.skipped and "6 does not give the sum of the masks" in report.skipped
    assert any("before, for another set of sites" in why for why in helped.whys())


def test_a_site_wants_the_helper_that_its_policy_names(tmp_path: Path) -> None:
    wire = Wire("fedavg", tmp_path, replace(TRIAL, helper="5"), clients=IDS[:5])
    wire.hosts["6"] = helper_host(tmp_path)  # type: ignore[assignment]
    with pytest.raises(FedgistError, match="does not name the helper of this run"):
        wire.engine(helper="6").run_round()


@pytest.mark.parametrize(
    ("sealed", "says"),
    [(SEALED, "6 does not give the sum of the masks; if"), (9, "2 sent no seed that 6 could open: to")],
)
def test_a_site_that_seals_nothing_for_the_helper_is_named(
    sealed: int, says: str, helped: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Seeded.mask

    def lie(self: Seeded, *given: Any) -> Any:
        hidden, seed, commitments = honest(self, *given)
        return hidden, np.zeros((1, sealed), np.uint8) if self.identity.name == "2" else seed, commitments

    monkeypatch.setattr(Seeded, "mask", lie)
    engine = helped.engine(helper="6")
    report = engine.run_round()
    assert report.skipped and says in report.skipped and "revoke" in report.skipped
    if sealed == SEALED:
        assert "what 2 sealed for the helper is not from it" in engine.missing["6"]


def test_a_helper_answers_nothing_else_and_makes_no_more_than_it_bears(helped: Wire, tmp_path: Path) -> None:
    host = helper_host(tmp_path)
    for header in (Start("run-1", "fedavg", 0, "mlp", {}, {}), Request("run-1", 1, "round", 0, "a.B", "", [])):
        said = unseal(host.handle(seal(header)))[0]
        assert isinstance(said, Refusal) and said.refused and "answers nothing but sums of masks" in said.why
    assert "not an envelope" in unseal(host.handle(b"what"))[0].why  # type: ignore[union-attr]
    notes = [
        (note["direction"], note["kind"]) for note in audit.read(tmp_path / "6" / "audit.jsonl") if "refused" in note
    ]
    assert notes == [("out", "Refusal")] * 3  # as `site status` shows them
    old = seal(Question("fedavg", [1], 2, protocol=1), protocol=1)
    assert b"sha256" not in host.handle(old)  # of which a server with version 1 of the protocol knows nothing
    helped.hosts["6"] = helper_host(tmp_path, replace(TRIAL, max_model=100))  # type: ignore[assignment]
    assert helped.engine(helper="6").run_round().skipped
    assert any("bytes of masks are more than the 1,600 that this helper makes" in why for why in helped.whys())
