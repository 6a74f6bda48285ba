"""Partitions: what every kind promises, the law of the Dirichlet kinds, and the figures of the published ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import partitions
from fedgist.data.partitions import options, split

BY_LABEL = [kind for kind in partitions.KINDS if kind != "group"]
OF_PART = ("dirichlet-fedgen", "fedgen-released")
"""The kinds that share out part of the data."""
MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
MNIST_LIKE = np.repeat(np.arange(10), 6000)
labels_of_any_kind = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)
client_numbers = st.integers(1, 12)
seeds = st.integers(0, 10**6)


def label_counts(labels: np.ndarray, parts: list[np.ndarray], classes: int) -> np.ndarray:
    """How many samples of each class each client holds: [clients, classes]."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def any_size(kind: str) -> dict[str, float]:
    return {"min_size": 0} if "min_size" in options(kind) else {}


@pytest.mark.parametrize("kind", BY_LABEL)
@given(labels=labels_of_any_kind, clients=client_numbers, seed=seeds)
def test_parts_are_sorted_disjoint_and_deterministic(kind: str, labels: np.ndarray, clients: int, seed: int) -> None:
    if kind in OF_PART or kind == "stratified-thesis":
        labels = np.tile(labels, 2 * clients)  # half of fewer might leave nothing to share out
    parts = split(labels, clients, Rng(seed), kind, **any_size(kind))
    again = split(torch.tensor(labels), clients, Rng(seed), kind, **any_size(kind))
    assert len(parts) == clients
    for part, same in zip(parts, again, strict=True):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert np.array_equal(part, same)
    everything = np.concatenate(parts)
    assert len(np.unique(everything)) == len(everything)
    if kind in OF_PART:
        assert len(everything) <= len(labels) / 2
    elif kind == "stratified-thesis":
        assert [len(part) for part in parts] == [len(labels) // clients] * clients
    else:
        assert np.array_equal(np.sort(everything), np.arange(len(labels)))


@pytest.mark.parametrize("kind", BY_LABEL)
def test_another_seed_gives_another_partition(kind: str) -> None:
    labels = np.repeat(np.arange(5), 100)
    one, other = (split(labels, 5, Rng(seed), kind, **any_size(kind)) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(labels=labels_of_any_kind, clients=client_numbers, seed=seeds)
def test_iid_parts_are_equally_large(labels: np.ndarray, clients: int, seed: int) -> None:
    sizes = [len(part) for part in split(labels, clients, Rng(seed), "iid")]
    assert max(sizes) - min(sizes) <= 1


@given(labels=labels_of_any_kind, clients=client_numbers, seed=seeds)
def test_stratified_parts_are_equal_in_every_class_and_in_size(labels: np.ndarray, clients: int, seed: int) -> None:
    counts = label_counts(labels, split(labels, clients, Rng(seed), "stratified"), 5)
    assert np.ptp(counts, axis=0).max() <= 1
    assert np.ptp(counts.sum(axis=1)) <= 1


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
def test_dirichlet_proportions_follow_their_law(alpha: float) -> None:
    """A proportion of Dirichlet(α·1_n) has mean m = 1/n and variance m(1 − m)/(nα + 1).

    300 partitions × 10 classes are 3,000 independent draws for a client, so the mean has a standard error of
    sqrt(variance/3000); the variance of a bounded variable is then known to a few per cent.
    """
    clients, labels = 4, np.repeat(np.arange(10), 500)
    shares = np.concatenate(
        [label_counts(labels, split(labels, clients, Rng(s), "dirichlet", alpha=alpha), 10).T / 500 for s in range(300)]
    )
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert np.abs(shares.mean(axis=0) - mean).max() < 4 * (variance / len(shares)) ** 0.5 + 1 / 500
    assert shares.var(axis=0) == pytest.approx(np.full(clients, variance), rel=0.15)


def test_the_thesis_leaves_the_last_client_what_nobody_took() -> None:
    """Its code gives for the first 1,200 digits and ten clients, with every seed: the first, the ninth, the tenth."""
    labels = np.repeat(np.arange(10), [117, 143, 119, 111, 129, 104, 110, 142, 104, 121])
    tested = np.repeat(np.arange(10), MNIST_TEST)
    first, other = (split(labels, 10, Rng(seed), "stratified-thesis", tested=tested) for seed in (0, 1))
    counts = label_counts(labels, first, 10)
    assert counts[0].tolist() == [12, 13, 13, 12, 12, 10, 12, 12, 12, 12]
    assert counts[8].tolist() == [16, 13, 13, 12, 12, 10, 12, 12, 8, 12]
    assert counts[9].tolist() == [5, 26, 2, 3, 21, 14, 2, 34, 0, 13]
    assert np.array_equal(label_counts(labels, other, 10), counts)
    assert not np.array_equal(other[0], first[0])


def test_the_split_that_fedgen_released() -> None:
    """Its script with alpha 0.1, ratio 0.5 and seed 42: 15,000 train images, 5,307 test images of own labels (each user
    has a twentieth of those of each label that it holds), and these users."""
    labels = np.repeat(np.arange(10), MNIST)
    counts = label_counts(labels, split(labels, 20, Rng(42), "fedgen-released", alpha=0.1), 10)
    assert counts.sum() == 15_000
    assert ((counts > 0) * (np.array(MNIST_TEST) // 20)).sum() == 5_307
    assert counts[0].tolist() == [0, 5, 5, 0, 0, 0, 1, 0, 7, 197]
    assert counts[19].tolist() == [0, 522, 5, 0, 1, 896, 1, 1, 71, 1]


def test_the_released_split_draws_again_where_an_alpha_is_too_small_for_floats() -> None:
    """Proportions that are not numbers, as 0/0, are none: half of the samples go to the only client."""
    assert [len(split(np.arange(60) % 10, 1, Rng(seed), "fedgen-released", alpha=1e-3)[0]) for seed in range(3)] == [
        30
    ] * 3


def test_quantity_skews_the_sizes_and_not_the_labels() -> None:
    """Sizes have the variance of the Dirichlet law (as above); labels stay at 1/10 with binomial deviations."""
    clients, alpha, share = 4, 0.5, []
    for seed in range(400):
        counts = label_counts(MNIST_LIKE, split(MNIST_LIKE, clients, Rng(seed), "quantity", alpha=alpha), 10)
        share.append(counts.sum(axis=1) / len(MNIST_LIKE))
        sizes = counts.sum(axis=1, keepdims=True)
        assert (np.abs(counts - sizes / 10) <= 6 * np.sqrt(sizes * 0.09) + 1).all()
    mean = 1 / clients
    assert np.var(share, axis=0).mean() == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=0.1)


@pytest.mark.parametrize(("alpha", "pairs"), [(0.5, 80), (0.1, 43), (0.01, 16)])
def test_balanced_dirichlet_reproduces_the_message_sizes_of_feddm(alpha: float, pairs: int) -> None:
    """FedDM (Xiong et al. 2023) sends images for each (client, class) pair with enough samples: 81, 47 and 14 pairs on
    MNIST (Table 2). The published NIID-Bench code gives about 80, 43 and 16 with 10 samples as enough (deviation of one
    partition: 4, 5 and 2); without balancing there would be over 90 at alpha 0.5."""
    found = []
    for seed in range(40):
        counts = label_counts(MNIST_LIKE, split(MNIST_LIKE, 10, Rng(seed), "dirichlet-balanced", alpha=alpha), 10)
        assert counts.sum(axis=1).min() >= 10
        assert counts.sum(axis=1).max() < 6000 + 6000  # one class at most after the share is full
        found.append((counts >= 10).sum())
    assert np.mean(found) == pytest.approx(pairs, abs=3)


@pytest.mark.parametrize("seed", range(10))
def test_who_holds_just_its_even_share_is_passed_over(seed: int) -> None:
    """Two classes, two clients, each class all to one of them at so small an alpha: the second goes to the other."""
    parts = split(np.repeat([0, 1], 4), 2, Rng(seed), "dirichlet-balanced", alpha=1e-3, min_size=0)
    assert [len(part) for part in parts] == [4, 4]


def test_balanced_dirichlet_has_the_law_of_zeroing_and_renormalising() -> None:
    """The oracle is the rule as NIID-Bench states it: draw for all, zero the full clients, renormalise, cut."""

    def stated(draw: np.random.Generator, clients: int, totals: list[int], alpha: float) -> np.ndarray:
        held, counts = np.zeros(clients), []
        for total in totals:
            proportions = draw.dirichlet(np.full(clients, alpha)) * (held < sum(totals) / clients)
            cuts = (np.cumsum(proportions / proportions.sum())[:-1] * total).astype(int)
            counts.append(np.diff(np.concatenate([[0], cuts, [total]])))
            held += counts[-1]
        return np.stack(counts, axis=1)

    totals, clients, draws = [300, 100, 200, 400], 3, 1000
    labels = np.repeat(np.arange(4), totals)
    draw = Rng(1, "oracle").numpy()
    expected = np.array([stated(draw, clients, totals, 0.5) for _ in range(draws)])
    ours = np.array(
        [
            label_counts(labels, split(labels, clients, Rng(s), "dirichlet-balanced", min_size=0), 4)
            for s in range(draws)
        ]
    )
    error = np.sqrt((expected.var(axis=0) + ours.var(axis=0)) / draws)
    assert (np.abs(expected.mean(axis=0) - ours.mean(axis=0)) < 4.5 * error).all()
    assert ours.std(axis=0) == pytest.approx(expected.std(axis=0), rel=0.1)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 1.0])
def test_fedgen_partition_uses_a_quarter_of_mnist(alpha: float) -> None:
    """With ratio 0.5 and 20 users the share 0.5·60,000/20 = 1,500 also caps each class: 15,000 samples, not 30,000."""
    counts = label_counts(MNIST_LIKE, split(MNIST_LIKE, 20, Rng(0), "dirichlet-fedgen", alpha=alpha, ratio=0.5), 10)
    assert counts.sum(axis=0).tolist() == [1500] * 10
    assert counts.sum(axis=1).min() >= 10
    assert counts.sum(axis=1).max() < 1500 + 1500


def test_fedgen_partition_of_letters() -> None:
    """EMNIST letters, 4,800 a class, ratio 0.1: min(0.1·124,800/20, 0.1·4,800) = 480 a class, 12,480 in all."""
    letters = np.repeat(np.arange(26), 4800)
    parts = split(letters, 20, Rng(0), "dirichlet-fedgen", alpha=1.0, ratio=0.1, min_size=260)
    assert sum(map(len, parts)) == 12_480
    assert min(map(len, parts)) >= 260


def test_shards_give_each_client_few_labels() -> None:
    """McMahan et al.: 60,000 samples in 200 shards of 300, two for each of 100 clients, so at most two digits each."""
    counts = label_counts(MNIST_LIKE, split(MNIST_LIKE, 100, Rng(0), "shards"), 10)
    assert counts.sum(axis=1).tolist() == [600] * 100
    assert (counts > 0).sum(axis=1).max() <= 2
    assert len(np.unique(counts, axis=0)) > 20  # the shards were shuffled
    five = label_counts(MNIST_LIKE, split(MNIST_LIKE, 20, Rng(0), "shards", shards_per_client=5), 10)
    assert 2 < (five > 0).sum(axis=1).max() <= 5


@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-balanced", "dirichlet-fedgen", "quantity"])
@pytest.mark.parametrize("alpha", [5e-324, 1e-9, 1e9, 1.7e308])
def test_extreme_alphas_are_no_problem(kind: str, alpha: float) -> None:
    parts = split(np.repeat(np.arange(3), 40), 4, Rng(0), kind, alpha=alpha, **any_size(kind))
    assert sum(map(len, parts)) == (45 if kind == "dirichlet-fedgen" else 120)
    if alpha > 1:
        assert max(map(len, parts)) - min(map(len, parts)) <= 3  # one cut a class


def test_more_clients_than_samples() -> None:
    for kind in ("iid", "stratified", "dirichlet", "shards", "quantity"):
        parts = split(np.array([1, 0, 1]), 10, Rng(0), kind)
        assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2]
        assert label_counts(np.array([1, 0, 1]), parts, 2).shape == (10, 2)


