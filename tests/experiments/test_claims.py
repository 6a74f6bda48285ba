"""Claims of papers: what they may say, and how they stand by seeds, columns and intervals."""

import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedgist.core.errors import FedgistError
from fedgist.experiments import claims
from fedgist.experiments.claims import Claim, Outcome, counted, outcomes, read


def numbers(*values: float) -> dict[str, float]:
    return {str(seed): value for seed, value in enumerate(values)}


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ((1.0,), "seen once"),
        ((1.0, 0.1), "seen once"),
        ((1.0, -0.1), "not seen"),
        ((-1.0,), "not seen"),
        ((0.0,), "not seen"),
        ((1.0, 1.1, 0.9), "holds"),
        ((-1.0, -1.1, -0.9), "does not hold"),
        ((1.0, 3.0, 0.1), "within noise"),
        ((0.0, 0.0, 0.0), "within noise"),
    ],
)
def test_words(differences: tuple[float, ...], word: str) -> None:
    assert Outcome("", differences).word == word


def test_the_interval_is_students() -> None:
    """scipy has the oracle: the 95 % interval of a mean of n numbers by Student's t with n − 1 degrees of freedom."""
    for count in (3, 5, 10, 16):
        values = tuple(float(i**1.5) for i in range(count))
        low, high = stats.t.interval(0.95, count - 1, statistics.fmean(values), stats.sem(values))
        found = Outcome("", values)
        assert found.half == pytest.approx((high - low) / 2, rel=1e-3)
    assert Outcome("", (1.0, 2.0)).half is None


def test_a_claim_is_looked_at_seed_by_seed_where_both_sides_ran() -> None:
    """Seeds differ by more than the rows do: unpaired, this would be noise."""
    cells = {
        ("a", "x"): numbers(10.0, 50.0, 90.0),
        ("b", "x"): numbers(9.0, 49.1, 89.2, 7.0),
        ("a", "y"): numbers(1.0),
        ("b", "z"): numbers(1.0),
    }
    (found,) = outcomes(Claim("a", ">", "b"), cells, ["x", "y", "z"])
    assert found.column == "x"
    assert found.differences == pytest.approx((1.0, 0.9, 0.8))
    assert found.word == "holds"
    (other,) = outcomes(Claim("a", "<", "b"), cells, ["x", "y", "z"])
    assert other.word == "does not hold"


@settings(max_examples=200)
@given(
    count=st.integers(3, 15),
    data=st.data(),
    shift=st.floats(-20, 20),
)
def test_the_word_is_that_of_a_paired_t_test(count: int, data: st.DataObject, shift: float) -> None:
    """scipy has the oracle: p below 0.05, and the side that the mean is on. What all seeds share cancels."""
    draw = st.lists(st.floats(-10, 10).map(lambda x: round(x, 2)), min_size=count, max_size=count)
    left, right = data.draw(draw), data.draw(draw)
    differences = [a + shift - b for a, b in zip(left, right, strict=True)]
    assume(statistics.stdev(differences) > 1e-3)
    p = float(stats.ttest_rel([a + shift for a in left], right).pvalue)
    assume(abs(p - 0.05) > 1e-3)  # the table of Student's points has three digits
    cells = {("a", "x"): numbers(*(a + shift for a in left)), ("b", "x"): numbers(*right)}
    (found,) = outcomes(Claim("a", ">", "b"), cells, ["x"])
    wanted = "within noise" if p > 0.05 else "holds" if statistics.fmean(differences) > 0 else "does not hold"
    assert found.word == wanted
    (turned,) = outcomes(Claim("b", "<", "a"), cells, ["x"])
    assert turned.word == wanted
    few = {key: {seed: of[seed] for seed in ("0", "1")} for key, of in cells.items()}
    (seen,) = outcomes(Claim("a", ">", "b"), few, ["x"])
    assert seen.word in ("seen once", "not seen")  # two seeds never hold, however far apart


def test_three_seeds_of_which_two_are_common_do_not_hold() -> None:
    """Unpaired there would be three on either side."""
    cells = {("a", "x"): {"0": 10.0, "1": 10.1, "2": 10.2}, ("b", "x"): {"1": 1.0, "2": 1.1, "3": 1.2}}
    (found,) = outcomes(Claim("a", ">", "b"), cells, ["x"])
    assert len(found.differences) == 2 and found.word == "seen once"


