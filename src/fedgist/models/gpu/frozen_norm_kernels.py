"""Triton kernels of `frozen_norm`: a program works on POSITIONS pixels, or squares of the pooling, and BLOCK channels.

COUNT layers are computed: 1 is the norm, 2 norm and ReLU, 3 norm, ReLU and pooling. All tensors lie channels last. As
heights are even where there is pooling, all images are one high one: line l of its squares holds rows 2l and 2l + 1.
"""

import triton
import triton.language as tl

from fedgist.models.gpu.frozen_conv_kernels import larger, largest, to_squares


@triton.jit
def tile(positions, channels, POSITIONS: tl.constexpr, BLOCK: tl.constexpr):
    """The positions and channels of a program; which channels there are, and which of the numbers."""
    position = (tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS))[:, None]
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    known = channel < channels
    return position, channel, known, (position < positions) & known


@triton.jit
def place_of(pixel, channel, channels):
    return pixel.to(tl.int64) * channels + channel


@triton.jit
def corner_of(square, columns):
    """The upper left pixel of each square, where a line has so many columns of squares."""
    return 4 * columns * (square // columns) + 2 * (square % columns)


@triton.jit
def load_square(x, square, channel, inside, columns, channels):
    """The four pixels of every square."""
    corner, below = x + place_of(corner_of(square, columns), channel, channels), 2 * columns * channels
    a, b = tl.load(corner, inside, 0.0), tl.load(corner + channels, inside, 0.0)
    return a, b, tl.load(corner + below, inside, 0.0), tl.load(corner + below + channels, inside, 0.0)


@triton.jit
def load_norm(gammas, betas, running_means, running_variances, channel, known, epsilon):
    """Three numbers a channel: the norm takes x to (x − running mean) · scale + beta."""
    scale = tl.load(gammas + channel, known, 0.0) / tl.sqrt(tl.load(running_variances + channel, known, 1.0) + epsilon)
    return tl.load(running_means + channel, known, 0.0), scale, tl.load(betas + channel, known, 0.0)


@triton.jit
def forward(
    x, gammas, betas, running_means, running_variances, out, shares, positions, columns, channels, epsilon,
    COUNT: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`columns` are those of `out`.

    `shares` [programs, 2, channels] are each program's in the means of x − running mean and of its square.
    """
    position, channel, known, inside = tile(positions, channels, POSITIONS, BLOCK)
    place = place_of(position, channel, channels)
    if COUNT == 3:
        a, b, c, d = load_square(x, position, channel, inside, columns, channels)
    else:
        a = tl.load(x + place, inside, 0.0)
    running_mean, scale, beta = load_norm(gammas, betas, running_means, running_variances, channel, known, epsilon)
    a -= running_mean
    if COUNT == 3:
        b, c, d = b - running_mean, c - running_mean, d - running_mean
        values, shifted, squared = 4 * positions, a + b + c + d, a * a + b * b + c * c + d * d
        made = largest(a * scale + beta, b * scale + beta, c * scale + beta, d * scale + beta)
    else:
        values, shifted, squared, made = positions, a, a * a, a * scale + beta
    tl.store(out + place, larger(made, 0.0) if COUNT > 1 else made, inside)
    own = shares + tl.program_id(0) * 2 * channels + channel
    tl.store(own, tl.sum(tl.where(inside, shifted, 0.0), 0)[None, :] / values, known)
    tl.store(own + channels, tl.sum(tl.where(inside, squared, 0.0), 0)[None, :] / values, known)


@triton.jit
def backward(
    x, gammas, betas, running_means, running_variances, means, to_out, to_means, to_variances, to_x,
    positions, columns, channels, epsilon, COUNT: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What entered is read and normalised again: cheaper than to keep it."""
    position, channel, known, inside = tile(positions, channels, POSITIONS, BLOCK)
    place = place_of(position, channel, channels)
    if COUNT == 3:
        a, b, c, d = load_square(x, position, channel, inside, columns, channels)
    else:
        a = tl.load(x + place, inside, 0.0)
    arrived = tl.load(to_out + place, inside, 0.0)
    running_mean, scale, beta = load_norm(gammas, betas, running_means, running_variances, channel, known, epsilon)
    arrived *= scale
    values = 4 * positions if COUNT == 3 else positions
    mean, level = tl.load(means + channel, known, 0.0), tl.load(to_means + channel, known, 0.0) / values
    slope = 2 * tl.load(to_variances + channel, known, 0.0) / values
    if COUNT == 3:
        to_a, to_b, to_c, to_d = to_squares(
            (a - running_mean) * scale + beta, (b - running_mean) * scale + beta,
            (c - running_mean) * scale + beta, (d - running_mean) * scale + beta, arrived,
        )  # fmt: skip
        corner, below = to_x + place_of(corner_of(position, columns), channel, channels), 2 * columns * channels
        tl.store(corner, to_a + level + slope * (a - mean), inside)
        tl.store(corner + channels, to_b + level + slope * (b - mean), inside)
        tl.store(corner + below, to_c + level + slope * (c - mean), inside)
        tl.store(corner + below + channels, to_d + level + slope * (d - mean), inside)
    else:
        if COUNT == 2:
            arrived = tl.where((a - running_mean) * scale + beta > 0, arrived, 0.0)
        tl.store(to_x + place, arrived + level + slope * (a - mean), inside)
