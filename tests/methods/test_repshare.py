"""Representation sharing: what is released, relayed and learned, with a server and between peers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedgist import storage
from fedgist.core import tree
from fedgist.core.errors import FedgistError
from fedgist.core.ledger import Ledger
from fedgist.core.rng import Rng
from fedgist.data import topologies
from fedgist.data.client_data import ClientData
from fedgist.engines import EXECUTORS
from fedgist.engines.local import LocalEngine
from fedgist.learning.contrastive import CRITIC, chosen
from toys import apart, play, received, toy_federation

CLASSES, FEATURES = 10, 16


def build(method: str = "repshare", sites: Mapping[str, ClientData] | None = None, **given: Any) -> LocalEngine:
    """A federation of a few clients with 200 real 8×8 digits, stratified unless said otherwise."""
    usual = {"limit": 200, "clients": 4, "partition": "stratified", "seed": 3}
    return toy_federation(method, sites, **usual | given)


def weights(engine: LocalEngine) -> Any:
    return {id: state["w"] for id, state in engine.site_states.items()}


def class_sums(engine: LocalEngine, id: str) -> tuple[Tensor, Tensor]:
    """Sums of a client's features by class and their counts, computed one sample at a time."""
    data, model = engine.data[id], engine.method.task.models[engine.info[id]["model"]]
    sums, counts = torch.zeros(CLASSES, FEATURES), torch.zeros(CLASSES)
    for x, y in zip(data.x, data.y.tolist(), strict=True):
        sums[y] += model(engine.site_states[id]["w"], x[None]).features[0]
        counts[y] += 1
    return sums, counts


def without(data: ClientData, *labels: int) -> ClientData:
    keep = ~torch.isin(data.y, torch.tensor(labels))
    return replace(data, x=data.x[keep], y=data.y[keep])


# What is released and relayed


def test_the_relay_holds_means_over_all_samples_and_the_last_observations() -> None:
    """t̄^c = Σ_u Σ_i φ_u(x_i) / Σ_u n_u^c; with n_avg as large as a class, an observation is a client's class mean."""
    engine = play(build(n_avg=1000, m_up=1), 2)
    both = [class_sums(engine, id) for id in engine.ids]
    means = sum(sums for sums, _ in both) / sum(counts for _, counts in both)[:, None]
    assert torch.allclose(engine.state["means"][0], means, atol=1e-5)
    assert engine.state["known"].tolist() == [1.0] * CLASSES
    for id, (sums, counts) in zip(engine.ids, both, strict=True):
        held = engine.state["buffers"][id]
        assert held["round"] == 2
        assert torch.allclose(held["observations"][0], sums / counts[:, None], atol=1e-5)


def test_observations_average_few_samples_drawn_anew() -> None:
    """With n_avg = 1 an observation is the feature of one sample of its class; two observations differ."""
    engine = play(build(n_avg=1, m_up=2), 1)
    held = engine.state["buffers"]["0"]["observations"]
    data, w = engine.data["0"], engine.site_states["0"]["w"]
    features = engine.method.model(w, data.x).features
    for c in range(CLASSES):
        distances = torch.cdist(held[:, c], features[data.y == c])
        assert distances.min(1).values.max() < 1e-5
    assert not held[0].equal(held[1])


@pytest.mark.parametrize("peers", [False, True])
def test_the_first_round_may_learn_from_untrained_nets(peers: bool) -> None:
    """With nothing to learn from, round 1 is learning alone, as with λ = 0; with an untrained start it is not."""
    given = {"topology": {id: [other for other in "0123" if other != id] for id in "0123"}} if peers else {}
    for start in (False, True):
        alone, drawn = (
            weights(play(build(lambda_kd=kd, lambda_disc=0.0, untrained_start=start, **given), 1)) for kd in (0.0, 1.0)
        )
        assert all((apart(alone[id], drawn[id]) > 1e-3) == start for id in alone)


def test_what_untrained_nets_represent_is_a_mean_over_all_samples() -> None:
    engine = build(untrained_start=True, lr=1e-12)  # so that nets are as they were when they were asked
    kept = received(engine)
    play(engine, 1)
    both = [class_sums(engine, id) for id in engine.ids]
    means = sum(sums for sums, _ in both) / sum(counts for _, counts in both)[:, None]
    assert torch.allclose(kept[0].sum.sums[0] / kept[0].sum.counts[:, None], means, atol=1e-5)


