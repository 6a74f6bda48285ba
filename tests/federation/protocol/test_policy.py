"""What a site allows: rare classes are not there, and a mistake in the file is named."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asking import DATA
from fedgist.core.errors import FedgistError
from fedgist.federation.protocol import policy
from fedgist.federation.protocol.policy import Policy


def test_rare_classes_are_not_used() -> None:
    """Class 1 has one sample: with two required it is not there."""
    kept = Policy(min_samples_per_class=2).admit(DATA)
    assert kept.y.tolist() == [0, 0, 0]
    assert Policy(min_samples_per_class=1).admit(DATA).y is DATA.y


def test_a_small_test_set_and_its_rare_classes_are_not_scored() -> None:
    """An always-9 net's score would tell how many 9s there are among a few images."""
    labels = torch.tensor([0] * 30 + [1] * 25 + [2] * 3)
    data = replace(DATA, y=torch.zeros(4, dtype=torch.int64), classes=3, test=(torch.zeros(58, 1, 1, 1), labels))
    tested = Policy(min_samples_per_class=4).admit(data).test
    assert tested is not None and tested[1].unique().tolist() == [0, 1]
    assert Policy(min_samples_per_class=4, min_test_samples=56).admit(data).test is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("methods = 3", "methods must be"),
        ("method = ['all']", "did you mean 'methods'"),
        ("methods = [", "is not TOML"),
        ("options = 3", "options must be a table"),
        ("[options]\nsteps = 3", "steps in .options. must be a list of what is allowed"),
        ('[options]\nsteps = ["1..x"]', "a range is written with two numbers"),
    ],
)
def test_a_policy_with_a_mistake(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(FedgistError, match=why):
        policy.load(tmp_path / "policy.toml")
