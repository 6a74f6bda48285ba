"""Faults by the hundred, and the test of that test: five bugs that it must find."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from fedgist.core.codec import Codec
from fedgist.core.message import WireError
from fedgist.experiments.folder import RunFolder
from fedgist.federation.chaos import campaign, schedule
from fedgist.federation.chaos.tally import Tally
from fedgist.federation.protocol import remote_engine, states
from fedgist.federation.protocol.answered import Answered
from fedgist.federation.protocol.envelope import DIGEST, KINDS, Reply, Request, unseal
from fedgist.federation.protocol.remote_engine import RemoteEngine
from fedgist.federation.protocol.states import States

SCHEDULES = 300


@pytest.mark.slow
def test_three_hundred_schedules() -> None:
    """Nothing is broken in any; and they are no quiet weather: many resume, and many lose nobody all the same."""
    outcomes = [schedule.play(0, number) for number in range(SCHEDULES)]
    assert [(one.number, one.faults, one.wrong) for one in outcomes if one.wrong] == []
    assert sum(one.attempts > 1 for one in outcomes) > SCHEDULES / 4
    assert sum(one.complete for one in outcomes) > SCHEDULES / 10


@pytest.mark.federation
def test_twenty_thousand_schedules() -> None:
    outcomes = campaign.play_all(1, 0, 20_000, Tally.name, os.cpu_count() or 1)
    assert [(one.number, one.faults, one.wrong) for one in outcomes if one.wrong] == []


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "repshare"])
def test_schedules_of_real_methods(method: str) -> None:
    outcomes = [schedule.play(1, number, method) for number in range(6)]
    assert [(one.number, one.faults, one.wrong) for one in outcomes if one.wrong] == []


def test_a_late_copy_may_find_its_state_gone() -> None:
    """Of a request of an earlier round; that the server hears of it in a later one costs an answer, but no state."""
    outcome = schedule.play(7, 168)
    assert any("does not hold its state" in line for line in outcome.story)
    assert not outcome.wrong


def test_a_schedule_is_played_again_from_its_number() -> None:
    first, again = schedule.play(3, 14), schedule.play(3, 14)
    assert first.story == again.story and len(first.story) > 10
    assert schedule.play(4, 14).story != first.story


def lost_commit(patch: pytest.MonkeyPatch) -> None:
    """A site keeps its new state in memory only."""

    def put(self: States, version: str, state: Any) -> None:
        self._known[version] = self._put(state)

    patch.setattr(States, "put", put)


def keeping_too_little(patch: pytest.MonkeyPatch) -> None:
    """The server does not say what states its checkpoints need, and asks in vain when it goes on from one."""
    patch.setattr(remote_engine, "Request", lambda *known: Request(*known[:6], [], *known[7:]))


def lost_commit_at_the_server(patch: pytest.MonkeyPatch) -> None:
    """The server forgets what version one of its sites has come to."""
    run_round = RemoteEngine.run_round

    def forgetful(self: RemoteEngine) -> Any:
        before, report = dict(self.versions), run_round(self)
        if "0" in before:
            self.versions["0"] = before["0"]
        return report

    patch.setattr(RemoteEngine, "run_round", forgetful)


def double_apply(patch: pytest.MonkeyPatch) -> None:
    """A site starts from whatever it has last come to, instead of from the state that it is told."""
    get = States.get

    def newest(self: States, version: str) -> Any:
        known = [name for name in self._known if name]
        return get(self, max(known, key=states._when) if known else version)

    patch.setattr(States, "get", newest)


def accepting_a_replay(patch: pytest.MonkeyPatch) -> None:
    """The server takes whatever a site has once said for the answer to what it asks now."""
    replies = RemoteEngine._replies

    def credulous(self: RemoteEngine, ask: Any, asked: Any, answers: Any, *more: Any) -> Any:
        found = {id: opened(data) for id, data in answers.items()}
        claimed = {
            id: replace(asked[id], named=(header.run, header.version, header.request))
            for id, header in found.items()
            if header
        }
        return replies(self, ask, {**asked, **claimed}, answers, *more)

    patch.setattr(RemoteEngine, "_replies", credulous)


def answering_a_replay(patch: pytest.MonkeyPatch) -> None:
    """A site does not mind being asked something else in an exchange that it has answered."""
    patch.setattr(Answered, "check", lambda *_: None)
    patch.setattr(Answered, "note", lambda *_: None)


def ignoring_a_truncated_envelope(patch: pytest.MonkeyPatch) -> None:
    """The server takes what is missing at the end for zeros."""
    read = Codec.read

    def lenient(data: bytes) -> Any:
        try:
            return unseal(data)
        except WireError:
            end = 8 + int.from_bytes(data[:8], "little")
            with suppress(ValueError, KeyError, TypeError):
                fields = json.loads(data[8:end])
                fields.pop(DIGEST, None)
                return KINDS[fields.pop("kind")](**fields), data[end:]
            raise

    def filled(self: Codec, cls: type, data: bytes, trusted: bool = False) -> Any:
        limit = self.limit(cls)
        return read(self, cls, (data + bytes(limit))[:limit], trusted)

    patch.setattr(remote_engine, "unseal", lenient)
    patch.setattr(Codec, "read", filled)


def resuming_from_the_wrong_version(patch: pytest.MonkeyPatch) -> None:
    """A resumed server goes on from its older checkpoint, though the last is sound."""
    last = RunFolder.last_checkpoint

    def older(self: RunFolder) -> Any:
        if len(files := self.checkpoint_files()) > 1:
            files[0].unlink()
        return last(self)

    patch.setattr(RunFolder, "last_checkpoint", older)


def resuming_from_the_first_states(patch: pytest.MonkeyPatch) -> None:
    """A resumed server knows its own state, and not which versions its sites have."""
    restore = RemoteEngine.restore

    def forgetful(self: RemoteEngine, snapshot: Any) -> None:
        restore(self, {**snapshot, "versions": {}})

    patch.setattr(RemoteEngine, "restore", forgetful)


def opened(data: bytes) -> Reply | None:
    try:
        header, _ = unseal(data)
    except WireError:
        return None
    return header if isinstance(header, Reply) else None


BUGS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    lost_commit: 0,
    keeping_too_little: 130,
    lost_commit_at_the_server: 1,
    double_apply: 0,
    accepting_a_replay: 39,
    answering_a_replay: 76,
    ignoring_a_truncated_envelope: 8,
    resuming_from_the_wrong_version: 1,
    resuming_from_the_first_states: 16,
}
"""With the number of a schedule that has found it: where to look first."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the schedules that pass without it."""
    bug(monkeypatch)
    for number in (BUGS[bug], *range(SCHEDULES)):
        if wrong := schedule.play(0, number).wrong:
            assert "Traceback" not in wrong[0], wrong[0]  # a bug that works, not one that falls over
            print(f"schedule {number}: {'; '.join(wrong)}")
            return
    pytest.fail(f"{SCHEDULES} schedules do not notice: {bug.__doc__}")
