"""The command that plays faults: what it says, how it goes on, what a broken schedule looks like."""

import pytest
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.federation.protocol.answered import Answered
from fedgist.federation.protocol.states import States


def chaos(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["chaos", "--workers", "1", *map(str, arguments)])
    return result.exit_code, result.output


def test_a_few_schedules() -> None:
    code, said = chaos("--schedules", 3)
    assert code == 0 and "3 schedules in 0:" in said and "0 broken" in said


def test_a_broken_one_is_named_and_played_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(States, "put", lambda *_: None)  # no state is kept
    code, said = chaos("--schedules", 1, "--first", 5, "--seed", 2)
    assert code == 1 and "schedule 5 (" in said
    assert "play it again with: fedgist chaos --seed 2 --schedule 5" in said
    code, told = chaos("--seed", 2, "--schedule", 5)
    assert code == 1 and "BROKEN: " in told and "does not" in told
    monkeypatch.undo()
    code, told = chaos("--seed", 2, "--schedule", 5)
    assert code == 0 and told.endswith("all is as it should be\n")


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Answered, "check", stop)
    code, said = chaos("--schedules", 9, "--first", 4, "--method", "fedavg")
    assert code == 130
    assert "go on with: fedgist chaos --seed 0 --method fedavg --first 4 --schedules 9" in said


def test_mistakes() -> None:
    assert chaos("--schedules", 0)[0] == 2
    code, said = chaos("--method", "fedavgg")
    assert code == 2 and "did you mean 'fedavg'" in said