def test_absent_classes_are_absent_everywhere() -> None:
    """Nobody holds class 9, only client 1 holds class 8: the others know its mean, client 1 sees no other's 8."""
    usual = build().data
    sites = {id: without(data, 9) if id == "1" else without(data, 8, 9) for id, data in usual.items()}
    engine = play(build(sites=sites, lambda_kd=1.0), 1)
    assert engine.state["known"].tolist() == [1.0] * 9 + [0.0]
    assert not engine.state["means"][0, 9].any()
    rng = engine.rng("test")
    for id in engine.ids:
        lesson = engine.method.lesson(engine.state, id, rng)  # type: ignore[attr-defined]
        assert lesson.observed.tolist() == [True] * 8 + [id != "1", False]
        assert not lesson.observations[:, ~lesson.observed].any()
    play(engine, 2)
    assert all(torch.isfinite(leaf).all() for leaf in tree.leaves(weights(engine)))


def test_lessons_come_from_others_unless_own_ones_are_wanted() -> None:
    for exclude in (True, False):
        engine = play(build(exclude_self=exclude, m_up=1, m_down=3), 1)
        own = engine.state["buffers"]["2"]["observations"][0]
        seen = set()
        for seed in range(20):
            lesson = engine.method.lesson(engine.state, "2", engine.rng(seed))  # type: ignore[attr-defined]
            seen |= {bool(table.equal(own[c])) for c in range(CLASSES) for table in lesson.observations[:, c]}
            for c in range(CLASSES):  # three of three or four: all different
                assert len({tuple(row.tolist()) for row in lesson.observations[:, c]}) == 3
        assert seen == ({False} if exclude else {True, False})


def test_the_relay_keeps_what_offline_clients_sent_until_it_is_too_old() -> None:
    def out(id: str, round: int, exchange: int) -> bool:
        return id == "3" and round > 1

    assert play(build(offline=out), 4).state["buffers"]["3"]["round"] == 1
    assert set(play(build(offline=out, max_age=3), 3).state["buffers"]) == {"0", "1", "2", "3"}
    assert set(play(build(offline=out, max_age=3), 4).state["buffers"]) == {"0", "1", "2"}


# What is learned


def test_without_losses_it_is_independent_learning() -> None:
    shared = play(build(lambda_kd=0.0, lambda_disc=0.0, keep_momentum=False, momentum=0.9), 3)
    alone = play(build(method="independent", keep_momentum=False, momentum=0.9), 3)
    assert storage.digest(weights(shared)) == storage.digest(weights(alone))


def test_the_first_round_is_learning_alone() -> None:
    drawn, alone = (weights(play(build(lambda_kd=weight), 1)) for weight in (10.0, 0.0))
    assert storage.digest(drawn) == storage.digest(alone)


def test_without_observations_only_the_distance_is_left() -> None:
    some, none = (play(build(m_up=m, m_down=m, lambda_disc=0.0), 3) for m in (1, 0))
    assert storage.digest(weights(some)) == storage.digest(weights(none))
    assert none.state["buffers"]["0"]["observations"].numel() == 0


def test_an_external_discriminator_trains_beside_the_model_and_stays_at_its_client(tmp_path: Path) -> None:
    ledgers = {kind: tmp_path / kind for kind in ("classifier", "external")}
    for kind, path in ledgers.items():
        ledger = Ledger(path)
        engine = play(build(discriminator=kind, ledger=ledger))
        before = weights(engine)
        play(engine, 2)
        ledger.close()
    for id, w in weights(engine).items():
        beside = [name for name in w if name.startswith(CRITIC)]
        assert len(beside) == 2 and not any(torch.equal(w[name], before[id][name]) for name in beside)
    for me in engine.clients():
        assert engine.method.client_weights(me, {}).keys() == engine.method.model.shapes.keys()
    assert ledgers["external"].read_text() == ledgers["classifier"].read_text()  # as many bytes, of the same messages


def test_common_start() -> None:
    def begin(common: bool) -> list[str]:
        engine = play(build(common_start=common, lr=1e-30), 1)
        return [storage.digest(state["w"]) for state in engine.site_states.values()]

    assert len(set(begin(True))) == 1
    assert len(set(begin(False))) == 4


def test_features_come_together() -> None:
    """The distance to the common means does what it is for: clients' class means end up nearer to each other."""

    def spread(kd: float) -> float:
        engine = play(build(lambda_kd=kd, lambda_disc=0.0, optimiser="adam", steps=10, lr=0.01), 4)
        means = torch.stack([sums / counts[:, None] for sums, counts in (class_sums(engine, id) for id in engine.ids)])
        return (means.std(0).norm() / means.norm()).item()

    assert spread(10.0) < 0.7 * spread(0.0)


