"""The codec: what is declared is what travels, and nothing else is ever taken in."""

import json
import random
import resource
import tracemalloc
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedgist.core.codec import Codec, add_up, read_header, size, to_bytes
from fedgist.core.message import (
    Done,
    Params,
    WireError,
    float16,
    float32,
    int64,
    message,
    tag_of,
    uint8,
    wire,
)
from fedgist.core.rng import Rng
from fedgist.core.work import Place


@message
class Everything:
    """One field of each kind."""

    w: Params = wire(float32, shape="model", additive=True)
    p: float = wire(additive=True, paper=False)
    count: int
    images: Tensor = wire(float32, float16, uint8, shape=("n", "c", 2))
    labels: Tensor = wire(int64, shape=("n",), paper=False)


def everything(n: int = 3, c: int = 2, shapes: Any = None, dtype: torch.dtype = float32) -> Everything:
    rng = Rng(n)
    w = {name: rng(name).normal(*shape) for name, shape in (SHAPES if shapes is None else shapes).items()}
    images = rng("images").normal(n, c, 2)
    return Everything(w, 0.1, 2**40, images.to(dtype), torch.arange(n))


SHAPES = {"conv.weight": (2, 3), "bias": (), "empty": (0, 4)}
BOUNDS = {"model": SHAPES, "n": 5, "c": 4}
CODEC = Codec(BOUNDS)


shape_lists = st.dictionaries(
    st.text("abc.0", min_size=1, max_size=6),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    max_size=4,
)


@given(n=st.integers(0, 5), c=st.integers(0, 4), shapes=shape_lists, dtype=st.sampled_from([float32, float16, uint8]))
def test_round_trip(n: int, c: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """encode and decode give what the in-process path gives; the size is known beforehand; safetensors reads it."""
    codec = Codec({"model": shapes, "n": 5, "c": 4})
    sent = everything(n, c, shapes, dtype)
    data = codec.encode(sent)
    cost = size(Everything, codec.pack(sent))
    assert len(data) == cost.header + cost.payload <= codec.limit(Everything)
    assert cost.numbers == sum(t.numel() for t in sent.w.values()) + sent.images.numel() + 1
    assert safetensors.torch.load(data).keys() == codec.pack(sent).keys()
    received, local = codec.decode(Everything, data), codec.unpack(Everything, codec.pack(sent))
    for seen in (received, local):
        assert seen.w.keys() == sent.w.keys()
        assert all(torch.equal(seen.w[name], sent.w[name]) for name in sent.w)
        assert seen.images.dtype == (uint8 if dtype == uint8 else float32)
        assert torch.equal(seen.images, sent.images if dtype == uint8 else sent.images.float())
        assert torch.equal(seen.labels, sent.labels)
        assert seen.count == 2**40
        assert seen.p == torch.tensor(0.1).item()  # float32 on the wire


def test_done_costs_its_header() -> None:
    cost = size(Done, CODEC.pack(Done()))
    assert (cost.payload, cost.numbers) == (0, 0)
    assert len(CODEC.encode(Done())) == cost.header > 0
    assert isinstance(CODEC.decode(Done, CODEC.encode(Done())), Done)


def test_a_message_shares_nothing_with_its_sender() -> None:
    sent = everything()
    packed = CODEC.pack(sent)
    sent.images.zero_()
    sent.w["conv.weight"].zero_()
    assert packed["images"].abs().sum() > 0
    assert packed["w/conv.weight"].abs().sum() > 0


def test_what_is_summed_at_once_need_not_be_copied() -> None:
    """Additive fields may be the sender's own, visible fields never are, and all is checked and cast as ever."""
    sent = everything()
    packed, summed = CODEC.pack(sent), CODEC.pack(sent, summed=True)
    assert list(summed) == list(packed)
    assert all(summed[name].dtype == leaf.dtype and torch.equal(summed[name], leaf) for name, leaf in packed.items())
    assert summed["w/conv.weight"].data_ptr() == sent.w["conv.weight"].data_ptr()
    assert summed["images"].data_ptr() != sent.images.data_ptr()
    with pytest.raises(WireError, match=r"w/bias.*shape"):
        CODEC.pack(everything(shapes={**SHAPES, "bias": (1,)}), summed=True)


@pytest.mark.parametrize("dtype", [float32, int64])
def test_a_sum_shares_nothing_with_its_addends(dtype: torch.dtype) -> None:
    sent = Whole(torch.ones(2, dtype=dtype))
    total = add_up(Whole, [Codec({"n": 2}).pack(sent, summed=True)])["g"]
    sent.g.zero_()
    assert total.tolist() == [1, 1]


def test_a_form_that_has_passed_lets_no_other_through() -> None:
    """What was checked before is not checked again; what does not fit is refused however often it comes."""
    codec = Codec(BOUNDS)
    for _ in range(2):
        codec.pack(everything(n=3))
        with pytest.raises(WireError, match="n = 6"):
            codec.pack(everything(n=6))
    with pytest.raises(WireError, match="shape"):
        codec.pack(everything(n=3, shapes={**SHAPES, "bias": (1,)}))
    with pytest.raises(WireError, match="n = 3"):
        Codec({**BOUNDS, "n": 2}).pack(everything(n=3))


def test_a_receiver_computes_in_its_own_dtype() -> None:
    received = Codec(BOUNDS, Place(dtype=torch.float64)).decode(Everything, CODEC.encode(everything()))
    assert received.images.dtype == received.w["bias"].dtype == torch.float64
    assert received.labels.dtype == int64


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"images": torch.zeros(6, 2, 2), "labels": torch.arange(6)}, "n = 6"),
        ({"images": torch.zeros(3, 2, 3)}, "images"),
        ({"images": torch.zeros(3, 2)}, "images"),
        ({"labels": torch.arange(2)}, "labels"),  # n is 3 elsewhere in the message
        ({"w": {"bias": torch.tensor(1.0)}}, "conv.weight"),
        ({"w": {**everything().w, "more": torch.tensor(1.0)}}, "more"),
    ],
)
def test_what_was_not_declared_is_not_sent(change: dict[str, Any], where: str) -> None:
    sent = Everything(**{**vars(everything()), **change})
    with pytest.raises(WireError, match=where):
        CODEC.pack(sent)