def test_groups_stay_whole() -> None:
    """Seven writers: one client each, or three clients with two or three writers, dealt out at random."""
    draw = Rng(0, "writers").numpy()
    groups = draw.permutation(np.repeat([3, 5, 8, 13, 21, 34, 55], [4, 1, 2, 3, 5, 2, 6]))
    labels = np.zeros_like(groups)
    alone = split(labels, 7, Rng(0), "group", torch.tensor(groups))
    assert [set(groups[part]) for part in alone] == [{3}, {5}, {8}, {13}, {21}, {34}, {55}]
    merged, again, other = (split(labels, 3, Rng(seed), "group", groups) for seed in (0, 0, 1))
    assert sorted(np.concatenate(merged).tolist()) == list(range(len(groups)))
    owners = [set(groups[part].tolist()) for part in merged]
    assert sorted(map(len, owners)) == [2, 2, 3]
    assert len(set.union(*owners)) == 7
    assert [part.tolist() for part in merged] == [part.tolist() for part in again]
    assert owners != [set(groups[part].tolist()) for part in other]
    with pytest.raises(FedgistError, match="from 7 groups, so that there can be no 8 clients"):
        split(labels, 8, Rng(0), "group", groups)
    with pytest.raises(FedgistError, match="needs a data set that says who each sample is from"):
        split(labels, 3, Rng(0), "group")


