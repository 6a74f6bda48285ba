"""Sites that write to each other: who is away, who lies, what the relay sees, what a policy allows."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedgist.api as fg
from fedgist import methods, storage
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Ledger
from fedgist.core.message import WireError
from fedgist.core.tree import leaves
from fedgist.federation.protocol.envelope import AGAIN, Delivery, Request, Start, Step, Stepped, seal, unseal
from fedgist.federation.protocol.letters import About, bundle, unbundle
from fedgist.federation.protocol.policy import Policy
from fedgist.federation.protocol.remote_engine import Attendance, Patience
from fedgist.methods.dfedavg import DFedAvg, Give, Train
from peers import Relay, audit, digest, in_process, states

Seen = list[tuple[str, bytes, bytes]]


def place(data: bytes) -> tuple[int, int]:
    """The round and the exchange of what the coordinator sends in a round; (0, 0) for all else."""
    header = unseal(data)[0]
    return (header.round, header.exchange) if isinstance(header, (Step, Delivery)) else (0, 0)


# Who is away


@pytest.mark.parametrize("method", ["repshare", "dfedavg"])
@pytest.mark.parametrize("since", [(2, 0), (2, 1)])
def test_a_site_that_is_away_is_missed_and_catches_up(method: str, since: tuple[int, int], tmp_path: Path) -> None:
    """From an exchange on until the end of round 3; back in round 4: as in one process with the same absence."""
    relay = Relay(method, tmp_path)
    relay.away = lambda id, data: id == "2" and since <= place(data) < (4, 0)
    engine = relay.engine(attend=lambda absent: Attendance({id: 2 for id in absent if engine.rounds_done == 3}))
    near = in_process(method, offline=lambda id, round, exchange: id == "2" and since <= (round, exchange) < (4, 0))
    for round in range(1, 5):
        there, here = engine.run_round(), near.run_round()
        assert (there.skipped, there.answered) == (here.skipped, here.answered)
        assert list(there.missing) == (["2"] if round in (2, 3) else [])
    assert "is switched off" in engine.run_round().missing.get("2", "is switched off")
    near.run_round()
    assert digest(engine, tmp_path) == near.digest()


def test_who_hears_too_few_skips_the_round_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `at_least` of three, the neighbours of a site that is away do not mix, and the others do."""

    async def round(self: DFedAvg, state: fg.State, fed: fg.Federation) -> fg.State:
        await fed.ask([fed.node], Train(), fg.Done)
        total = (await fed.ask(fed.ids, Give(), fg.Local, at_least=3)).sum
        await fed.ask([fed.node], fg.Global(fg.tree.scale(total.pw, 1 / total.p)), fg.Done)
        return state

    monkeypatch.setattr(DFedAvg, "round", round)
    relay = Relay("dfedavg", tmp_path)
    relay.away = lambda id, data: id == "2" and place(data) >= (2, 1)
    engine, near = relay.engine(), in_process("dfedavg", offline=lambda id, *when: id == "2" and when >= (2, 1))
    reports = [(engine.run_round(), near.run_round()) for _ in range(2)]
    assert [(there.skipped, there.answered) for there, _ in reports] == [(None, 5), (None, 2)]
    assert [here.answered for _, here in reports] == [5, 2]
    assert digest(engine, tmp_path) == near.digest()
    assert {id for id, version in engine.nodes.items() if version.startswith("round-000002")} == {"0", "4"}


def test_a_site_that_was_restarted_in_a_round_waits_for_the_next(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)

    def restarted(id: str, data: bytes) -> bytes:
        if id == "3" and isinstance(unseal(data)[0], Step) and place(data) == (2, 1):
            relay.restart("3")
        return data

    relay.spoil = restarted
    engine, near = (
        relay.engine(),
        in_process("repshare", offline=lambda id, *when: id == "3" and (2, 1) <= when < (3, 0)),
    )
    for _ in range(3):
        report = engine.run_round()
        near.run_round()
        if report.round == 2:
            assert "left round 2 at exchange 1: it is not in the middle of round 2" in report.missing["3"]
    assert digest(engine, tmp_path) == near.digest() and not report.missing


