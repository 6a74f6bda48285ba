"""What a site allows: rare classes are not there, and a mistake in the file is named."""

from pathlib import Path

import pytest

from asking import DATA
from fedgist.core.errors import FedgistError
from fedgist.federation.protocol import policy
from fedgist.federation.protocol.policy import Policy


def test_rare_classes_are_not_used() -> None:
    """Class 1 has one sample: with two required it is not there."""
    kept = Policy(min_samples_per_class=2).admit(DATA)
    assert kept.y.tolist() == [0, 0, 0]
    assert Policy().admit(DATA) is DATA


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("methods = 3", "methods must be"),
        ("method = ['all']", "did you mean 'methods'"),
        ("methods = [", "is not TOML"),
    ],
)
def test_a_policy_with_a_mistake(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(FedgistError, match=why):
        policy.load(tmp_path / "policy.toml")
