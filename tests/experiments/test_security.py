"""What --secure may say, and what it refuses before anything runs."""

import pytest

from fedgist.core.errors import FedgistError
from fedgist.experiments import security
from fedgist.experiments.config import resolve
from fedgist.federation import flower_app
from toys import toy_federation


def check(method: str, **given: object) -> None:
    security.check(resolve({"method": method, **given}, profile="toy"), toy_federation(method).method)


def test_what_it_may_say() -> None:
    found = security.read("masks:bits=32:step=20:group=5")
    assert (found.way, found.group, found.grid.bits, found.grid.step) == ("masks", 5, 32, 20)
    for text, why in {
        "mask": "did you mean masks|way to secure sums",
        "masks:group=1": "at least 2",
        "masks:bits=32": "need a step from 1 to 29",
        "masks:colour=3": "not colour=3",
    }.items():
        with pytest.raises(FedgistError, match=why):
            security.read(text)


def test_visible_fields_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    check("fedavg", secure="masks")
    with pytest.raises(FedgistError, match=r"fedgen shows the server Upload.head.* of each client, which no sum hides"):
        check("fedgen", secure="masks")
    check("fedgen", secure="additive")
    assert "the server still sees of each client: Upload.head" in caplog.text


@pytest.mark.parametrize(
    ("method", "given", "asked"),
    [
        ("fedavg", {"clients": 2, "active": 0}, 2),
        ("fedavg", {"clients": 5, "active": 2}, 2),
        ("fedavg", {"clients": 5, "active": 1e-6}, 1),
        ("fedavg", {"secure": "masks:group=9", "clients": 10, "active": 0.8}, 8),
        ("centralized", {}, 1),
    ],
)
def test_sums_over_too_few_are_refused(method: str, given: dict[str, object], asked: int) -> None:
    with pytest.raises(FedgistError, match=f"a secure sum is over at least [39] clients, and .* asks {asked}: "):
        check(method, **{"secure": "masks", **given})
    if asked > 1:
        check(method, **{**given, "secure": f"masks:group={asked}"})


def test_nothing_is_no_way_to_secure_sums() -> None:
    with pytest.raises(FedgistError, match="unknown way to secure sums ''"):
        check("fedavg", secure="")


@pytest.mark.parametrize(("method", "given"), [("repshare", {"topology": "ring"}), ("fedavg", {"delay": 1})])
def test_peers_and_late_replies_are_refused(method: str, given: dict[str, object]) -> None:
    with pytest.raises(FedgistError, match=f"leave out {next(iter(given))}"):
        check(method, secure="additive", **given)


def test_flower_has_no_roster(tmp_path: object) -> None:
    app = flower_app.App(("a", "b", "c"), run={"method": "fedavg", "secure": "masks"})
    with pytest.raises(FedgistError, match="which Flower does not have"):
        flower_app.write(tmp_path / "app", app)  # type: ignore[operator]