def test_received_observations_can_stand_in_for_global_means() -> None:
    """With one other client, whose observation is its class mean: the proxy is exactly that, and no sums travel."""
    engine = play(build(clients=2, means="received", n_avg=1000, m_up=1), 1)
    sums, counts = class_sums(engine, "1")
    lesson = engine.method.lesson(engine.state, "0", engine.rng("test"))  # type: ignore[attr-defined]
    assert lesson.means.shape == (0, CLASSES, FEATURES)
    assert torch.allclose(lesson.observations[0], sums / counts[:, None], atol=1e-5)
    before = weights(engine)["0"]
    play(engine, 1)
    assert storage.digest(weights(engine)["0"]) != storage.digest(before)
    heard = play(build(means="received", m_down=2), 2).site_states["0"]["heard"]
    assert heard["observations"].any() and heard["known"].equal(heard["observed"])
    assert torch.allclose(heard["means"], heard["observations"].mean(0))


# What it costs


@pytest.mark.parametrize(("settings", "up", "down"), [
    ({"m_up": 1, "m_down": 1}, 2, 2),
    ({"m_up": 3, "m_down": 2}, 4, 3),
    ({"m_up": 1, "m_down": 2, "means": "received"}, 1, 2),
])  # fmt: skip
def test_paper_bytes_are_exact(tmp_path: Path, settings: dict[str, Any], up: int, down: int) -> None:
    """(M + 1) C d' numbers a round and client each way, and nothing that the paper does not count in its column."""
    ledger = Ledger(tmp_path / "ledger.csv")
    engine = play(build(ledger=ledger, **settings), 3)
    totals = ledger.totals()
    messages = 3 * len(engine.ids)
    assert totals.paper_up == messages * up * CLASSES * FEATURES * 4
    assert totals.paper_down == messages * down * CLASSES * FEATURES * 4
    ledger.close()
    rows = [line.split(",") for line in (tmp_path / "ledger.csv").read_text().splitlines()[1:]]
    for row in rows:  # extra on the wire: the counts in float32 and one byte a class, or two bytes a class
        assert int(row[-2]) - int(row[-1]) == (5 * CLASSES if row[4] == "up" else 2 * CLASSES)


# Tunable collaboration


def test_clients_choose_what_they_release() -> None:
    engine = play(build(choices="0:released=3+4,1:share=0,2:share=0.5", m_up=1), 2)
    buffers = engine.state["buffers"]
    assert torch.nonzero(buffers["0"]["observed"]).flatten().tolist() == [3, 4]
    assert not buffers["1"]["observations"].any()
    assert engine.site_states["2"]["released"]["counts"].tolist() == (class_sums(engine, "2")[1] / 2).ceil().tolist()
    kept = [engine.site_states[id]["released"] for id in engine.ids]
    counts = sum(released["counts"] for released in kept)
    means = sum(released["sums"] for released in kept) / counts[:, None]
    assert torch.allclose(engine.state["means"], means, atol=1e-5)