def test_a_field_without_bounds_is_a_bug_not_a_message() -> None:
    with pytest.raises(TypeError, match="no template 'model'"):
        Codec({"n": 5, "c": 4}).pack(everything())
    with pytest.raises(TypeError, match="no bound for the dimension 'c'"):
        Codec({"model": SHAPES, "n": 5}).pack(everything())


def corrupt(data: bytes, how: random.Random) -> bytes:
    """One of many ways in which bytes go wrong."""
    kind = how.randrange(8)
    changed = bytearray(data)
    if kind == 0:
        return bytes(changed[: how.randrange(len(data))])
    if kind == 1:
        return bytes(changed) + how.randbytes(how.randrange(1, 50))
    if kind == 2:
        for _ in range(how.randrange(1, 20)):
            changed[how.randrange(len(data))] = how.randrange(256)
        return bytes(changed)
    if kind == 3:
        changed[:8] = how.choice([0, 1, 2**31, 2**63, len(data), len(data) - 8]).to_bytes(8, "little")
        return bytes(changed)
    if kind == 4:
        return how.randbytes(how.randrange(200))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    name = how.choice([name for name in header if name != "__metadata__"])
    if kind == 5:
        header[name][how.choice(["shape", "data_offsets", "dtype"])] = how.choice(
            [None, [], [-1], [2**62, 2], [1.5], "F32", "F64", [0, 2**40], {"a": 1}, [True]]
        )
    elif kind == 6:
        header[how.choice(["extra", name + "x"])] = header.pop(name)
    else:
        header["__metadata__"] = how.choice([{}, {"fedgist": "other.Type"}, None, [], {"fedgist": 1}])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def test_ten_thousand_corrupted_messages_are_refused() -> None:
    """Each is refused with a WireError or, if only values changed, decoded within the declared shapes; never a crash.

    The memory taken meanwhile stays at the size of the message: claims of gigabytes in a header allocate nothing.
    """
    how = random.Random(0)
    data = CODEC.encode(everything())
    refused = 0
    tracemalloc.start()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10_000):
        try:
            received = CODEC.decode(Everything, corrupt(data, how))
        except WireError:
            refused += 1
        else:
            assert {name: tuple(t.shape) for name, t in received.w.items()} == SHAPES
            assert received.images.shape == (3, 2, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 8_000 < refused < 10_000
    assert peak < 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 50_000  # kilobytes


LARGE = Codec({"model": {"w": (100_000,)}})


@message
class Weights:
    """A message of which the declaration allows 400,128 bytes, all but 128 of them numbers."""

    w: Params


def with_header(text: str, after: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + after


def test_a_header_is_no_longer_than_the_declaration_makes_it() -> None:
    """Parsed, one as long as the numbers may be takes 25 times its size of memory."""
    least = LARGE.encode(Weights({"w": torch.zeros(100_000)}))
    assert len(least) == LARGE.limit(Weights) == 400_128 and LARGE.decode(Weights, least).w["w"].shape == (100_000,)
    data = with_header('{"a":[' + ",".join(["{}"] * 130_000) + "]}")
    tracemalloc.start()
    with pytest.raises(WireError, match="a header of 390,015 bytes, at most 128"):
        LARGE.decode(Weights, data)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


@pytest.mark.parametrize("shape", [["1"] * 65, ["0"] + ["9" * 4000] * 90, ["9" * 19, "0"]])
def test_a_shape_that_cannot_be_is_not_multiplied(shape: list[str]) -> None:
    """Ninety numbers of 4,000 digits take a second to multiply, ten times as many minutes."""
    entry = f'"w/w":{{"dtype":"F32","shape":[{",".join(shape)}],"data_offsets":[0,{4 * ("0" not in shape)}]}}'
    text = f'{{"__metadata__":{{"fedgist":"{tag_of(Weights)}"}},{entry}}}'
    with pytest.raises(WireError, match="w/w: malformed header"):
        read_header(Weights, with_header(text, bytes(4 * ("0" not in shape))), 1_000_000)


def test_a_deeply_nested_header_is_refused() -> None:
    text = b"[" * 400
    with pytest.raises(WireError):
        CODEC.decode(Everything, len(text).to_bytes(8, "little") + text)


def test_a_name_that_occurs_twice_is_refused() -> None:
    data = CODEC.encode(Done())
    text = b'{"__metadata__":{"fedgist":"message.Done"},"__metadata__":{"fedgist":"message.Done"}}'
    assert CODEC.decode(Done, data) is not None
    with pytest.raises(WireError):
        Codec({}).decode(Done, len(text).to_bytes(8, "little") + text)


def test_too_many_bytes_are_refused_unread() -> None:
    with pytest.raises(WireError, match="at most"):
        CODEC.decode(Done, bytes(10_000))


def test_the_sum_of_additive_fields() -> None:
    """Σ over replies, in float64: 1 + 2⁻²⁴ + 2⁻²⁴ survives, which float32 would lose one addend at a time."""
    tiny = 2.0**-24
    parts = [
        CODEC.pack(
            Everything({**everything().w, "bias": torch.tensor(value)}, 1.0, 1, torch.zeros(1, 1, 2), torch.zeros(1))
        )
        for value in (1.0, tiny, tiny)
    ]
    total = add_up(Everything, parts)
    assert total.keys() == {"w/conv.weight", "w/bias", "w/empty", "p"}  # visible fields are not summed
    assert total["w/bias"].item() == 1.0 + 2 * tiny
    assert total["p"].item() == 3.0
    values = CODEC.values(Everything, total, additive=True)
    assert values["w"]["bias"].dtype == float32
    assert values["p"] == 3.0


@message
class Gradient:
    """An additive field whose size may vary between exchanges, but not within one."""

    g: Tensor = wire(float16, shape=("n",), additive=True)


def test_additive_fields_must_have_one_shape() -> None:
    codec = Codec({"n": 5})
    with pytest.raises(WireError, match="one shape"):
        add_up(Gradient, [codec.pack(Gradient(torch.zeros(n))) for n in (2, 3)])


@message
class Rounded:
    """An additive field that may travel in whole numbers."""

    g: Tensor = wire(float32, uint8, shape=("n",), additive=True)


def test_whole_numbers_are_summed_whole_and_with_others_in_double() -> None:
    codec = Codec({"n": 5})
    whole, tiny = torch.full((1,), 200, dtype=uint8), torch.full((1,), 2.0**-24)
    parts = {dtype: codec.pack(Rounded(value)) for dtype, value in {uint8: whole, float32: tiny}.items()}
    total = add_up(Rounded, [parts[uint8]] * 2)["g"]
    assert (total.dtype, total.item()) == (int64, 400)
    for order in ((uint8, float32, uint8), (float32, uint8, uint8)):
        assert add_up(Rounded, [parts[dtype] for dtype in order])["g"].item() == 400 + 2.0**-24


@message
class Whole:
    """An additive field that may travel as it is summed."""

    g: Tensor = wire(float32, int64, shape=("n",), additive=True)


@message
class Numbers:
    """Single numbers."""

    p: float = wire(additive=True)
    count: int = wire(int64, additive=True)


def test_numbers_are_summed_one_after_the_other() -> None:
    """1 + 2⁻⁵³ + 2⁻⁵³ is 1 in float64, in this order; a sum that carries what it lost would differ. Ints are exact."""
    parts = [CODEC.pack(Numbers(p, 2**53 + 1)) for p in (1.0, 2.0**-53, 2.0**-53)]
    total = add_up(Numbers, parts)
    assert (total["p"].dtype, total["p"].item()) == (torch.float64, 1.0)
    assert (total["count"].dtype, total["count"].item()) == (int64, 3 * 2**53 + 3)
    assert add_up(Numbers, parts[::-1])["p"].item() == 1.0 + 2.0**-52


def test_a_size_depends_on_all_that_travels() -> None:
    """Equal leaves under another name have another header, in another dtype another payload."""
    codec = Codec({"n": 5})
    leaves = codec.pack(Rounded(torch.zeros(3)))
    assert size(Rounded, leaves) == size(Rounded, codec.pack(Rounded(torch.ones(3))))
    assert size(Rounded, leaves).payload == 12
    assert size(Rounded, codec.pack(Rounded(torch.zeros(3, dtype=uint8)))).payload == 3
    for cls in (Rounded, Gradient):
        assert size(cls, leaves).header + 12 == len(to_bytes(cls, leaves))
    assert size(Everything, {"labels": leaves["g"]}).numbers == 0
    assert size(Everything, {"images": leaves["g"]}).numbers == 3


def test_half_precision_is_summed_in_double() -> None:
    codec = Codec({"n": 5})
    total = add_up(Gradient, [codec.pack(Gradient(torch.full((1,), 60_000.0)))] * 3)
    assert total["g"].item() == 3 * torch.tensor(60_000.0).half().item()  # float16 itself ends at 65,504


@message
class Wide:
    """A field that may travel as float64, and a sum of it."""

    seen: Tensor = wire(torch.float64, float32, shape=(1,))
    total: Tensor = wire(torch.float64, float32, shape=(1,), additive=True)


@pytest.mark.parametrize("dtype", [torch.float64, float32])
def test_what_may_be_float64_is_received_as_it_came(dtype: torch.dtype) -> None:
    """By an engine that computes in float32 too; the sum of 1 and 2⁻⁴⁰ needs 41 bits, in whichever dtype they came."""
    one, little = (
        Wide(torch.full((1,), value, dtype=dtype), torch.full((1,), value, dtype=dtype)) for value in (1, 2**-40)
    )
    data = CODEC.encode(little)
    assert (b"F64" in data) == (dtype == torch.float64)
    assert CODEC.decode(Wide, data).seen.dtype == dtype and CODEC.encode(CODEC.decode(Wide, data)) == data
    total = add_up(Wide, [CODEC.pack(one), CODEC.pack(little)])
    assert CODEC.values(Wide, total, additive=True)["total"].item() == 1 + 2**-40