def test_a_round_in_which_nobody_is_there_is_skipped_and_leaves_no_trace(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    engine, near = relay.engine(attend=everybody), in_process("repshare", offline=lambda id, round, _: round == 2)
    relay.away = lambda id, data: place(data)[0] == 2 and id != "4"
    relay.spoil = lambda id, data: seal(replace(unseal(data)[0], run="other")) if place(data)[0] == 2 else data
    skipped = [(engine.run_round().skipped, near.run_round().skipped) for _ in range(3)]
    assert ["round 2" in (ours or "") for ours, _ in skipped] == [theirs is not None for _, theirs in skipped]
    assert digest(engine, tmp_path) == near.digest()


@pytest.mark.parametrize("call", [0, 3, 8])
def test_a_coordinator_that_dies_at_any_point_leaves_no_trace(call: int, tmp_path: Path) -> None:
    """It dies after so many trips of round 2, and another goes on from round 1."""
    whole, relay = Relay("dfedavg", tmp_path / "whole"), Relay("dfedavg", tmp_path / "killed")
    engine, first = whole.engine(), relay.engine()
    first.run_round()
    saved, trips = first.snapshot(), Counter[str]()

    def count(id: str, data: bytes) -> bytes:
        trips[id] += 1
        if trips[id] > call / 2:
            raise KeyboardInterrupt
        return data

    relay.spoil = count
    with pytest.raises(KeyboardInterrupt):
        [first.run_round() for _ in range(9)]
    relay.spoil = lambda id, data: data
    second = relay.engine()
    second.restore(saved)
    for _ in range(2):
        second.run_round()
    for _ in range(3):
        engine.run_round()
    assert digest(second, tmp_path / "killed") == digest(engine, tmp_path / "whole")


def test_a_coordinator_that_was_replaced_conducts_nobody(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    first, second = relay.engine(), relay.engine()
    first.run_round()
    second.restore(first.snapshot())
    second.run_round()
    before = digest(second, tmp_path)
    late = first.run_round()
    assert late.skipped is not None and all(AGAIN in why for why in late.missing.values()) and len(late.missing) == 5
    assert digest(second, tmp_path) == before
    assert second.run_round().missing == {}


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """A whole round of another run in the middle of a round, at every site."""
    relay, alone = Relay("repshare", tmp_path / "both"), Relay("repshare", tmp_path / "alone")
    first, second, only = relay.engine(), relay.engine(), alone.engine()
    reports = []

    def between(id: str, data: bytes) -> bytes:
        header = unseal(data)[0]
        if isinstance(header, Step) and (header.run, header.exchange, id) == (first.run, 1, "2"):
            relay.spoil = lambda id, data: data
            reports.append(second.run_round())
            relay.spoil = between
        return data

    relay.spoil = between
    for _ in range(2):
        reports.append(first.run_round())
        only.run_round()
    assert len(reports) == 4 and not any(report.missing for report in reports)
    assert digest(first, tmp_path / "both") == digest(second, tmp_path / "both") == digest(only, tmp_path / "alone")


def everybody(absent: Any) -> Attendance:
    return Attendance(dict.fromkeys(absent, 2))


# What the relay sees


def letters_in(seen: Seen) -> list[bytes]:
    found = []
    for _, *both in seen:
        for data in both:
            header, payload = unseal(data)
            if type(header).__name__ in ("Step", "Stepped", "Delivery", "Delivered"):
                found += unbundle(payload)[1].values()
    return found


def readable(seen: Seen, secrets: list[bytes]) -> list[str]:
    """What of the sites' numbers, or of their messages' names, is to be read in what a relay carried."""
    everything = b"".join(data for _, *both in seen for data in both)
    found = [f"{len(part)} bytes of a state" for part in secrets if part in everything]
    letters = b"".join(set(letters_in(seen)))  # each is seen when it comes and when it goes
    found += [name for name in ("repshare", "Representations", "Request", "F32") if name.encode() in letters]
    counts = Counter(letters)
    expected = len(letters) / 256
    chi = sum((counts[byte] - expected) ** 2 / expected for byte in range(256))  # 255 degrees: 255 ± 22.6
    return found + [f"chi² {chi:.0f}"] * (chi > 255 + 6 * 22.6)


def released(relay: Relay, engine: Any, folder: Path) -> list[bytes]:
    """Sixteen bytes out of every tensor that sites gave to their neighbours."""
    clients, _ = states(engine, folder)
    parts = [leaf.numpy().tobytes() for state in clients.values() for leaf in leaves(state["released"])]
    return [part[i : i + 16] for part in parts for i in range(0, len(part) - 16, 64) if len(set(part[i : i + 16])) > 4]


def test_the_relay_sees_only_sealed_bytes(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    engine = relay.engine()
    for _ in range(2):
        engine.run_round()
    secrets = released(relay, engine, tmp_path)
    assert len(secrets) > 100
    assert readable(relay.seen, secrets) == []


def test_sites_that_do_not_seal_are_found(tmp_path: Path) -> None:
    """The same check with a planted fault: it must not pass."""

    class Open:
        def seal(self, about: About, data: bytes) -> bytes:
            return bytes(28) + data

        def open(self, about: About, letter: bytes) -> bytes:
            return letter[28:]

    relay = Relay("repshare", tmp_path)
    for host in relay.hosts.values():
        host.desk = lambda network: Open()
    relay.hosts["0"].desk = lambda network: Open()
    engine = relay.engine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedgist.federation.protocol.peer_site.Seen.note", lambda self, nonce: None)
        for _ in range(3):
            engine.run_round()
    found = readable(relay.seen, released(relay, engine, tmp_path))
    assert {"repshare", "Request", "F32"} <= set(found) and any("chi" in one for one in found)
    assert any("of a state" in one for one in found)


# Who lies


def delivered(relay: Relay, to: str) -> list[bytes]:
    return [data for id, data, _ in relay.seen if id == to and isinstance(unseal(data)[0], Delivery)]


def refusals(relay: Relay, id: str, data: bytes) -> dict[str, str]:
    header, payload = unseal(relay.hosts[id].handle(data))
    return unbundle(payload)[0]["refused"] if hasattr(header, "changed") else {"all": header.why}


def test_replayed_letters_are_refused_also_after_a_restart(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    engine = relay.engine()
    engine.run_round()
    (first,) = delivered(relay, "1")
    assert refusals(relay, "1", first) == dict.fromkeys(["0", "2"], "a letter that it has opened before")
    relay.restart("1")
    assert refusals(relay, "1", first) == dict.fromkeys(["0", "2"], "a letter that it has opened before")
    engine.run_round()
    header, payload = unseal(delivered(relay, "1")[-1])
    old = seal(header, unseal(first)[1])  # an old letter as one of this round
    assert set(refusals(relay, "1", old).values()) == {
        "a letter that 0 has not sealed for this place",
        "a letter that 2 has not sealed for this place",
    }
    swapped = dict(zip(("0", "2"), reversed(unbundle(payload)[1].values()), strict=True))
    assert len(refusals(relay, "1", seal(header, bundle({}, swapped)))) == 2  # as from each other


def test_what_another_process_of_a_site_has_opened_is_opened_before(tmp_path: Path) -> None:
    """Also in a run that a process has laid aside for another, while a second process answered in it."""
    relay = Relay("repshare", tmp_path)
    first, second, aside = relay.engine(), relay.engine(), relay.hosts["1"]
    first.run_round()
    second.run_round()
    relay.restart("1")
    first.run_round()
    relay.hosts["1"] = aside
    again = refusals(relay, "1", delivered(relay, "1")[-1])
    assert again == dict.fromkeys(["0", "2"], "a letter that it has opened before")


def test_letters_of_strangers_and_open_ones_are_refused(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    relay.engine().run_round()
    header, payload = unseal(delivered(relay, "1")[0])
    letter = unbundle(payload)[1]["0"]
    assert refusals(relay, "1", seal(header, bundle({}, {"3": letter}))) == {
        "3": "3 is no neighbour of this site in round 1"
    }
    plain = seal(Request(header.run, 1, "round", 0, "repshare.Fetch", "", []))
    assert "has not sealed" in refusals(relay, "1", seal(header, bundle({}, {"0": plain})))["0"]


def test_a_relay_that_changes_letters_is_noticed_and_the_round_goes_on(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)

    def changed(id: str, data: bytes) -> bytes:
        header, payload = unseal(data)
        if id == "1" and isinstance(header, Delivery):
            told, letters = unbundle(payload)
            letters["0"] = letters["0"][:-1] + bytes([letters["0"][-1] ^ 1])
            return seal(header, bundle(told, letters))
        return data

    relay.spoil = changed
    report = relay.engine().run_round()
    assert report.skipped is None and "refused 0: a letter that 0 has not sealed" in report.missing["1"]


@pytest.mark.parametrize("rows", [5, None, {"a": 1}, [7], [[0, "up", "0", "Local", -1, 0, 0]]])
def test_a_site_that_counts_what_cannot_be_is_missed(rows: Any, tmp_path: Path) -> None:
    relay = Relay("dfedavg", tmp_path)
    honest = relay.hosts["1"].handle

    def lying(data: bytes) -> bytes:
        header, payload = unseal(answer := honest(data))
        if not isinstance(header, Stepped):
            return answer
        said, letters = unbundle(payload)
        return seal(header, bundle(said | {"rows": rows}, letters))

    relay.hosts["1"].handle = lying  # type: ignore[method-assign]
    report = relay.engine().run_round()
    assert "it counts what cannot be" in report.missing["1"] and report.skipped is None


def test_what_a_site_counts_is_of_the_last_exchanges_and_as_much_as_they_have(tmp_path: Path) -> None:
    engine = Relay("dfedavg", tmp_path).engine()
    engine._begin("round", 1)
    counted = ["up", "0", "Local", 1, 0, 0]
    assert len(engine._rows("1", {"rows": [[0, *counted]] * 2})) == 2
    for rows in ([[exchange, *counted]] for exchange in (-1, -0.5, 0.0, False, 1)):
        with pytest.raises(WireError, match="counts what cannot be"):
            engine._rows("1", {"rows": rows})
    with pytest.raises(WireError, match="counts more than it can have sent and got"):
        engine._rows("1", {"rows": [[0, *counted]] * 1000})


def test_the_coordinator_gets_scores_in_a_sum_and_nothing_else(tmp_path: Path) -> None:
    relay = Relay("dfedavg", tmp_path)
    engine = relay.engine()
    engine.run_round()
    host = relay.hosts["1"]

    def asked(phase: str, tag: str) -> str:
        request = Request(engine.run, 1, phase, 5, tag, "", [], 0, engine._tokens["1"])
        return str(getattr(unseal(host.handle(seal(request)))[0], "why", "answered"))

    for phase in ("round", "evaluation"):
        for tag in ("dfedavg.Give", "dfedavg.Train", "global_model.Global"):
            assert "nobody but neighbours gets an answer" in asked(phase, tag)
    assert "nobody but neighbours asks in a round" in asked("round", "evaluation.Evaluate")
    assert asked("evaluation", "evaluation.Evaluate") != "answered"  # without an invitation to a secure sum
    engine.evaluate(relay.inputs.test)
    replies = [unseal(answer)[0] for _, data, answer in relay.seen if isinstance(unseal(data)[0], Request)]
    assert {header.type for header in replies} == {"masked.Score", "secure_sum.Unmasked"}


def start_of(relay: Relay) -> Start:
    relay.engine().run_round()
    header = next(header for _, data, _ in relay.seen if isinstance(header := unseal(data)[0], Start))
    return replace(header, run="another")


def refused(relay: Relay, start: Start) -> str:
    return str(getattr(unseal(relay.hosts["1"].handle(seal(start)))[0], "why", "takes part"))


@pytest.mark.parametrize(("change", "why"), [
    (lambda start: replace(start, layer=""), "scores leave only in secure sums"),
    (lambda start: told(start, roster="0" * 64), "another roster than this site's"),
    (lambda start: told(start, topology="rings"), "a network that cannot be"),
    (lambda start: told(start, topology="file:/etc/passwd"), "a network that cannot be"),
    (lambda start: told(start, models={"0": "mlp", "2": "mlp"}), "does not have this site"),
    (lambda start: told(start, models={"../x": "mlp"}), "a network that cannot be"),
    (lambda start: told(start, models=7), "a network that cannot be"),
    (lambda start: replace(start, layer=json.dumps({**json.loads(start.layer), "privacy": PROMISE})), "no noise"),
])  # fmt: skip
def test_starts_that_a_site_refuses(change: Callable[[Start], Start], why: str, tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    assert why in refused(relay, change(start_of(relay)))


def test_a_method_that_needs_a_server_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay("repshare", tmp_path)
    start = start_of(relay)
    monkeypatch.setattr(methods.find("repshare"), "peer_to_peer", False)
    assert refused(relay, start) == "repshare needs a server, and this run has none"


PROMISE = {"epsilon": 1.0, "delta": 1e-5, "noise": "local", "threshold": 1, "colluders": 0}


def told(start: Start, **network: Any) -> Start:
    return replace(start, task={**start.task, "network": {**start.task["network"], **network}})


# What a policy allows


@pytest.mark.parametrize(("rules", "why"), [
    ({"neighbours": ("0", "2")}, ""),
    ({"neighbours": ("0", "3")}, "its policy does not allow 2 as a neighbour"),
    ({"methods": ("sums",)}, "method dfedavg without a server, which shows its replies to neighbours"),
    ({"secure": True}, "neighbours would see them"),
    ({"messages": ("Score", "Done")}, "its policy does not allow global_model.Local to leave"),
])  # fmt: skip
def test_policies_bind_what_goes_to_neighbours(rules: dict[str, Any], why: str, tmp_path: Path) -> None:
    """A method that shows a server only sums shows its neighbours single models: it must be named."""
    relay = Relay("dfedavg", tmp_path)
    relay.rules = replace(relay.rules, **rules)
    relay.restart("1")
    report = relay.engine().run_round()
    assert why in report.missing.get("1", "") and (report.missing == {}) == (not why)
    assert report.skipped is None
    assert any(why in line.get("why", "") for line in audit(tmp_path, "1")) or "messages" in rules


def test_the_audit_log_has_every_letter_and_the_ledger_its_bytes(tmp_path: Path) -> None:
    relay = Relay("dfedavg", tmp_path)
    engine = relay.engine()
    engine.ledger = Ledger()
    engine.run_round()
    lines = [line for line in audit(tmp_path, "1") if line["kind"] == "Letter"]
    assert Counter((line["direction"], line["neighbour"], line["type"]) for line in lines) == Counter(
        (way, other, kind)
        for other in ("0", "2")
        for way in ("in", "out")
        for kind in ("dfedavg.Give", "global_model.Local")
    )
    (note,) = [line for line in audit(tmp_path, "1") if line["kind"] == "Leaves"]
    assert note["neighbours"] == ["0", "2"]
    totals = engine.ledger.totals()
    carried = sum(map(len, letters_in(relay.seen))) / 2  # each is seen when it comes and when it goes
    assert totals.messages == 20 and totals.bytes_up + totals.bytes_down < carried < 1.2 * (
        totals.bytes_up + totals.bytes_down
    )


def test_a_site_keeps_its_model(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    engine = relay.engine()
    engine.run_round()
    engine.evaluate(relay.inputs.test)
    w, rounds = relay.hosts["3"].recall(engine.run).weights()
    assert rounds == 1 and w is not None
    assert storage.digest(w) == storage.digest(states(engine, tmp_path)[0]["3"]["w"])


def test_too_few_sites_stop_the_run(tmp_path: Path) -> None:
    relay = Relay("repshare", tmp_path)
    relay.away = lambda id, data: id != "0" and place(data)[0] == 2
    engine = relay.engine(patience=Patience(sites=3))
    engine.run_round()
    with pytest.raises(FedgistError, match=r"too few sites are left \(--min-sites 3; "):
        engine.run_round()


def test_old_policies_mean_what_fresh_ones_mean() -> None:
    assert Policy().neighbours == ("all",) and Policy().methods == ("sums",)