@pytest.mark.parametrize("percent", [0, 7, 9, 15, 27, 30, 33, 54, 95, 100])
def test_no_more_samples_are_released_than_the_share(percent: int) -> None:
    """⌈share · n⌉ of each class, as whole numbers have it: in float32 0.3 · 50 is above 15."""
    sizes = [1, 50, 75, 100, 150, 300, 0, 0, 0, 0]
    y = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    data = ClientData(torch.zeros(len(y), 1, 8, 8), y, len(sizes))
    engine = play(build(sites={"0": data}, lr=1e-30, steps=1, batch=8, choices=f"0:share={percent / 100}"))
    counts = engine.site_states["0"]["released"]["counts"]
    assert counts.tolist() == [-(-percent * n // 100) for n in sizes]
    assert not counts.signbit().any()


def test_withheld_samples_never_enter_anything_that_is_released() -> None:
    """A lasting choice: a client may replace the samples it withholds by anything, and releases the same in any round.

    The samples that are used are found by making all others blank; its net must not train for that, so the learning
    rate is next to nothing.
    """
    settings = {"choices": "2:share=0.5", "lr": 1e-30, "m_up": 2}
    engine = play(build(**settings), 1)
    data, plain = engine.data["2"], engine.site_states["2"]["released"]
    keys = Rng(3)("client", "2", "released").uniform(data.n)
    used = chosen(data.y, keys, plain["counts"])
    assert used.sum() == plain["counts"].sum() < data.n
    blank = replace(data, x=torch.where(used[:, None, None, None], data.x, 0.0))
    again = play(build(**settings, sites={**engine.data, "2": blank}), 1)
    assert again.site_states["2"]["released"]["sums"].equal(plain["sums"])
    assert again.site_states["2"]["released"]["observations"].equal(plain["observations"])
    opposite = replace(data, x=torch.where(used[:, None, None, None], 0.0, data.x))
    again = play(build(**settings, sites={**engine.data, "2": opposite}), 1)
    assert not torch.allclose(again.site_states["2"]["released"]["sums"], plain["sums"], atol=0.1)
    later = play(engine, 2).site_states["2"]["released"]
    assert torch.allclose(later["sums"], plain["sums"], atol=1e-4)
    assert not torch.allclose(later["observations"], plain["observations"], atol=1e-2)


def test_clients_choose_whom_they_listen_to() -> None:
    """Client 0 hears client 2 alone, in its means too: what client 1 and 3 hold no longer matters to it."""
    usual = build().data
    other = {id: replace(data, x=-data.x) if id in ("1", "3") else data for id, data in usual.items()}
    runs = [play(build(choices="0:peers=2,2:peers=0", sites=sites), 3) for sites in (usual, other)]
    digests = [{id: storage.digest(w) for id, w in weights(run).items()} for run in runs]
    assert digests[0]["0"] == digests[1]["0"]
    assert digests[0]["1"] != digests[1]["1"]
    listens_to_all = play(build(), 3)
    assert storage.digest(weights(listens_to_all)["0"]) != digests[0]["0"]


def test_who_receives_nothing_learns_alone() -> None:
    """Without observations there are no means of them either, to which features could be drawn."""
    alone = play(build(lambda_kd=0, lambda_disc=0), 3)
    for settings in ({"means": "received"}, {"peers": ("1", "2")}):
        engine = play(build(m_down=0, **settings), 3)
        assert storage.digest(weights(engine)) == storage.digest(weights(alone))


def test_who_listens_to_all_by_name_still_does_not_hear_itself() -> None:
    named = play(build(peers=("0", "1", "2", "3")), 3)
    assert storage.digest(weights(named)) == storage.digest(weights(play(build(means="received"), 3)))


@pytest.mark.parametrize(("choices", "said"), [
    ("7:share=0.5", "unknown client '7'"),
    ("1:peers=2+9", "unknown client '9'"),
    ("1:share=2", "share must be at most 1, not 2"),
    ("1:shares=1", "did you mean 'share'"),
    ("1:released=12", "the last one is 9"),
    ("1", "client:key=value"),
    ("1:share=0.5,2:share=1,1:lambda_kd=0", "choices has client 1 twice"),
])  # fmt: skip
def test_wrong_choices_are_explained(choices: str, said: str) -> None:
    with pytest.raises(FedgistError, match=said):
        play(build(choices=choices), 1)


def test_different_architectures_with_the_same_features() -> None:
    engine = play(build(architectures="mlp:hidden=16,mlp:hidden=20x16,cnn:feature_size=16:norm=none"), 3)
    assert len({len(w) for w in weights(engine).values()}) == 3
    assert 0 <= engine.evaluate(engine.data["0"].test)["accuracy"] <= 1  # type: ignore[arg-type]
    with pytest.raises(FedgistError, match="mlp:hidden=20 has 20"):
        build(architectures="mlp:hidden=16,mlp:hidden=20")


def test_all_but_two_offline() -> None:
    """The two that are left go on learning from each other: one's data still reach the other."""

    def out(id: str, round: int, exchange: int) -> bool:
        return id not in ("0", "3")

    usual = build().data
    other = {**usual, "3": replace(usual["3"], x=-usual["3"].x)}
    runs = [play(build(offline=out, sites=sites), 3) for sites in (usual, other)]
    assert set(weights(runs[0])) == {"0", "3"}
    assert storage.digest(weights(runs[0])["0"]) != storage.digest(weights(runs[1])["0"])


def test_a_client_that_was_away_has_trained_meanwhile() -> None:
    """Without the two losses, being away changes nothing but the batches: as many steps are made in the end.

    Each client has but one batch, with all of its samples, so that even the batches are the same.
    """
    settings = {"limit": 40, "steps": 0, "batch": 10, "lambda_kd": 0.0, "lambda_disc": 0.0}

    def out(id: str, round: int, exchange: int) -> bool:
        return id == "1" and round in (1, 3, 4)

    always, away, idle = (
        play(build(**settings, **more), 5) for more in ({}, {"offline": out}, {"offline": out, "train_offline": False})
    )
    for name, w in weights(always)["1"].items():
        assert torch.allclose(weights(away)["1"][name], w, atol=1e-5)
    assert any(not torch.allclose(weights(idle)["1"][name], w, atol=1e-2) for name, w in weights(always)["1"].items())


def test_late_replies_keep_their_origin_and_nothing_is_lost() -> None:
    def late(id: str, round: int) -> int:
        return 2 if (id, round) == ("1", 1) else 0

    engine = build(delay=late)
    held = []
    for _ in range(4):
        play(engine, 1)
        held.append(engine.state["buffers"].get("1", {}).get("round"))
    assert held == [None, None, 1, 4]


# Peer to peer


def peers(kind: str, clients: int = 4) -> topologies.Graph:
    ids = [str(i) for i in range(clients)]
    return topologies.full(ids) if kind == "full" else topologies.ring(ids)


def test_two_peers_are_two_clients_with_a_relay() -> None:
    """What one releases after a round is what the other learns from in the next, with or without a relay between.

    A peer learns in the second exchange of a round, so its batches are drawn under another name: each client has but
    one batch, with all of its samples.
    """
    settings = {"clients": 2, "limit": 20, "n_avg": 1000, "m_up": 1, "steps": 0, "batch": 10}
    relayed, free = play(build(**settings), 4), play(build(topology=peers("full", 2), **settings), 4)
    for a, b in zip(tree.leaves(weights(relayed)), tree.leaves(weights(free)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert storage.digest(weights(free)) != storage.digest(weights(play(build(**settings, lambda_kd=0.0), 4)))


@pytest.mark.parametrize("engine", [name for name in EXECUTORS if name != "sequential"])
def test_a_ring_counts_its_links(tmp_path: Path, engine: str) -> None:
    """Each of the four links carries a request and a reply each way in a round; a client's words to itself are free."""
    ledger = Ledger(tmp_path / "ledger.csv")
    ring = play(build(engine=engine, topology=peers("ring"), ledger=ledger, m_up=1), 3)
    totals = ledger.totals()
    assert totals.messages == 3 * 4 * 2 * 2
    assert totals.paper_up == 3 * 8 * 2 * CLASSES * FEATURES * 4
    assert totals.paper_down == 0
    ledger.close()
    ends = {tuple(line.split(",")[5:7]) for line in (tmp_path / "ledger.csv").read_text().splitlines()[1:]}
    assert ends == {(str(i), str((i + step) % 4)) for i in range(4) for step in (1, 3)}
    assert set(ring.states["0"]["buffers"]) == {"0", "1", "3"}
    slow = play(build(topology=peers("ring"), m_up=1), 3)
    for a, b in zip(tree.leaves(weights(slow)), tree.leaves(weights(ring)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_peers_means_are_those_of_its_neighbourhood() -> None:
    engine = play(build(topology=peers("ring")), 2)
    released = {id: state["released"] for id, state in engine.site_states.items()}
    play(engine, 1)
    near = [released[id] for id in ("0", "1", "3")]
    means = sum(part["sums"] for part in near) / sum(part["counts"] for part in near)[:, None]
    assert torch.allclose(engine.states["0"]["means"], means, atol=1e-5)


def test_an_offline_peer_rests_and_comes_back() -> None:
    def out(id: str, round: int, exchange: int) -> bool:
        return id == "1" and round == 2

    ledger = Ledger()
    engine = play(build(topology=peers("ring"), offline=out, ledger=ledger), 1)
    before, messages = storage.digest(engine.site_states["1"]), ledger.totals().messages
    report = engine.run_round()
    assert storage.digest(engine.site_states["1"]) == before
    assert report.skipped is None
    assert report.answered == 3
    assert ledger.totals().messages - messages == 2 * 2 * 2  # two of the four links are down
    play(engine, 1)
    assert storage.digest(engine.site_states["1"]) != before


def test_what_reaches_a_peer_travels_along_the_ring() -> None:
    """In a ring of four, client 2 is two links from client 0: its data reach 0 one round later than 1's do."""
    usual = build().data

    def reached(changed: str) -> int:
        sites = {**usual, changed: replace(usual[changed], x=-usual[changed].x)}
        runs = [build(topology=peers("ring"), sites=given) for given in (usual, sites)]
        for round in range(1, 6):
            first, second = (storage.digest(weights(play(run, 1))["0"]) for run in runs)
            if first != second:
                return round
        return 0

    assert (reached("0"), reached("1"), reached("2")) == (1, 2, 3)
