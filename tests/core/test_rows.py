"""Messages of rows: what is told from a stack, and that codec and sums treat them as they treat single messages."""

import pytest
import torch
from torch import Tensor

from fedgist.core.codec import Codec, add_up, size
from fedgist.core.message import Params, WireError, float16, message, wire
from fedgist.core.rows import Part, Replies, by_stack, find_stack, join


@message
class Sent:
    pw: Params = wire(shape="model", additive=True)
    seen: Tensor = wire(float16, shape=("n",))
    p: float = wire(additive=True)
    steps: int = wire(torch.int64, additive=True)


CODEC = Codec({"model": {"a": (2, 3), "b": (3,)}, "n": 4})


def stacks(count: int, n: int = 4) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(count, *shape, generator=drawn) for name, shape in {"a": (2, 3), "b": (3,), "n": (n,)}.items()
    }


def messages(rows: dict[str, Tensor], order: list[int]) -> dict[str, Sent]:
    """Client c has row order[c]."""
    return {
        f"c{c}": Sent({"a": rows["a"][i], "b": rows["b"][i]}, rows["n"][i], 0.1 * (i + 1), i)
        for c, i in enumerate(order)
    }


def test_rows_are_told_from_their_stack_and_nothing_else_is() -> None:
    stack = stacks(4)["a"].repeat(1, 3, 2)[:, :3, :3].contiguous()
    assert find_stack(stack.unbind()) is stack
    part = find_stack(list(stack)[1:3])
    assert part is not None and part.data_ptr() == stack[1].data_ptr() and part.shape == (2, 3, 3)
    rows = list(stack)
    for wrong in (
        rows[::-1],
        [rows[0], rows[2]],
        [rows[0], rows[0]],
        [row.T for row in rows],
        [row[:2] for row in rows],
        [row.clone() for row in rows],
        [*rows[:3], stack.clone()[3]],
        [row.view(torch.int32) for row in rows],
        list(stack[:1].clone().expand(4, 3, 3)),
        list(stack.view(2, 2, 3, 3)[0]),
    ):
        found = find_stack(wrong)
        assert found is None or torch.equal(found, torch.stack(wrong)), "what it takes for a stack holds those rows"
    assert find_stack(rows[::-1]) is None and find_stack([row.T for row in rows]) is None


def test_many_messages_are_packed_checked_and_counted_as_each_of_them() -> None:
    sent = messages(stacks(4), [2, 0, 3, 1])
    (group,) = by_stack(sent)
    joined = join(group)
    assert joined is not None
    ids, rows = joined
    assert ids == ("c1", "c3", "c0", "c2"), "in the order in which they lie"
    part = Part(ids, CODEC.pack(rows, summed=True, rows=True))
    replies = Replies([part])
    assert list(replies) == sorted(sent)
    for id, msg in sent.items():
        alone = CODEC.pack(msg)
        assert list(replies[id]) == list(alone)
        assert all(
            torch.equal(replies[id][name], leaf) and replies[id][name].dtype == leaf.dtype
            for name, leaf in alone.items()
        )
        assert size(Sent, part.leaves, rows=True) == size(Sent, alone)
    shared = part.leaves["pw/a"].data_ptr(), part.leaves["seen"].data_ptr()
    assert shared[0] == sent["c1"].pw["a"].data_ptr(), "what is summed is not copied"
    assert shared[1] != sent["c1"].seen.data_ptr(), "what is seen is"


def test_sums_of_rows_and_of_single_messages() -> None:
    sent = messages(stacks(4), [0, 1, 2, 3])
    ids, rows = join(sent)  # type: ignore[misc]
    part = Part(ids, CODEC.pack(rows, summed=True, rows=True))
    apart = [CODEC.pack(msg) for msg in sent.values()]
    for name, total in add_up(Sent, apart).items():
        assert torch.equal(add_up(Sent, [part])[name], total) and add_up(Sent, [part])[name].dtype == total.dtype
        torch.testing.assert_close(add_up(Sent, [apart[0], part])[name], total + apart[0][name])
    assert add_up(Sent, [part])["steps"].item() == 6


def test_what_does_not_fit_is_refused_in_rows_too() -> None:
    _, rows = join(messages(stacks(3, n=5), [0, 1, 2]))  # type: ignore[misc]
    with pytest.raises(WireError, match="n = 5 is above the agreed 4"):
        CODEC.pack(rows, rows=True)
    with pytest.raises(WireError, match="one shape"):
        add_up(Sent, [Part(("a", "b"), {"p": torch.zeros(2, 3)}), Part(("c", "d"), {"p": torch.zeros(2, 4)})])


def test_messages_that_are_not_rows_throughout_stay_single() -> None:
    sent = messages(stacks(3), [0, 1, 2])
    own = {**sent, "c1": Sent({**sent["c1"].pw, "b": torch.zeros(3)}, sent["c1"].seen, 0.0, 0)}
    assert join(own) is None
    less = {**sent, "c1": Sent({"a": sent["c1"].pw["a"]}, sent["c1"].seen, 0.0, 0)}
    assert join(less) is None
    copied = {id: Sent({name: t.clone() for name, t in msg.pw.items()}, msg.seen, 0.0, 0) for id, msg in sent.items()}
    assert [len(group) for group in by_stack(copied)] == [1, 1, 1]