def test_what_each_kind_takes_can_be_asked() -> None:
    assert options("iid") == {}
    assert options("dirichlet-fedgen") == {"alpha": 0.5, "ratio": 0.5, "min_size": 10}
    assert {kind for kind in partitions.KINDS if "alpha" in options(kind)} == {
        "dirichlet", "dirichlet-balanced", "dirichlet-fedgen", "fedgen-released", "quantity",
    }  # fmt: skip
    lines = [(function.__doc__ or "").partition("\n")[0] for function in partitions.KINDS.values()]
    assert all(10 < len(line) < 120 and line.endswith(".") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dirichlt"}, "unknown partition 'dirichlt'; did you mean 'dirichlet'"),
        ({"kind": "dirichlet-balanced", "clients": 4, "min_size": 11}, "at least 11; use fewer clients"),
        ({"kind": "dirichlet-fedgen", "labels": np.array([0]), "min_size": 0}, "leaves every client empty"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(FedgistError) as caught:
        split(**({"labels": np.zeros(40, int), "clients": 3, "rng": Rng(0)} | arguments))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_impossible_redraws_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "TRIES", 20)
    with pytest.raises(FedgistError, match=r"alpha 1e-06 .* larger alpha"):
        split(np.zeros(400, int), 20, Rng(0), "dirichlet-balanced", alpha=1e-6)
