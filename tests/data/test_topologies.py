"""Graphs of peers: everybody reachable, links both ways, degrees as asked for."""

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
    ("full:3", "has no options"),
])  # fmt: skip
def test_wrong_topologies_are_explained(text: str, said: str) -> None:
    with pytest.raises(FedgistError, match=said):
        topologies.build(text, ["0", "1", "2", "3", "4"], Rng(0))
