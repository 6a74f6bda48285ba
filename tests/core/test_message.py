"""What a message is declared to be, and messages of which only a part is there."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from fedgist.core.message import (
    Done,
    Params,
    Wire,
    float16,
    float32,
    int64,
    message,
    partly,
    schema_of,
    tag_of,
    tensors_in,
    wire,
)


@message
class Mixed:
    """A field of every kind that there is."""

    x: Tensor = wire(float16, float32, shape=("n", 2), additive=True)
    w: Params = wire(shape="model")
    p: float
    count: int


def test_the_tensors_of_a_message() -> None:
    sent = Mixed(torch.zeros(1, 2), {"a": torch.zeros(1), "b": torch.ones(1)}, 0.5, 3)
    found = tensors_in(sent)
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in (sent.x, *sent.w.values())}
    assert len(found) == 3
    assert tensors_in(Done()) == []


def test_declarations_are_checked() -> None:
    with pytest.raises(TypeError, match=r"Bad\.x"):

        @message
        class Bad:
            x: list[int]

    with pytest.raises(TypeError, match="template"):

        @message
        class Worse:
            w: Params = wire(float32, shape=(1,))

    with pytest.raises(TypeError, match="F32"):

        @message
        class Worst:
            x: Tensor = wire(torch.complex64, shape=(1,))


def test_what_is_not_declared_has_its_usual_form() -> None:
    """Scalars travel as float32 and int64, `Params` by the template `model`, and all are visible."""
    schema = schema_of(Mixed)
    assert schema["p"] == (float, Wire((float32,)))
    assert schema["count"] == (int, Wire((int64,)))
    assert schema["w"] == (Params, Wire(shape="model"))
    assert schema["x"] == (Tensor, Wire((float16, float32), ("n", 2), additive=True))
    assert tag_of(Mixed) == "test_message.Mixed"


def test_a_part_of_a_message_has_only_that_part() -> None:
    part = partly(Mixed, {"p": 0.5})
    assert (part.p, hasattr(part, "count"), isinstance(part, Mixed)) == (0.5, False, True)
    with pytest.raises(
        AttributeError, match=r"^Mixed\.x is additive: only the sum is visible; read it as answers\.sum\.x$"
    ):
        _ = part.x
    with pytest.raises(AttributeError, match=r"^Mixed\.count is seen of each client and not summed"):
        _ = part.count
    with pytest.raises(AttributeError, match="Mixed has no field 'y'; it has x, w, p, count"):
        _ = part.y  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="Done has no field 'y'; it has none"):
        _ = Done().y  # type: ignore[attr-defined]


def test_nobody_changes_a_message() -> None:
    for msg in (Mixed(torch.zeros(1, 2), {}, 0.5, 3), partly(Mixed, {"p": 0.5})):
        with pytest.raises(FrozenInstanceError):
            msg.p = 1.0  # type: ignore[misc]
