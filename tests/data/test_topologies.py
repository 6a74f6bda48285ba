"""Graphs of peers: everybody reachable, links both ways, degrees as asked for."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.core.errors import FedgistError
from fedgist.core.rng import Rng
from fedgist.data import topologies


def names(n: int) -> list[str]:
    return [f"{i:02d}" for i in range(n)]


def reachable(graph: topologies.Graph) -> set[str]:
    seen, new = set(), {min(graph)}
    while new:
        seen |= new
        new = {near for id in new for near in graph[id]} - seen
    return seen


@settings(max_examples=15)
@given(st.integers(3, 11), st.data())
def test_graphs_are_connected_symmetric_and_regular(n: int, data: st.DataObject) -> None:
    possible = [k for k in range(2, n) if k * n % 2 == 0]
    degree = data.draw(st.sampled_from(possible))
    for text, expected in (("full", n - 1), ("ring", 2), (f"regular:{degree}", degree)):
        graph = topologies.build(text, names(n), Rng(n))
        assert list(graph) == names(n)
        assert reachable(graph) == set(graph)
        for id, near in graph.items():
            assert len(set(near)) == len(near) == expected
            assert id not in near
            assert all(id in graph[other] for other in near)


def test_a_regular_graph_is_random_and_named() -> None:
    graphs = [topologies.build("regular:3", names(12), Rng(seed)) for seed in (0, 0, 1)]
    assert graphs[0] == graphs[1] != graphs[2]


def test_a_regular_graph_forgets_the_circle_it_starts_from() -> None:
    """In a uniform 4-regular graph of 10 every pair is linked with probability 4/9, neighbours on the circle too."""
    pairs = [(i, (i + 1) % 10) for i in range(10)]
    found = 0
    for seed in range(30):
        graph = topologies.regular(names(10), 4, Rng(seed))
        found += sum(f"{b:02d}" in graph[f"{a:02d}"] for a, b in pairs)
    assert found / 300 == pytest.approx(4 / 9, abs=0.1)


def test_a_grid_has_rows_and_columns() -> None:
    """Seven in rows of three: 0 1 2 / 3 4 5 / 6."""
    graph = topologies.build("grid", names(7), Rng(0))
    assert graph["04"] == ("01", "03", "05") and graph["00"] == ("01", "03") and graph["06"] == ("03",)
    assert topologies.build("grid:1", names(4), Rng(0)) == topologies.build("grid:4", names(4), Rng(0))
    assert topologies.build("grid:4", names(4), Rng(0))["01"] == ("00", "02")


def test_gossip_is_drawn_anew_and_reaches_everybody_in_time() -> None:
    """Pairs change from round to round, and what one client knows is known to all after a few rounds."""
    graphs = topologies.over_time("gossip:1", names(8), Rng(5))
    again, other = (topologies.over_time("gossip:1", names(8), Rng(seed)) for seed in (5, 6))
    assert [graphs(r) for r in range(1, 6)] == [again(r) for r in range(1, 6)] != [other(r) for r in range(1, 6)]
    assert len({str(graphs(r)) for r in range(1, 9)}) > 6
    assert all(len(near) == 1 and graphs(1)[near[0]] == (id,) for id, near in graphs(1).items())
    knowing = {"00"}
    for r in range(1, 30):
        knowing |= {id for id, near in graphs(r).items() if knowing & set(near)}
    assert knowing == set(names(8))
    assert sorted(map(len, topologies.over_time("gossip:1", names(5), Rng(0))(1).values())) == [0, 1, 1, 1, 1]
    assert set(map(len, topologies.over_time("gossip:2", names(5), Rng(0))(3).values())) == {2}
    fixed = topologies.over_time("regular:2", names(5), Rng(0))
    assert fixed(1) == fixed(2)


def test_links_in_a_file(tmp_path: Path) -> None:
    """Names may have hyphens; what a run writes down needs the file no more."""
    path = tmp_path / "links.txt"
    path.write_text("# who trusts whom\nsite-1 site-2\n\nsite-2 site-3  # by phone\n")
    ids = ["site-1", "site-2", "site-3"]
    graph = topologies.build(f"file:{path}", ids, Rng(0))
    assert graph == {"site-1": ("site-2",), "site-2": ("site-1", "site-3"), "site-3": ("site-2",)}
    written = topologies.settled(f"file:{path}")
    assert written == "links:site-1-site-2+site-2-site-3" and topologies.build(written, ids, Rng(0)) == graph
    path.write_text("site-1 site-2 site-3\n")
    with pytest.raises(FedgistError, match="line 1: a link is two names"):
        topologies.read(path)
    with pytest.raises(FedgistError, match="cannot read the topology"):
        topologies.build(f"file:{tmp_path / 'none'}", ids, Rng(0))
    with pytest.raises(FedgistError, match="two ways"):
        topologies.build("links:a-b-c", ["a", "b-c", "a-b", "c"], Rng(0))


def test_two_clients_and_given_links() -> None:
    assert topologies.build("ring", ["a", "b"], Rng(0)) == {"a": ("b",), "b": ("a",)}
    assert topologies.build("links:0-1+1-2", ["0", "1", "2"], Rng(0)) == {"0": ("1",), "1": ("0", "2"), "2": ("1",)}


@pytest.mark.parametrize(("text", "said"), [
    ("rings", "did you mean 'ring'"),
    ("regular", "as in regular:4"),
    ("regular:9", "gives each 9 neighbours"),
    ("regular:3", "an even number"),
    ("links:0-1+3-4", "unreachable"),
    ("links:0-1+1-7", "unknown client in the topology '7'"),
    ("links:01", "two names with a hyphen"),
    ("grid:9", "columns from 1 to 5"),
    ("gossip", "as in gossip:4"),
    ("gossip:3", "an even number"),
    ("full:3", "has no options"),
])  # fmt: skip
def test_wrong_topologies_are_explained(text: str, said: str) -> None:
    with pytest.raises(FedgistError, match=said):
        topologies.build(text, ["0", "1", "2", "3", "4"], Rng(0))
