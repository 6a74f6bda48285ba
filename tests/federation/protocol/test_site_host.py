"""A site that gets bytes: what is believed, what is refused, what is kept, what is said."""

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asking import START, asked, host, opened, request
from fedgist.core.rng import Rng
from fedgist.federation.protocol.envelope import (
    Introduction,
    Question,
    Ready,
    Refusal,
    digest,
    seal,
)
from fedgist.federation.protocol.policy import Policy


def test_ten_thousand_corrupted_envelopes_do_not_stop_a_site(tmp_path: Path) -> None:
    """Flipped bits, cuts, insertions and foreign pieces: each gets an answer, and good requests go on as before."""
    site = host(tmp_path)
    good = [seal(Question("asking", [1, 1, 1], 2)), seal(START), request()]
    assert isinstance(opened(site.handle(good[1])), Ready)
    logging.getLogger("fedgist").setLevel(logging.CRITICAL)  # 10,000 refusals are not worth a log
    try:
        draw = Rng(0)("corruption").numpy()
        refused = 0
        for number in range(10_000):
            data = bytearray(good[number % 3])
            at = int(draw.integers(len(data)))
            match number % 5:
                case 0:
                    data[at] ^= 1 << int(draw.integers(8))
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = draw.bytes(int(draw.integers(1, 20)))
                case 3:
                    data[at : at + 8] = draw.bytes(8)
                case 4:
                    data = bytearray(draw.bytes(int(draw.integers(200))))
            refused += isinstance(opened(site.handle(bytes(data))), Refusal)
    finally:
        logging.getLogger("fedgist").setLevel(logging.NOTSET)
    assert refused > 9_000  # the others changed only a number, which is no mistake of form
    assert isinstance(opened(site.handle(good[1])), Ready)
    assert asked(site.handle(request())) == 1


def test_the_server_says_from_which_state_a_site_starts(tmp_path: Path) -> None:
    """A lost reply and a skipped round are asked anew from the old version; only what must be kept is kept."""
    site = host(tmp_path)
    site.handle(seal(START))
    assert asked(site.handle(request())) == 1
    assert asked(site.handle(request())) == 1  # the reply was lost
    first = opened(site.handle(request())).version
    assert asked(site.handle(request(1, first, (first,)))) == 2
    assert asked(site.handle(request(2, first, (first,)))) == 2  # the round was skipped
    folder = tmp_path / "a" / "runs" / "run-1"
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == [first, "round-000001-000002"]
    gone = opened(site.handle(asking := request(3, "round-000001-000001")))
    assert gone == Refusal(False, "it does not hold its state round-000001-000001 any more", digest(asking))


def test_a_new_process_of_a_site_goes_on(tmp_path: Path) -> None:
    """It needs no second start: the run and its states are on disk."""
    first = host(tmp_path)
    first.handle(seal(START))
    version = opened(first.handle(request())).version
    assert asked(host(tmp_path).handle(request(1, version))) == 2
    unknown = opened(host(tmp_path).handle(asking := request(run="run-2")))
    assert unknown == Refusal(False, "the run run-2 was never started here", digest(asking))


def test_the_words_of_an_error_stay_at_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = host(tmp_path, "b", "break")
    site.handle(seal(START))
    answer = site.handle(request())
    failed = "it failed (ZeroDivisionError); the log of the site says more"
    assert opened(answer) == Refusal(False, failed, digest(request()))
    assert b"patient" not in answer
    assert "label 7 of patient 12" in caplog.text


@pytest.mark.parametrize(
    ("rules", "sent", "why"),
    [
        (Policy(methods=("fedavg",)), seal(Question("asking", [1], 2)), "does not allow the method asking"),
        (Policy(methods=("fedavg",)), seal(START), "does not allow the method asking"),
        (Policy(), seal(START), "does not allow the method asking, which shows Pong, Shown of each site"),
        (Policy(methods=("all",)), seal(START), "does not allow the method asking, which shows Pong, Shown"),
        (Policy(("asking",), messages=("Local",)), seal(START), "allows none of the messages of asking"),
        (Policy(("asking",), min_samples_per_class=9), seal(START), "none of its classes has the 9 samples"),
        (Policy(("asking",), ("Shown",), min_samples_per_class=1), request(), "does not allow asking.Pong to leave"),
    ],
)
def test_outside_the_policy(rules: Policy, sent: bytes, why: str, tmp_path: Path, caplog: Any) -> None:
    """Refused, whatever the server asks; the site's log and its audit log say so."""
    site = host(tmp_path, rules=rules)
    site.handle(seal(START))
    answer = opened(site.handle(sent))
    assert isinstance(answer, Refusal) and answer.refused and why in answer.why
    assert why in caplog.text
    last = json.loads((tmp_path / "a" / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["direction"], last["refused"], last["why"]) == ("out", True, answer.why)


def test_a_site_with_its_own_model_refuses_another(tmp_path: Path) -> None:
    site = host(tmp_path, model="lenet5")
    assert opened(site.handle(seal(Question("asking", [1], 2)))) == Introduction("lenet5")
    assert "this site runs lenet5, and the run wants none" in opened(site.handle(seal(START))).why


def test_the_audit_log_has_every_envelope(tmp_path: Path) -> None:
    site = host(tmp_path)
    sent = [seal(START), request(), b"nonsense"]
    answers = [site.handle(data) for data in sent]
    lines = [json.loads(line) for line in (tmp_path / "a" / "audit.jsonl").read_text().splitlines()]
    travelled = [data for pair in zip(sent, answers, strict=True) for data in pair]
    said = [line for line in lines if line["direction"] == "leaves"]
    assert [line["leave"] for line in said] == [
        ["Shown: asked as they are", "Pong: asked as they are; total to be summed"]
    ]
    assert lines.index(said[0]) == 1  # before the first answer of the run
    lines = [line for line in lines if line["direction"] != "leaves"]
    assert [line["direction"] for line in lines] == ["in", "out"] * 3
    assert [line["sha256"] for line in lines] == [hashlib.sha256(data).hexdigest() for data in travelled]
    assert [line["bytes"] for line in lines] == list(map(len, travelled))
    assert [line["kind"] for line in lines] == ["Start", "Ready", "Request", "Reply", "unreadable", "Refusal"]
    assert (lines[2]["type"], lines[3]["type"]) == ("asking.Ping", "asking.Pong")


def test_names_that_would_leave_the_folder_are_refused(tmp_path: Path) -> None:
    site = host(tmp_path)
    for name in ("../../x", ".hidden", "a/b", "", "x" * 101):
        answer = opened(site.handle(seal(replace(START, run=name))))
        assert isinstance(answer, Refusal) and "run is not what it should be" in answer.why
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
