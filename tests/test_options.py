"""Options: what is accepted, and the sentence for what is not."""

import tomllib
from dataclasses import asdict, dataclass

import pytest

from fedgist.core.errors import FedgistError
from fedgist.options import Role, build, having, option, options, toml


@dataclass(frozen=True)
class Config:
    steps: int = option(10, "Local steps.", low=1)
    lr: float = option(0.1, "Learning rate.", above=0)
    share: float = option(1.0, "Share of clients.", low=0, high=1)
    nesterov: bool = option(False, "Nesterov momentum.")
    schedule: str = option("constant", "Schedule.", choices=("constant", "cosine", "step"))
    hidden: tuple[int, ...] = option((200, 100), "Widths.", low=1)
    betas: tuple[float, float] = option((0.9, 0.999), "Adam's betas.")
    clip: float | None = option(None, "Clip the gradient at this norm.", above=0)
    names: tuple[str, ...] = option((), "Names.")
    depth: int = option(2, "Depth.", choices=(1, 2, 4))
    seed: int = option(0, "Seed.", low=0, high=2**63 - 1)


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("steps", 3, 3),
        ("steps", "3", 3),
        ("steps", "1_000", 1000),
        ("lr", 1, 1.0),
        ("lr", "1e-3", 1e-3),
        ("lr", "3e38", 3e38),
        ("lr", "1.2e-38", 1.2e-38),
        ("steps", 2**48, 2**48),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("nesterov", "yes", True),
        ("nesterov", "False", False),
        ("nesterov", True, True),
        ("schedule", "cosine", "cosine"),
        ("hidden", "200,100", (200, 100)),
        ("hidden", "64", (64,)),
        ("hidden", 64, (64,)),
        ("hidden", [5, 6], (5, 6)),
        ("hidden", "", ()),
        ("betas", "0.5, 0.9", (0.5, 0.9)),
        ("clip", "none", None),
        ("clip", None, None),
        ("clip", "2.5", 2.5),
        ("names", "a, b", ("a", "b")),
        ("names", [], ()),
        ("depth", "4", 4),
    ],
)
def test_values_are_converted(key, given, expected):
    value = getattr(build(Config, {key: given}), key)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("key", "given", "sentence"),
    [
        ("steps", 0, "steps must be at least 1, not 0"),
        ("steps", 2.0, "steps must be a whole number, not 2.0"),
        ("steps", True, "steps must be a whole number, not True"),
        ("steps", "many", "steps must be a whole number, not 'many'"),
        ("lr", 0, "lr must be greater than 0, not 0.0"),
        ("lr", "nan", "lr must be a number, not 'nan'"),
        ("lr", [1], r"lr must be a number, not \[1\]"),
        ("lr", "inf", r"lr must be a number of at most 3\.4e\+38 in size, not inf"),
        ("lr", "1e308", r"lr must be a number of at most 3\.4e\+38 in size, not 1e308"),
        ("lr", 10**400, r"lr must be a number of at most 3\.4e\+38 in size, not 1000"),
        ("clip", "-inf", r"clip must be a number of at most 3\.4e\+38 in size, not -inf"),
        ("lr", 5e-324, r"lr must not be as near to 0 as 5e-324: float32 ends at 1\.2e-38"),
        ("steps", 2**48 + 1, "steps must be at most 281474976710656, not 281474976710657"),
        ("hidden", f"3,{2**62}", "hidden must be at most 281474976710656, not"),
        ("steps", 2**63, r"steps must be a whole number of at most 9\.2e\+18 in size, not 9223372036854775808"),
        ("hidden", f"3,{10**30}", r"hidden must be a whole number of at most 9\.2e\+18 in size"),
        ("share", 1.5, "share must be at most 1, not 1.5"),
        ("nesterov", 1, "nesterov must be true or false, not 1"),
        ("nesterov", "maybe", "nesterov must be true or false, not 'maybe'"),
        ("schedule", "cosin", "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("schedule", 3, "schedule must be text, not 3"),
        ("hidden", "200,0", "hidden must be at least 1, not 0"),
        ("hidden", "200,x", "hidden must be a whole number, not 'x'"),
        ("betas", "0.5", "betas must be 2 values, as in 1,2, not 1"),
        ("clip", "-1", "clip must be greater than 0, not -1.0"),
        ("depth", 3, "depth must be one of 1, 2, 4, not 3"),
        ("step", 3, "unknown option 'step'; did you mean 'steps'"),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(key, given, sentence):
    with pytest.raises(FedgistError, match=f"^{sentence}"):
        build(Config, {key: given})


def test_options_carry_their_sentence():
    assert options(Config)["lr"].help == "Learning rate."
    assert list(options(Config))[:2] == ["steps", "lr"]


def test_defaults_pass_their_own_checks():
    assert build(Config, {name: o.default for name, o in options(Config).items()}) == Config()


@dataclass(frozen=True)
class Grouped:
    plain: int = option(1, "Plain.")
    near: str = option("x", "Near.", ("x", "y"), group="Place", role=Role.SITES)
    far: tuple[str, ...] = option(("a", "b"), "Far.", group="Place", role=Role.SITES | Role.EXECUTION)
    late: float | None = option(None, "Late.", group="Time", role=Role.EXECUTION)


def test_options_are_found_by_their_role():
    assert having(Grouped, Role.SITES) == ["near", "far"]
    assert having(Grouped(), Role.EXECUTION) == ["far", "late"]
    assert having(Grouped, Role.SITES | Role.EXECUTION) == ["near", "far", "late"]
    assert having(Grouped, Role.GROUND) == []


def test_values_are_written_under_their_sentences_and_groups_under_headings():
    text = toml(options(Grouped), asdict(Grouped()))
    assert text.splitlines() == [
        "# Plain.", "plain = 1", "",
        "## Place", "", "# Near.", "# One of: x, y.", 'near = "x"', "",
        "# Far.", 'far = ["a", "b"]', "",
        "## Time", "", "# Late.", 'late = "none"',
    ]  # fmt: skip
    assert build(Grouped, tomllib.loads(text)) == Grouped()


@pytest.mark.parametrize("value", ["", 'quo"te', "back\\slash", "delete\x7f", "line\nfeed", "µ × ✓"])
def test_any_text_is_read_back(value):
    assert tomllib.loads(toml(options(Grouped), {"near": value})) == {"near": value}