def test_columns_may_be_named_or_left_out() -> None:
    cells = {(row, column): numbers(value) for row, value in (("a", 2.0), ("b", 1.0)) for column in ("K=1", "K=2")}
    assert [o.column for o in outcomes(Claim("a", ">", "b", but=("K=1",)), cells, ["K=1", "K=2"])] == ["K=2"]
    assert [o.column for o in outcomes(Claim("a", ">", "b", only=("K=1",)), cells, ["K=1", "K=2"])] == ["K=1"]


def test_a_difference_may_grow_from_a_column_to_another() -> None:
    cells = {
        ("a", "few"): numbers(5, 6, 7), ("b", "few"): numbers(4, 5, 6),
        ("a", "many"): numbers(5, 6, 7), ("b", "many"): numbers(2, 2.9, 4.1),
    }  # fmt: skip
    claim = Claim("a", ">", "b", grows=("few", "many"))
    (found,) = outcomes(claim, cells, ["few", "many"])
    assert found.differences == pytest.approx((2.0, 2.1, 1.9))
    assert found.word == "holds"
    assert claim.text == "a > b, more so in many than in few"
    assert outcomes(claim, {key: value for key, value in cells.items() if key[1] == "few"}, ["few", "many"]) == []


def test_the_right_side_may_be_a_number() -> None:
    (found,) = outcomes(Claim("a", ">", "1"), {("a", "x"): numbers(0.5, 0.6, 0.4)}, ["x"])
    assert found.word == "does not hold"


def test_words_are_counted() -> None:
    good, bad = Outcome("x", (1.0, 1.1, 0.9)), Outcome("y", (-1.0,))
    assert counted([good]) == "holds"
    assert counted([good, good]) == "holds in both"
    assert counted([good, good, good]) == "holds in all 3"
    assert counted([bad, bad]) == "not seen in either"  # "in all" would say that it may have been in one
    assert counted([bad, bad, bad]) == "not seen in any of 3"
    assert counted([bad, good, good]) == "holds in 2, not seen in 1"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("a", "a claim is written ROW > ROW, not 'a'"),
        ("a > c", "the claim 'a > c' speaks of rows that there are not"),
        ({"that": "a > b", "but": ["w"]}, "the claim 'a > b' speaks of columns that there are not"),
        ({"that": "a > b", "only": ["w"]}, "the claim 'a > b' speaks of columns that there are not"),
        ({"that": "a > b", "grows": ["x", "w"]}, "the claim 'a > b' speaks of columns that there are not"),
        ({"that": "a > b", "grows": ["x"]}, "the claim 'a > b' grows from one column to another, and says no other"),
        ({"that": "a > b", "grows": ["x", "x"]}, "the claim 'a > b' grows from one column to another"),
        ({"that": "a > b", "grows": ["x", "y"], "but": ["x"]}, "the claim 'a > b' grows from one column to another"),
        ({"that": "a > b", "butt": ["x"]}, "unknown key of a claim of preset p/t 'butt'; did you mean 'but'"),
    ],
)
def test_mistakes_are_one_sentence(told: object, said: str) -> None:
    with pytest.raises(FedgistError) as wrong:
        read("p/t", told, {"a", "b"}, {"x", "y"})  # type: ignore[arg-type]
    assert said in str(wrong.value)


def test_a_claim_with_all_that_it_may_say() -> None:
    told = {"that": "a < 3.5", "only": ["x"], "headline": "H", "note": "N"}
    assert read("p/t", told, {"a"}, {"x"}) == Claim("a", "<", "3.5", only=("x",), headline="H", note="N")
    assert read("p/t", "a > b, c", {"a", "b, c"}, {"x"}).right == "b, c"
    assert claims.ENOUGH == 3


def test_a_claim_says_where_it_is_looked_at() -> None:
    """Two claims of the same rows would otherwise read alike."""
    assert Claim("a", ">", "b").where == ""
    assert Claim("a", ">", "b", only=("x", "y")).where == " in x, y"
    assert Claim("a", ">", "b", but=("x",)).where == " but in x"
