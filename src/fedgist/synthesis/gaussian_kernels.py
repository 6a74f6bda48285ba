"""The Triton kernel of `gaussian`: `rng.normal` in registers, where torch takes forty passes over memory."""

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """`rng._mix`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(start, counter):
    """`rng.uniform`, of a mixed seed."""
    bits = mix(start + counter * -0x61C8864680B583EB)
    return (((bits >> 41) & 0x7FFFFF).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23


@triton.jit
def normal(seeds, out, count, half, BLOCK: tl.constexpr):
    """out [seeds, count]: of each pair of uniform numbers, `half` apart, two normal ones as far apart."""
    seed = tl.program_id(1).to(tl.int64)
    start = mix(tl.load(seeds + seed))
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    radius = tl.sqrt(-2.0 * tl.log(uniform(start, place)))
    angle = 6.283185307179586 * uniform(start, half + place)
    out += seed * count + place
    tl.store(out, radius * tl.cos(angle), place < half)
    tl.store(out + half, radius * tl.sin(angle), (place < half) & (half + place < count))
